"""How small jobs get their operands: addresses and counts as int64 words, float64 reals behind the first word; arrays over addresses; row sums.

Knows no operation.
"""

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import kernel
from .team import Prepared, address, name_of


def _pointer(kind: Any) -> Any:
    """An intrinsic: int64 address -> pointer to `kind`, for carray."""
    result = types.CPointer(kind)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())
    return intrinsic(lambda context, a: (result(types.int64), generate))


f32, f64, i32, i64 = _pointer(types.float32), _pointer(types.float64), _pointer(types.int32), _pointer(types.int64)
u32, u16, u8 = _pointer(types.uint32), _pointer(types.uint16), _pointer(types.uint8)


def ready(job: Any, operands: Sequence[int], reals: Sequence[float] = (), keep: Any = None) -> Prepared:
    """A job of this file: `operands` are addresses and counts, `reals` float64; `keep` is what must stay alive for the addresses."""
    words = 1 + len(operands)
    memory = ctypes.create_string_buffer(8 * (words + len(reals)))            # much cheaper to make and to address than an array
    place = ctypes.addressof(memory)
    struct.pack_into(f"{words}q{len(reals)}d", memory, 0, place + 8 * words, *operands, *reals)
    return Prepared(address(job), place, (memory, keep), name_of(job))


@kernel(inner=True)
def squares(x: Any, n: int) -> Any:
    """The sum of squares of n float32, in eight running sums."""
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    e, f, g, h = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    whole = n // 8 * 8
    for i in range(0, whole, 8):
        a += x[i] * x[i]
        b += x[i + 1] * x[i + 1]
        c += x[i + 2] * x[i + 2]
        d += x[i + 3] * x[i + 3]
        e += x[i + 4] * x[i + 4]
        f += x[i + 5] * x[i + 5]
        g += x[i + 6] * x[i + 6]
        h += x[i + 7] * x[i + 7]
    for i in range(whole, n):
        a += x[i] * x[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@kernel(inner=True)
def rms(x: Any, weight: Any, n: int, eps: float, out: Any) -> None:
    factor = np.float32(1.0 / math.sqrt(squares(x, n) / n + eps))
    for i in range(n):
        out[i] = x[i] * factor * weight[i]
