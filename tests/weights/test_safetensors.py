"""The safetensors reader: what the library writes is read back, and whatever is damaged is named, without allocation."""
import json
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hetero.errors import BadCheckpoint
from hetero.weights.safetensors import read_header
from hetero.weights.stored import FP8, Mapped, to_f32, typed


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_what_the_library_writes_is_read_back_bit_for_bit(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(6, dtype=torch.int8).reshape(2, 3), "d": torch.randn(4, 4).half(),
               "e": torch.randn(9).to(torch.float8_e4m3fn), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"} and set(found) == set(tensors)
    file = Mapped(tmp_path / "x.safetensors")
    for name, want in tensors.items():
        s = found[name]
        got = typed(file.raw(s.start, s.nbytes), s)
        assert got.shape == tuple(want.shape)
        if s.dtype != "I8":
            assert np.array_equal(to_f32(got, s.dtype), want.float().numpy())
        else:
            assert np.array_equal(got, want.numpy())
    file.close()


def test_every_fp8_value_equals_torch():
    code = torch.arange(256, dtype=torch.uint8)
    for tag, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("F8_E8M0", torch.float8_e8m0fnu)):
        assert np.array_equal(FP8[tag], code.view(dtype).float().numpy(), equal_nan=True)


@pytest.mark.parametrize(("header", "data", "length", "words"), [
    ({}, b"", 1 << 60, "header bytes"),
    (b"{not json", b"", None, "not JSON"),
    (b"[" * 5000, b"", None, "not JSON"),
    (b"[1]", b"", None, "not a JSON object"),
    (b"\xff\xfe{}", b"", None, "not JSON"),
    ({"t": entry(0, 9)}, b"12345678", None, "bytes 68..77 are past the end of the file (76 bytes)"),
    ({"t": entry(0, 8, "F32", [3])}, b"12345678", None, "needs 12"),
    ({"t": entry(0, 8, "F32", [1 << 62, 1 << 62])}, b"12345678", None, "needs"),
    ({"t": entry(0, 8, "Q9")}, b"12345678", None, "unknown type"),
    ({"t": entry(0, 8, "U8", [-8])}, b"12345678", None, "shape"),
    ({"t": entry(0, 8, "U8", [True, 8])}, b"12345678", None, "shape"),
    ({"t": entry(0, 8, "U8", [1] * 99)}, b"12345678", None, "shape"),
    ({"t": {"dtype": "U8", "shape": [0], "data_offsets": [4, 3]}}, b"12345678", None, "byte range"),
    ({"t": {"dtype": "U8", "shape": [8]}}, b"12345678", None, "lacks"),
    ({"a": entry(0, 6), "b": entry(4, 8)}, b"12345678", None, "overlap"),
    ({"a": entry(0, 3), "b": entry(4, 8)}, b"12345678", None, "hole"),
    ({"a": entry(0, 4)}, b"12345678", None, "after the last tensor"),
    (b'{"a": 1, "a": 2}', b"", None, "twice"),
])
def test_a_damaged_file_is_named_with_tensor_and_range(tmp_path, header, data, length, words):
    path = write(tmp_path / "x.safetensors", header, data, length)
    with pytest.raises(BadCheckpoint) as e:
        read_header(path)
    assert words in e.value.message and str(path) in e.value.message and "\n" not in e.value.message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 16), data=st.data())
def test_a_mutated_file_is_read_or_refused_and_nothing_else(tmp_path, where, value, cut, data):
    rng = np.random.default_rng(0)
    header = {f"t{i}": entry(i * 64, i * 64 + 64, "F32", [4, 4]) for i in range(8)}
    raw = bytearray(struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + rng.bytes(512))
    raw[where % len(raw)] = value
    raw = raw[: len(raw) * cut // 16] if cut else raw
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        for s in read_header(path)[0].values():
            assert s.start + s.nbytes <= len(raw)
    except BadCheckpoint as e:
        assert "m.safetensors" in e.message
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_cut_after_it_was_opened_raises_an_error_and_no_signal(tmp_path):
    save_file({"a": torch.zeros(100_000)}, tmp_path / "x.safetensors")
    s = read_header(tmp_path / "x.safetensors")[0]["a"]
    file = Mapped(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("r+b") as f:
        f.truncate(1000)
    with pytest.raises(BadCheckpoint, match="past the end"):
        file.raw(s.start, s.nbytes)
    file.close()
