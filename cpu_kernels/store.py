"""`ExpertStore`: the packed weights of one layer's experts, one contiguous record (gate | up | down) per expert, in memory given by the
caller or its own. Knows no activation and no thread.
"""
from typing import Any

import numpy as np

from . import pack, plain
from .codes import Fields, check
from .formats import COLS, GROUP, ORDERED, ROWS, Format, expert_nbytes, formats_of, is_ordered, order_at, padded

Array = np.ndarray[Any, Any]
NAMES = ("gate", "up", "down")
_TAGS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def aligned(nbytes: int, align: int = 64) -> Array:
    """A zeroed uint8 array whose first byte is at a multiple of `align`."""
    raw = np.zeros(nbytes + align, np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip:skip + nbytes]


def checked_float(name: str, w: Any, shape: tuple[int, int], dtype: str | None) -> str:
    """The dtype tag of a float matrix; ValueError or TypeError naming the argument when shape or dtype is wrong."""
    if not isinstance(w, np.ndarray):
        raise TypeError(f"{name}: a numpy array is needed, not {type(w).__name__}")
    tag = dtype or {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}.get(w.dtype, "")
    if tag not in _TAGS or w.dtype != _TAGS[tag]:
        raise TypeError(f"{name}: dtype {w.dtype} with tag {dtype!r}; float32, float16, or uint16 with dtype=\"bf16\" are taken")
    if w.shape != shape:
        raise ValueError(f"{name}: shape {w.shape}, expected {shape}")
    return tag


