"""Packing: what goes in comes out, for every format and any shape."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import FORMATS, ExpertStore, codes, plain

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
    if f.coded:
        codes.check(f, values, scales)
        assert np.array_equal(codes.values(f, back, s), codes.values(f, values, scales))
    else:
        assert (s is None) == (scales is None) and (s is None or np.array_equal(s, scales))


@pytest.mark.parametrize(("name", "bound"), [("f32", 0.0), ("bf16", 2.5e-3), ("int8_g32", 8e-3), ("int4_g32", 0.083), ("f16", 3e-4), ("mxfp4", 0.13),
                                               ("nvfp4", 0.1), ("int4_g64z", 0.1), ("int4_g32z", 0.083), ("q8_0", 6e-3), ("int8_g64", 7e-3), ("int8_g64z", 6e-3),
                                               ("fp8", 0.027), ("q4_k", 0.083), ("q5_k", 0.04), ("q6_k", 0.022)])
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
    q = rng.integers(-128, 128, (40, 72), dtype=np.int8)
    scales = plain.bf16_to_f32(plain.f32_to_bf16(rng.standard_normal((40, 3)).astype(np.float32)))
    store.put_exact(1, "up", q, scales)
    assert np.array_equal(store.dequantize(1, "up"), q.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)[:, :72])
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


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("tag", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(32, 64), (40, 72), (3, 130), (17, 31)])
def test_packing_kernels_store_what_the_twin_chooses(name, tag, shape):
    inter, hidden = shape
    rng = np.random.default_rng(5)
    w = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)
    w[0] = 0
    w[1 % inter, : hidden // 2] = 1e-36
    given = {"f32": w, "f16": w.astype(np.float16), "bf16": plain.f32_to_bf16(w)}[tag]
    store = ExpertStore(name, 2, hidden, inter)
    store.buffer[:] = 0xAB
    store.put(1, given, given, np.ascontiguousarray(given.T), dtype=tag)
    assert (store.record(0) == 0xAB).all()
    for which, m in (("gate", given), ("down", given.T)):
        want = plain.quantize(store.format, plain.as_f32(np.ascontiguousarray(m), tag))
        rows = inter if which == "down" else 64 * -(-inter // 64)
        full = plain.pack(store.format, *want).reshape(-1)
        got = store.section(1, which)
        values, _scales = plain.unpack(store.format, got, rows if which == "gate" else hidden, m.shape[1])
        rest = plain.dequantize(store.format, got, rows if which == "gate" else hidden, m.shape[1])[m.shape[0]:]
        assert not rest.any()
        if name in ("f32", "bf16", "f16") or FORMATS[name].coded:
            assert np.array_equal(got[:full.size], full)
        else:                                        # sums in another order may choose another of two equal candidates
            assert (values[:m.shape[0]] != want[0]).mean() < 0.02
            x = plain.as_f32(np.ascontiguousarray(m), tag).astype(np.float64)
            twin = plain.dequantize(store.format, full, *m.shape)
            ours = store.dequantize(1, which)
            assert np.linalg.norm(ours - x) <= 1.001 * np.linalg.norm(twin - x) + 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tag", ["f32", "f16"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_weights_that_are_not_finite_are_refused(name, tag, bad):
    w = np.ones((40, 72), np.float32 if tag == "f32" else np.float16)
    w[39, 71] = bad
    with pytest.raises(ValueError, match="gate: NaN"):
        ExpertStore(name, 1, 72, 40).put(0, w, np.ones_like(w), np.ones((72, 40), np.float32 if tag == "f32" else np.float16))


def test_rows_of_a_larger_matrix_are_packed_in_place():
    big = np.random.default_rng(6).standard_normal((64, 300)).astype(np.float32)
    a, b = ExpertStore("int4_g32", 1, 128, 64), ExpertStore("int4_g32", 1, 128, 64)
    view, copy = big[:, 7:135], np.ascontiguousarray(big[:, 7:135])
    a.put(0, view, view, view.T)
    b.put(0, copy, copy, np.ascontiguousarray(copy.T))
    assert np.array_equal(a.record(0), b.record(0))


def put_exact(store, which, values, scales):
    if store.format.coded:
        store.put_exact(0, which, values, **scales)
    else:
        store.put_exact(0, which, values, scales)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g64z", "q4_k"])
def test_pairs_of_nibbles_are_stored_as_the_codes_they_hold(name):
    one, two = ExpertStore(name, 1, 130, 34), ExpertStore(name, 1, 130, 34)
    values, fields = plain.quantize(one.format, np.random.default_rng(8).standard_normal((34, 130)).astype(np.float32))
    one.put_exact(0, "up", values, **fields)
    two.put_exact(0, "up", values[:, ::2] | values[:, 1::2] << 4, **fields)
    assert np.array_equal(one.buffer, two.buffer) and one.section(0, "up").any()


def test_groups_of_files_may_span_several_of_a_tiles_own():
    rng = np.random.default_rng(9)
    store = ExpertStore("int4_g64z", 1, 512, 32)
    values, scales, zeros = (rng.integers(0, 16, (32, 512), np.uint8), rng.standard_normal((32, 4)).astype(np.float32), rng.integers(0, 17, (32, 4), np.uint8))
    store.put_exact(0, "up", values, scales, zeros=zeros)
    want = (values - np.repeat(zeros.astype(np.float64), 128, 1)) * np.repeat(scales.astype(np.float64), 128, 1)
    assert np.array_equal(store.dequantize(0, "up"), want)
    store.put_exact(0, "up", values, scales[:, :1], zeros=zeros[:, :1])
    assert np.array_equal(store.dequantize(0, "up"), (values.astype(np.float64) - zeros[:, :1]) * scales[:, :1])


@pytest.mark.parametrize(("name", "change", "words"), [
    ("mxfp4", {"scales": np.full((32, 2), 255, np.uint8)}, "scales: NaN"), ("mxfp4", {"codes": np.full((32, 64), 16, np.uint8)}, "codes: above 15"),
    ("mxfp4", {"scales": np.zeros((32, 3), np.uint8)}, "scales: shape"), ("mxfp4", {"zeros": np.zeros((32, 2), np.uint8)}, "fields: "),
    ("fp8", {"codes": np.full((32, 64), 0xFF, np.uint8)}, "codes: NaN"), ("fp8", {"scales": np.full((32, 1), np.inf, np.float32)}, "scales: NaN"),
    ("q4_k", {"minimums": np.full((32, 2), 64, np.uint8)}, "above 63"), ("q8_0", {"scales": np.full((32, 2), 1.0001, np.float32)}, "keeps fp16"),
    ("q8_0", {"codes": np.zeros((32, 64), np.uint8)}, "codes: uint8"),
])
def test_codes_and_fields_that_mean_nothing_are_named(name, change, words):
    store = ExpertStore(name, 1, 64, 32)
    values, fields = plain.quantize(store.format, np.zeros((32, 64), np.float32))
    given = {"codes": values, **fields} | change
    with pytest.raises(ValueError, match=words):
        store.put_exact(0, "up", **given)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("shape", [(32, 64), (40, 72), (3, 130), (17, 31)])
def test_exact_repacks_write_the_twins_bytes(name, shape):
    inter, hidden = shape
    rng = np.random.default_rng(7)
    store = ExpertStore(name, 1, hidden, inter)
    store.buffer[:] = 0xAB
    for which in ("gate", "up", "down"):
        values, scales = plain.quantize(store.format, rng.standard_normal(store.shape(which)).astype(np.float32))
        put_exact(store, which, values, scales)
        got, want = store.section(0, which), plain.pack(store.format, values, scales).reshape(-1)
        assert np.array_equal(got[:want.size], want)
        rows, cols = store.shape(which)
        if got.size > want.size:
            assert not plain.dequantize(store.format, got, 64 * -(-rows // 64), cols)[rows:].any()
