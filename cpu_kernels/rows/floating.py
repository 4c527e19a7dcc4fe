"""f32, f16, bf16 and any other format against float32 activations: the bytes of the float tiles, and a tile times 1..m tokens.

**f32**, 4,096 B: 64 lines of 64 B, line k holds w[0..15, k].
**f16**, 2,048 B: 64 lines of 32 B, line k holds w[0..15, k].
**bf16**, 2,048 B: 32 lines of 64 B, 16-bit word 2n + kk of line j is w[n, 2j + kk]: a row of an AMX bf16 B tile.

The activation of 64 columns is a block of 256 B: 64 float32 (fp8: times LIFT). Products with float32 activations are summed in float32;
each tile is summed on its own before it joins the row, which halves the rounding of long rows. Formats of codes are multiplied here
when activations must not be rounded (precision "exact"): the code is widened, the group's sum is scaled.
"""
from typing import Any

from ..formats import Format
from ..lanes import F32, I32, I64, WIDTHS, Builder, Value, byte, cgutils, const, fma, fresh, half_to_f32, kept, load, prefetch, spread, vec
from . import coded
from .integer import LINES_AT, scales_of

Add = Any
BLOCK_NBYTES = 256
COLUMNS = 8                                          # of one turn of the loop
LIFT = 2.0 ** 60                                     # of fp8's activations: its weights are 2^120 too small, their products so only 2^60


def at_once(format: Format, body: str) -> tuple[int, ...]:
    """Tokens whose sums fit in registers, most first."""
    return (16, 8, 4, 2, 1) if WIDTHS[body] == 16 else (6, 4, 2, 1)


def column(b: Builder, format: Format, body: str, tile: Value, turn: Value, c: int, group: int, first: int, n: int) -> Value:
    """Column 32·group + 8·turn + c of rows first .. first + n − 1 as float32, codes without their scale. A line is loaded again for each
    of its columns: registers are for sums."""
    if format.name == "f32":
        return load(b, b.add(tile, b.mul(turn, const(I64, 512))), vec(F32, n), 64 * (32 * group + c) + 4 * first, 4 * n)
    if format.name == "f16":
        return half_to_f32(b, b.add(tile, b.mul(turn, const(I64, 256))), n, body, 32 * (32 * group + c) + 2 * first)
    if format.coded:
        return _coded(b, format, body, tile, b.add(b.shl(turn, const(I64, 1)), const(I64, c // 4)), c % 4, group, first, n)
    per = 2 if format.name == "bf16" else 4          # columns of one line
    at = b.add(tile, b.mul(turn, const(I64, 64 * COLUMNS // per)))
    base = 64 * (32 // per) * (group if format.name != "int4_g32" else 0) + (LINES_AT if format.scale else 0)
    line = load(b, at, vec(I32, n), base + 64 * (c // per) + 4 * first, 4 * n)
    if format.name == "bf16":
        bits = b.and_(line, const(line.type, -0x10000)) if c % 2 else b.shl(line, const(line.type, 16))
        return b.bitcast(bits, vec(F32, n))
    if format.name == "int8_g32":
        return b.sitofp(byte(b, line, c % 4, True), vec(F32, n))
    q = b.and_(b.lshr(line, const(line.type, 8 * (c % 4) + 4 * group)), const(line.type, 15))
    return b.sitofp(b.sub(q, const(q.type, 8)), vec(F32, n))


def _coded(b: Builder, format: Format, body: str, tile: Value, j: Value, kk: int, group: int, first: int, n: int) -> Value:
    """The same of coded formats: scaled where scales or minimums within the 32 columns differ (`outside` says where not)."""
    v = coded.numbers(b, format, body, tile, j, group, kk, first, n, coded.codes_of(b, format, body, tile, j, group, first, n))
    if outside(format):
        return v
    sub = b.lshr(j, const(I64, 2))
    s = coded.scale_of(b, format, body, tile, group, sub, first, n)
    return fma(b, v, s, coded.shift_of(b, format, body, tile, group, sub, first, n)) if format.coded and format.coded.shifts else b.fmul(v, s)


def outside(format: Format) -> bool:
    """True when 32 columns of a row have one scale and nothing else: it multiplies their sum."""
    return bool(format.scale) and (format.coded is None or not (format.coded.shifts or format.coded.group == 16))


def tile(b: Builder, format: Format, body: str, add: Add, w: Value, xs: list[Value], ahead: Value) -> None:
    """add(token, part, value, scale | None) takes float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens'
    activation blocks; ahead: a tile to be prefetched."""
    n, zero = WIDTHS[body], const(vec(F32, WIDTHS[body]), 0.0)
    parts, tokens = range(16 // n), range(len(xs))
    step = format.tile_nbytes // 8                   # of the tile per turn of the loop below
    for group in range(2):
        sums = {(t, p): cgutils.alloca_once_value(b, zero) for t in tokens for p in parts}
        for v in sums.values():
            b.store(zero, v)
        with cgutils.for_range(b, const(I64, 32 // COLUMNS)) as loop:
            at = b.mul(loop.index, const(I64, 4 * COLUMNS))
            totals = {k: b.load(v) for k, v in sums.items()}
            pulled = b.add(ahead, b.mul(loop.index, const(I64, step)))
            for c in range(COLUMNS):
                fresh(b)
                if 64 * c < step:
                    prefetch(b, pulled, 4 * step * group + 64 * c)
                if format.name != "fp8":
                    columns = [column(b, format, body, w, loop.index, c, group, n * p, n) for p in parts]
                elif c % 4 == 0:
                    j = b.add(b.shl(loop.index, const(I64, 1)), const(I64, c // 4))
                    four = [coded.fp8_columns(b, coded.codes_of(b, format, body, w, j, group, n * p, n)) for p in parts]
                if format.name == "fp8":
                    columns = [part[c % 4] for part in four]
                for t in tokens:
                    x = spread(b, b.add(xs[t], at), F32, n, 4 * (32 * group + c))
                    for p in parts:
                        totals[t, p] = fma(b, columns[p], x, totals[t, p])
                        if body in ("avx2", "avx_vnni") and len(xs) > 1:
                            totals[t, p] = kept(b, totals[t, p])
            for k, v in sums.items():
                b.store(totals[k], v)
        for p in parts:
            scale = None
            if outside(format):
                scale = coded.scale_of(b, format, body, w, group, 0, n * p, n) if format.coded else scales_of(b, format, body, w, group, n * p, n)
            if format.name == "fp8":
                scale = b.fmul(scale, const(vec(F32, n), LIFT))
            for t in tokens:
                add(t, p, b.load(sums[t, p]), scale)
