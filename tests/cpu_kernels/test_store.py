"""Packing: what goes in comes out, for every format and any shape."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import FORMATS, ExpertStore, plain

SHAPES = st.tuples(st.integers(1, 80), st.integers(1, 150))


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_unpack_inverts_pack(name, shape, seed):
    f = FORMATS[name]
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values, scales = plain.quantize(f, w)
    data = plain.pack(f, values, scales)
    assert data.size == f.nbytes(*shape)
    back, s = plain.unpack(f, data, *shape)
    assert np.array_equal(back, values)
    assert (s is None) == (scales is None) and (s is None or np.array_equal(s, scales))


@pytest.mark.parametrize(("name", "bound"), [("f32", 0.0), ("bf16", 2.5e-3), ("int8_g32", 8e-3), ("int4_g32", 0.12)])
def test_quantization_error_is_that_of_the_format(name, bound):
    w = np.random.default_rng(0).standard_normal((96, 320)).astype(np.float32)
    store = ExpertStore(name, 1, 320, 96)
    store.put(0, w, w, np.ascontiguousarray(w.T))
    for which, m in (("gate", w), ("up", w), ("down", w.T)):
        error = np.linalg.norm(store.dequantize(0, which) - m) / np.linalg.norm(m)
        assert error <= bound, (which, error)


def test_int8_codes_and_bf16_scales_are_kept_exactly():
    rng = np.random.default_rng(1)
    store = ExpertStore("int8_g32", 2, 72, 40)
    codes = rng.integers(-128, 128, (40, 72), dtype=np.int8)
    scales = plain.bf16_to_f32(plain.f32_to_bf16(rng.standard_normal((40, 3)).astype(np.float32)))
    store.put_exact(1, "up", codes, scales)
    assert np.array_equal(store.dequantize(1, "up"), codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)[:, :72])
    assert not store.record(0).any() and not store.section(1, "gate").any()


def test_scales_that_the_format_cannot_hold_are_refused():
    store = ExpertStore("int8_g32", 1, 32, 32)
    with pytest.raises(ValueError, match="scales"):
        store.put_exact(0, "up", np.zeros((32, 32), np.int8), np.full((32, 1), 1.001, np.float32))


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"gate": np.zeros((3, 3), np.float32)}, ValueError, "gate: shape"),
    ({"up": np.zeros((40, 72), np.float64)}, TypeError, "up: dtype"),
    ({"down": np.zeros((72, 40), np.uint16)}, TypeError, "down: dtype"),
    ({"up": np.full((40, 72), np.nan, np.float32)}, ValueError, "up: NaN"),
    ({"gate": None}, ValueError, "gate: missing"),
    ({"e": 2}, ValueError, "expert 2"),
])
def test_wrong_arguments_are_named(change, error, words):
    good = {"e": 0, "gate": np.zeros((40, 72), np.float32), "up": np.zeros((40, 72), np.float32), "down": np.zeros((72, 40), np.float32)}
    with pytest.raises(error, match=words):
        ExpertStore("int4_g32", 2, 72, 40).put(**good | change)


def test_buffers_are_checked():
    raw = np.zeros(1 << 20, np.uint8)
    skip = -raw.ctypes.data % 64
    ExpertStore("bf16", 2, 64, 64, buffer=raw[skip:])
    for bad in (raw[skip + 1:], raw[skip:skip + 64], raw[skip::2], raw.view(np.int8)):
        with pytest.raises((TypeError, ValueError), match="buffer"):
            ExpertStore("bf16", 2, 64, 64, buffer=bad)
