"""One 32-row panel of packed weights times many rows of activations, by tile products, the next panel's unpacking hidden under them.

Knows addresses, formats and tiles; no expert and no thread. Activations lie as A tiles: per 32 rows, per 64 columns, bf16 4,096 B (columns
0..31 of rows 0..31, 64 B a row, then columns 32..63), int8 2,048 B (rows 0..15, rows 16..31, 64 B a row).
"""
import functools
from typing import Any, NamedTuple

from . import panels, tiles
from .atoms import peek
from .formats import FORMATS
from .jit import kernel
from .lanes import Builder, Value, op, plus

PANEL_TILES = 8                                      # 64 columns each: 512 columns of bf16 are 32 KiB, which stay in L1
WHOLE_TILES = 12                                     # a row of no more tiles is one panel: its sums are then written once
PANEL_NBYTES = WHOLE_TILES * 4096


# a thread's room: two panels, then scales and inverses of 32 rows now and 32 ahead (int8 only)
SCALES_AT = 2 * PANEL_NBYTES
INVERSES_AT = SCALES_AT + 256
ROOM_NBYTES = INVERSES_AT + 256
# words of a product's block of arguments
(W, ROW, WIDE, X, X_STRIDE, BLOCKS, SUMS, ROOM, CURRENT, AHEAD, AHEAD_ROW) = range(11)
PRODUCT_WORDS = 11


@kernel
def panel_tiles(wide: int) -> int:
    """Tiles of one panel of a row of `wide` tiles."""
    return wide if wide <= WHOLE_TILES else PANEL_TILES


class Gemm(NamedTuple):
    """Kernels of four int64, to be called by address so that each is compiled once, whoever uses it.

    `multiply(block, 0, 0, 0) -> current`: sums[m] := x[m] · (32 rows)ᵀ for BLOCKS blocks of 32 rows at X + m · X_STRIDE; the 32 rows are row
    blocks at W and W + ROW, of WIDE tiles. Panel CURRENT of ROOM holds the first panel already; on return the panel named holds the first one
    of AHEAD (0: none). `fill(w, row, count, room)` unpacks a first panel. `scales(w, row, wide, room + 128 · ahead)` finds the row scales of
    int8 products, whose sums are int32. `step`: bytes of activations per 64 columns.
    """

    multiply: Any
    fill: Any
    scales: Any
    step: int


def _step(format: str, body: str, amx: bool, bf16: bool, half: int | None) -> Any:
    """Intrinsic (c, a, b0, b1, w, inverse, into): products of one tile's 64 columns over unpacking half 0, 1, all (2) or none of another."""
    f, emit = FORMATS[format], tiles.emitters(amx)
    direct = format == "bf16"

    def nothing() -> None:
        """No vector work between these products."""

    def generate(b: Builder, c: Value, a: Value, b0: Value, b1: Value, w: Value, inverse: Value, into: Value) -> None:
        slots = [nothing] * (8 if bf16 else 4)
        if half is not None:
            quarters = panels.quarters_bf16(b, f, body, w, into) if bf16 else panels.quarters_int8(b, f, body, w, inverse, into)
            chosen = quarters if half == 2 else quarters[2 * half:2 * half + 2]
            every = len(slots) // len(chosen)
            for i, quarter in enumerate(chosen):
                slots[i * every] = quarter
        for k in range(2 if bf16 else 1):
            at = 1024 * k if direct else 2048 * k
            emit.product(b, bf16, c, plus(b, a, 2048 * k), plus(b, b0, at), plus(b, b1, at), slots[4 * k:4 * k + 4])
    return op(7, generate)


def _unpack(format: str, body: str, bf16: bool) -> Any:
    f = FORMATS[format]

    def generate(b: Builder, w: Value, inverse: Value, into: Value) -> None:
        for quarter in panels.quarters_bf16(b, f, body, w, into) if bf16 else panels.quarters_int8(b, f, body, w, inverse, into):
            quarter()
    return op(3, generate)


