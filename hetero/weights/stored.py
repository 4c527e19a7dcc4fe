"""Tensors as they lie in a file: a name, a type tag, a shape, a byte range, and a read-only view; knows no container and no model.

Tags are the safetensors spellings (F32, BF16, F8_E4M3, I8, …); GGUF block types use their ggml names (Q4_K, …).
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero.errors import BadCheckpoint

DTYPES: dict[str, type] = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "F32": np.float32,
    "U64": np.uint64, "I64": np.int64, "F64": np.float64, "F8_E4M3FNUZ": np.uint8, "F8_E5M2FNUZ": np.uint8, "C64": np.complex64,
}
FLOATS = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
DAMAGED = "the file is damaged or its download is incomplete: delete it and fetch it again"


@dataclass(frozen=True)
class Stored:
    """One tensor of one file. `start` and `nbytes` are the byte range in the file; `shape` is outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


class Mapped:
    """One file, mapped read-only. Views stay valid while anybody holds them; `release` gives their pages back to the system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_READ)

    def raw(self, start: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], a read-only view. The range is checked against the file as it is now: a file cut after the check raises no SIGBUS."""
        if start + nbytes > self.nbytes or os.fstat(self.fd).st_size < start + nbytes:
            raise BadCheckpoint(f"{self.path}: bytes {start}..{start + nbytes} are past the end of the file", DAMAGED)
        return np.frombuffer(self.map, np.uint8, nbytes, start)

    def release(self, start: int, nbytes: int) -> None:
        """Drop the pages that lie wholly inside this range, here and in the page cache."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, (start + nbytes) // page * page
        if last > first:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)
            os.posix_fadvise(self.fd, first, last - first, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)


def typed(raw: np.ndarray, stored: Stored) -> np.ndarray:
    """The bytes as an array of the tensor's shape: BF16 and FP8 as their bit patterns (uint16, uint8). A copy only when it lies unaligned."""
    dtype = np.dtype(DTYPES[stored.dtype])
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return raw.view(dtype).reshape(stored.shape)


def to_f32(array: np.ndarray, tag: str) -> np.ndarray:
    """Any of the float tags as float32; exact for F16, BF16 and both FP8 kinds."""
    if tag == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if tag in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        return FP8[tag][array]
    if tag in FLOATS:
        return array.astype(np.float32)
    raise BadCheckpoint(f"type {tag} holds no floats")


def fp8_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """All 256 values of an 8-bit float (OCP 8-bit floating point specification, 2023): E4M3 has only NaN at S.1111.111, E5M2 is IEEE-like."""
    code = np.arange(256)
    sign = np.where(code & 128, -1.0, 1.0)
    e, m = (code >> mantissa_bits) & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    value = np.where(e == 0, np.ldexp(m / 2.0**mantissa_bits, 1 - bias), np.ldexp(1 + m / 2.0**mantissa_bits, e - bias))
    if exponent_bits == 5:
        value = np.where(e == 31, np.where(m == 0, np.inf, np.nan), value)
    else:
        value = np.where((code & 127) == 127, np.nan, value)
    return (sign * value).astype(np.float32)


E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)   # OCP microscaling formats 1.0: 2 ** (code - 127), 255 is NaN
FP8 = {"F8_E4M3": fp8_table(4, 3, 7), "F8_E5M2": fp8_table(5, 2, 15), "F8_E8M0": E8M0}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
