"""AMX tiles: permission, configuration, and the 32 × 32 block product that prefill is made of, with an emulation that runs anywhere.

Knows no weight format and no thread. A product multiplies 32 rows of activations (two A tiles) with 32 rows of weights (two B tiles)
into four accumulators: `start` (zeros or what stands at `c`), any number of `product`, `finish` (to `c`). `c` is a 32 × 32 block, rows of
128 B. bf16: one product is 32 columns, int8: 64. A tiles: 16 rows of 64 B. B tiles: line r of 64 B holds, for each of 16 weight rows, columns
2r, 2r + 1 (bf16) or 4r .. 4r + 3 (int8). Source: Intel 64 and IA-32 Architectures Software Developer's Manual vol. 1, ch. 18.

The emulation keeps its accumulators at `c` itself, which the tile body ignores until `finish`.
"""
import ctypes
import functools
from typing import Any

import numpy as np

from .lanes import F32, I8, I32, I64, PTR, Builder, Value, cgutils, const, declare, fma, ir, load, op, plus, spread, store, vec

BLOCK_NBYTES = 32 * 128
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
VOID = ir.VoidType()


@functools.cache
def permitted() -> bool:
    """Asks Linux once for the right to use tile registers; threads that exist already get it too. False: this kernel or VM refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(*(ctypes.c_long(v) for v in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)))) == 0


@functools.cache
def configuration() -> np.ndarray[Any, Any]:
    """What ldtilecfg reads: palette 1, eight tiles of 16 rows × 64 B. uint8 [64], 64 B aligned."""
    raw = np.zeros(128, np.uint8)
    skip = -raw.ctypes.data % 64
    c = raw[skip:skip + 64]
    c[0] = 1
    c[16:32].view(np.uint16)[:] = 64
    c[48:56] = 16
    return c


# ---- the tile body: accumulators are tiles 0..3, A tiles 4 and 5, B tiles 6 and 7 -------------------------------------------------

def _tile(b: Builder, name: str, *tiles: int) -> None:
    b.call(declare(b, f"llvm.x86.{name}", VOID, *[I8] * len(tiles)), [const(I8, t) for t in tiles])


def _move(b: Builder, name: str, tile: int, address: Value, offset: int, stride: int) -> None:
    f = declare(b, f"llvm.x86.{name}", VOID, I8, PTR, I64)
    b.call(f, [const(I8, tile), b.inttoptr(plus(b, address, offset), PTR), const(I64, stride)])


def _corner(k: int) -> int:
    """Where accumulator k = 2 · (A half) + (B half) lies in a block."""
    return 2048 * (k >> 1) + 64 * (k & 1)


class Amx:
    """Emitters on tile registers."""

    @staticmethod
    def zero(b: Builder, c: Value) -> None:
        for k in range(4):
            _tile(b, "tilezero", k)

    @staticmethod
    def resume(b: Builder, c: Value) -> None:
        for k in range(4):
            _move(b, "tileloadd64", k, c, _corner(k), 128)

    @staticmethod
    def finish(b: Builder, c: Value) -> None:
        for k in range(4):
            _move(b, "tilestored64", k, c, _corner(k), 128)

    @staticmethod
    def product(b: Builder, bf16: bool, c: Value, a: Value, b0: Value, b1: Value, between: list[Any]) -> None:
        """`between`: four emitters whose vector work hides under the tile products. A is streamed once per panel of weights
        (tileloaddt1), so that it does not push the panel out of L1."""
        dot = "tdpbf16ps" if bf16 else "tdpbssd"
        _move(b, "tileloadd64", 6, b0, 0, 64)
        _move(b, "tileloaddt164", 4, a, 0, 64)
        _tile(b, dot, 0, 4, 6)
        between[0]()
        _move(b, "tileloaddt164", 5, a, 1024, 64)
        _tile(b, dot, 2, 5, 6)
        between[1]()
        _move(b, "tileloadd64", 7, b1, 0, 64)
        _tile(b, dot, 1, 4, 7)
        between[2]()
        _tile(b, dot, 3, 5, 7)
        between[3]()


class Emulated:
    """The same emitters in loops over memory: right everywhere, fast nowhere."""

    @staticmethod
    def zero(b: Builder, c: Value) -> None:
        with cgutils.for_range(b, const(I64, 64)) as loop:
            store(b, const(vec(I32, 16), 0), b.add(c, b.mul(loop.index, const(I64, 64))), 0, 4)

    @staticmethod
    def resume(b: Builder, c: Value) -> None:
        """The sums are at c already."""

    @staticmethod
    def finish(b: Builder, c: Value) -> None:
        """The sums are at c already."""

    @staticmethod
    def product(b: Builder, bf16: bool, c: Value, a: Value, b0: Value, b1: Value, between: list[Any]) -> None:
        with cgutils.for_range(b, const(I64, 32)) as row, cgutils.for_range(b, const(I64, 16)) as line:
            x = b.add(a, b.add(b.mul(row.index, const(I64, 64)), b.mul(line.index, const(I64, 4))))
            at = b.add(c, b.mul(row.index, const(I64, 128)))
            for half, base in enumerate((b0, b1)):
                w = b.add(base, b.mul(line.index, const(I64, 64)))
                store(b, (_pair if bf16 else _quad)(b, load(b, at, vec(F32 if bf16 else I32, 16), 64 * half, 4), x, w), at, 64 * half, 4)
        for emit in between:
            emit()


def _pair(b: Builder, acc: Value, x: Value, w: Value) -> Value:
    """acc += two bf16 of x times 16 pairs of bf16 at w."""
    words = load(b, w, vec(I32, 16), 0, 4)
    bits = spread(b, x, I32, 16)
    real = vec(F32, 16)
    for v in (lambda u: b.shl(u, const(u.type, 16)), lambda u: b.and_(u, const(u.type, -0x10000))):
        acc = fma(b, b.bitcast(v(words), real), b.bitcast(v(bits), real), acc)
    return acc


def _quad(b: Builder, acc: Value, x: Value, w: Value) -> Value:
    """acc += four int8 of x times 16 × 4 int8 at w."""
    words, bits = load(b, w, vec(I32, 16), 0, 4), spread(b, x, I32, 16)
    for i in range(4):
        u, v = (b.ashr(b.shl(t, const(t.type, 24 - 8 * i)), const(t.type, 24)) for t in (words, bits))
        acc = b.add(acc, b.mul(u, v))
    return acc


def emitters(amx: bool) -> Any:
    return Amx if amx else Emulated


@functools.cache
def edges(amx: bool) -> tuple[Any, Any, Any]:
    """Intrinsics (zero(c), resume(c), finish(c))."""
    body = emitters(amx)
    return op(1, body.zero), op(1, body.resume), op(1, body.finish)


@functools.cache
def power(amx: bool) -> tuple[Any, Any]:
    """Intrinsics (configure(address of `configuration`), release(anything)), around a thread's use of tiles."""
    def configure(b: Builder, address: Value) -> None:
        if amx:
            b.call(declare(b, "llvm.x86.ldtilecfg", VOID, PTR), [b.inttoptr(address, PTR)])

    def release(b: Builder, _: Value) -> None:
        if amx:
            b.call(declare(b, "llvm.x86.tilerelease", VOID), [])
    return op(1, configure), op(1, release)
