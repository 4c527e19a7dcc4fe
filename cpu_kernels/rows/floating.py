"""f32, bf16 and any other format against float32 activations: the bytes of the float tiles, and a tile times 1..m tokens.

**f32**, 4,096 B: 64 lines of 64 B, line k holds w[0..15, k].
**bf16**, 2,048 B: 32 lines of 64 B, 16-bit word 2n + kk of line j is w[n, 2j + kk]: a row of an AMX bf16 B tile.

The activation of 64 columns is a block of 256 B: 64 float32. Products of bf16 weights with float32 activations are summed in float32;
each tile is summed on its own before it joins the row, which halves the rounding of long rows. Formats of codes are multiplied here
when activations must not be rounded (precision "exact"): the code is widened, the group's sum is scaled.
"""
from ..formats import Format
from ..lanes import F32, I32, I64, WIDTHS, Builder, Value, byte, cgutils, const, fma, load, spread, vec
from .integer import LINES_AT, scales_of

BLOCK_NBYTES = 256


AT_ONCE = 8                                          # columns of one turn of the loop


def _column(b: Builder, format: Format, tile: Value, turn: Value, c: int, group: int, first: int, n: int, cache: dict[int, Value]) -> Value:
    """Column 32·group + 8·turn + c of rows first .. first + n − 1 as float32, codes without their scale. `cache`: lines of this turn."""
    if format.name == "f32":
        return load(b, b.add(tile, b.mul(turn, const(I64, 512))), vec(F32, n), 64 * (32 * group + c) + 4 * first, 4 * n)
    per = 2 if format.name == "bf16" else 4          # columns of one line
    if c // per not in cache:
        at = b.add(tile, b.mul(turn, const(I64, 64 * AT_ONCE // per)))
        base = 64 * (32 // per) * (group if format.name != "int4_g32" else 0) + (LINES_AT if format.scale else 0)
        cache[c // per] = load(b, at, vec(I32, n), base + 64 * (c // per) + 4 * first, 4 * n)
    line = cache[c // per]
    if format.name == "bf16":
        bits = b.and_(line, const(line.type, -0x10000)) if c % 2 else b.shl(line, const(line.type, 16))
        return b.bitcast(bits, vec(F32, n))
    if format.name == "int8_g32":
        return b.sitofp(byte(b, line, c % 4, True), vec(F32, n))
    q = b.and_(b.lshr(line, const(line.type, 8 * (c % 4) + 4 * group)), const(line.type, 15))
    return b.sitofp(b.sub(q, const(q.type, 8)), vec(F32, n))


def tile(b: Builder, format: Format, body: str, accs: list[list[Value]], w: Value, xs: list[Value]) -> list[list[Value]]:
    """accs[token][part]: float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens' activation blocks."""
    n = WIDTHS[body]
    out = [list(a) for a in accs]
    for group in range(2):
        zero = const(vec(F32, n), 0.0)
        sums = [[cgutils.alloca_once_value(b, zero) for _ in xs] for _ in range(16 // n)]
        for v in (v for part in sums for v in part):
            b.store(zero, v)
        with cgutils.for_range(b, const(I64, 32 // AT_ONCE)) as loop:
            ahead = b.mul(loop.index, const(I64, 4 * AT_ONCE))
            for part in range(16 // n):
                cache: dict[int, Value] = {}
                totals = [b.load(v) for v in sums[part]]
                for c in range(AT_ONCE):
                    column = _column(b, format, w, loop.index, c, group, part * n, n, cache)
                    for t, x in enumerate(xs):
                        totals[t] = fma(b, column, spread(b, b.add(x, ahead), F32, n, 4 * (32 * group + c)), totals[t])
                for v, value in zip(sums[part], totals, strict=True):
                    b.store(value, v)
        for part in range(16 // n):
            scale = scales_of(b, format, body, w, group, part * n, n) if format.scale else None
            for t, v in enumerate(sums[part]):
                s = b.load(v)
                out[t][part] = b.fadd(out[t][part], s) if scale is None else fma(b, s, scale, out[t][part])
    return out