class ExpertStore:
    """Records of `experts` experts of an FFN hidden → inter → hidden; `format`: as `formats_of` reads it. `buffer`: uint8
    [≥ experts · record_nbytes], contiguous and 64 B aligned (a view of an arena); without one the store allocates. Ungated experts have no gate."""

    def __init__(self, format: str | Format, experts: int, hidden: int, inter: int, gated: bool = True, buffer: Array | None = None) -> None:
        for name, n in (("experts", experts), ("hidden", hidden), ("inter", inter)):
            if n < 1:
                raise ValueError(f"{name}: {n}, at least 1 is needed")
        self.format, self.down = formats_of(format)                  # of gate and up; of down
        self.experts, self.hidden, self.inter, self.gated = experts, hidden, inter, gated
        self.record_nbytes = expert_nbytes(format, hidden, inter, gated)
        self.order_at = order_at(format, hidden, inter, gated) if is_ordered(format) else 0
        need = experts * self.record_nbytes
        if buffer is None:
            buffer = aligned(need)
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise TypeError("buffer: a writable contiguous one-dimensional uint8 array is needed")
        if buffer.nbytes < need:
            raise ValueError(f"buffer: {buffer.nbytes} bytes, {need} are needed")
        if buffer.ctypes.data % 64:
            raise ValueError("buffer: its first byte is not 64 B aligned")
        self.buffer = buffer[:need]
        if self.orders is not None:
            self.orders[:] = np.arange(hidden, dtype=np.int32)

    @property
    def form(self) -> str:
        """The name of the format, or both names, and whether there are orders."""
        return (self.format.name if self.format == self.down else f"{self.format.name}+{self.down.name}") + ORDERED * bool(self.order_at)

    @property
    def orders(self) -> Array | None:
        """int32 [experts, hidden], 0, 1, … until written: column i of packed gate and up of e multiplies x[orders[e, i]]. None: has none."""
        records = self.buffer.reshape(self.experts, -1)
        return records[:, self.order_at:self.order_at + 4 * self.hidden].view(np.int32) if self.order_at else None

    def format_for(self, name: str) -> Format:
        """The format of "gate", "up" or "down"."""
        return self.down if name == "down" else self.format

    @property
    def address(self) -> int:
        """Of the first record; record e is at address + e · record_nbytes."""
        return int(self.buffer.ctypes.data)

    def record(self, e: int) -> Array:
        """The bytes of one expert: what is copied to a device and unpacked there."""
        if not 0 <= e < self.experts:
            raise ValueError(f"e: expert {e} of {self.experts}")
        return self.buffer[e * self.record_nbytes:(e + 1) * self.record_nbytes]

    def shape(self, name: str) -> tuple[int, int]:
        """[rows, cols] of "gate", "up" or "down" as the model has them."""
        if name not in NAMES[not self.gated:]:
            raise ValueError(f"name: {name!r} is not a matrix of this store")
        return (self.hidden, self.inter) if name == "down" else (self.inter, self.hidden)

    def section(self, e: int, name: str) -> Array:
        """The packed bytes of one matrix of one expert (gate and up have their rows padded to 64)."""
        self.shape(name)
        one = self.format.nbytes(padded(self.inter, COLS), self.hidden)
        start = {"gate": 0, "up": one * self.gated, "down": one * (1 + self.gated)}[name]
        record = self.record(e)
        return record[start:start + self.down.nbytes(self.hidden, self.inter)] if name == "down" else record[start:start + one]

    def put(self, e: int, gate: Array | None, up: Array, down: Array, dtype: str | None = None) -> None:
        """Quantizes float matrices gate, up [inter, hidden] and down [hidden, inter] into the record, in place. float32, float16, or
        uint16 with dtype="bf16". `gate` is None when the store is not gated."""
        if (gate is not None) != self.gated:
            raise ValueError(f"gate: {'missing' if self.gated else 'given to a store that is not gated'}")
        given = [(n, w) for n, w in zip(NAMES, (gate, up, down), strict=True) if w is not None]
        for name, w in given:
            checked_float(name, w, self.shape(name), dtype)
        for name, w in given:
            self.put_float(e, name, w, dtype)

    def put_float(self, e: int, name: str, w: Array, dtype: str | None = None) -> None:
        """The same for one matrix."""
        self._pack(e, name, w, checked_float(name, w, self.shape(name), dtype))

    def put_exact(self, e: int, name: str, codes: Array, scales: Array | None = None, **more: Array) -> None:
        """Weights that arrive in this format's codes: repacked, never requantized. ValueError when they cannot be kept exactly.

        int8_g32: int8 [rows, cols]; int4_g32: uint8 0..15 with zero point 8 [rows, cols]; float scales [rows, ceil(cols/32)] whose
        values the format's scale dtype holds exactly. bf16: uint16 bits, f16: float16, f32: float32, no scales. Others: codes and fields as
        `codes` has them (zeros, minimums, supers, least, overall beside scales); four-bit codes also as pairs [rows, cols / 2].
        """
        shape, format = self.shape(name), self.format_for(name)
        if format.coded:
            self._put_codes(e, name, codes, more if scales is None else {"scales": scales, **more})
            return
        want = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8_g32": np.int8, "int4_g32": np.uint8}[format.name]
        if codes.shape != shape or codes.dtype != want:
            raise ValueError(f"codes: {codes.dtype} {codes.shape}, expected {np.dtype(want)} {shape}")
        if (scales is None) != (not format.scale) or more:
            raise ValueError(f"scales: {'missing' if scales is None else 'or more given'} for format {format.name}")
        if scales is not None and scales.shape != (shape[0], -(-shape[1] // GROUP)):
            raise ValueError(f"scales: {scales.shape}, expected {(shape[0], -(-shape[1] // GROUP))}")
        if format.name == "int4_g32" and codes.size and int(codes.max()) > 15:
            raise ValueError("codes: above 15")
        if scales is None:
            self._pack(e, name, codes, format.name)
            return
        bits, codes, section = np.ascontiguousarray(plain.scale_bits(format, scales)), np.ascontiguousarray(codes), self.section(e, name)
        spare = aligned(pack.SPARE_NBYTES)
        pack.repacker(format.name)(codes.ctypes.data, bits.ctypes.data, *shape, bits.shape[1], section.ctypes.data,
                                        section.size // format.nbytes(ROWS, shape[1]), spare.ctypes.data)

    def _put_codes(self, e: int, name: str, codes: Array, fields: Fields) -> None:
        (rows, cols), format = self.shape(name), self.format_for(name)
        pairs = format.bits == 4 and cols % 2 == 0 and codes.shape == (rows, cols // 2)
        if codes.shape != (rows, cols) and not pairs:
            raise ValueError(f"codes: {codes.dtype} {codes.shape}, expected {(rows, cols)}")
        check(format, codes[:0] if pairs else codes, fields)
        pack.put_codes(format, codes, fields, cols, self.section(e, name))

    def _pack(self, e: int, name: str, w: Array, tag: str) -> None:
        if not pack.into(self.format_for(name), w, tag, self.section(e, name)):
            raise ValueError(f"{name}: NaN or infinity in the weights of expert {e}")

    def dequantize(self, e: int, name: str) -> Array:
        """float64 [rows, cols] of one matrix: what the kernels multiply by, columns as they are packed."""
        rows, cols = self.shape(name)
        full = rows if name == "down" else padded(rows, COLS)
        return plain.dequantize(self.format_for(name), self.section(e, name), full, cols)[:rows]