@functools.cache
def gemm(format: str, body: str, amx: bool, bf16: bool) -> Gemm:
    """The kernels of one format; bf16 products (accurate) or int8 ones (weights and activations rounded to int8 by row)."""
    key = (format, body, amx, bf16)
    size = FORMATS[format].tile_nbytes
    step = 4096 if bf16 else 2048                    # of activations and of a panel, per 64 columns
    side = 1024                                      # from row block 0 to 1 within a panel
    direct = int(format == "bf16")
    plain, first, second, whole = (_step(format, body, amx, bf16, h) for h in (None, 0, 1, 2))
    unpack = _unpack(format, body, bf16)
    row_scale = panels.row_scales(FORMATS[format], body)
    zero, resume, finish = tiles.edges(amx)

    @kernel(key=key)
    def fill(w: int, row: int, count: int, room: int) -> int:
        for r in range(2):
            for k in range(count):
                unpack(w + r * row + k * size, room + INVERSES_AT + 64 * r, room + k * step + r * side)
        return 0

    @kernel(key=key)
    def scales(w: int, row: int, wide: int, room: int) -> int:
        if not bf16:
            for r in range(2):
                row_scale(w + r * row, wide, room + SCALES_AT + 64 * r, room + INVERSES_AT + 64 * r)
        return 0

    @kernel(key=key)
    def sweep(c: int, a: int, b: int, far: int, n: int, part: int, w: int, inverse: int, into: int, m: int) -> None:
        """n tiles of products; part 0, 1, 2: unpack that part of m tiles on the way; 3: nothing. `far`: from b to the second B tile."""
        per = size if direct else step
        both = min(n, m) if part < 3 else 0
        if part == 0:
            for k in range(both):
                first(c, a + k * step, b + k * per, b + k * per + far, w + k * size, inverse, into + k * step)
        elif part == 1:
            for k in range(both):
                second(c, a + k * step, b + k * per, b + k * per + far, w + k * size, inverse, into + k * step)
        elif part == 2:
            for k in range(both):
                whole(c, a + k * step, b + k * per, b + k * per + far, w + k * size, inverse, into + k * step)
        for k in range(both, n):
            plain(c, a + k * step, b + k * per, b + k * per + far, 0, 0, 0)
        if part == 1 or part == 2:                   # what found no product to hide under (part 0's rest is done here too)
            for k in range(both, m):
                unpack(w + k * size, inverse, into + k * step)

    @kernel(key=key)
    def multiply(block: int, _: int, __: int, ___: int) -> int:
        w, row, wide, x, x_stride = peek(block), peek(block + 8), peek(block + 16), peek(block + 24), peek(block + 32)
        blocks, c, room, current = peek(block + 40), peek(block + 48), peek(block + 56), peek(block + 64)
        ahead, ahead_row, inverses = peek(block + 72), peek(block + 80), room + INVERSES_AT
        most = panel_tiles(wide)
        count = (wide + most - 1) // most
        for p in range(count):
            n = min(most, wide - p * most)
            if p + 1 < count:
                source, source_row, m, iv = w + (p + 1) * most * size, row, min(most, wide - (p + 1) * most), inverses
            else:
                source, source_row, m, iv = ahead, ahead_row, min(most, wide), inverses + 128
            now, then = room + current * PANEL_NBYTES, room + (1 - current) * PANEL_NBYTES
            b, far = (w + p * most * size, row) if direct else (now, side)
            for m_block in range(blocks):
                at = c + m_block * tiles.BLOCK_NBYTES
                if p == 0:
                    zero(at)
                else:
                    resume(at)
                part, r = 3, 0
                if source != 0:
                    if blocks >= 4 and m_block < 4:
                        part, r = m_block & 1, m_block >> 1
                    elif blocks < 4 and m_block < 2:
                        part, r = 2, m_block
                sweep(at, x + m_block * x_stride + p * most * step, b, far, n, part, source + r * source_row, iv + 64 * r, then + r * side, m)
                finish(at)
            if source != 0 and blocks == 1:
                for k in range(m):
                    unpack(source + source_row + k * size, iv + 64, then + side + k * step)
            current = 1 - current
        return current

    return Gemm(multiply, fill, scales, step)


