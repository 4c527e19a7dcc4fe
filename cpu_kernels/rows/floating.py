"""f32, bf16 and any other format against float32 activations: the bytes of the float tiles, and a tile times 1..m tokens.

**f32**, 4,096 B: 64 lines of 64 B, line k holds w[0..15, k].
**bf16**, 2,048 B: 32 lines of 64 B, 16-bit word 2n + kk of line j is w[n, 2j + kk]: a row of an AMX bf16 B tile.

The activation of 64 columns is a block of 256 B: 64 float32. Products of bf16 weights with float32 activations are summed in float32;
each tile is summed on its own before it joins the row, which halves the rounding of long rows. Formats of codes are multiplied here
when activations must not be rounded (precision "exact"): the code is widened, the group's sum is scaled.
"""
from ..formats import Format
from ..lanes import F32, I32, I64, WIDTHS, Builder, Value, byte, cgutils, const, fma, fresh, kept, load, prefetch, spread, vec
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


def tile(b: Builder, format: Format, body: str, accs: list[list[Value]], w: Value, xs: list[Value], ahead: Value) -> list[list[Value]]:
    """accs[token][part]: float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens' activation blocks; ahead: a tile
    to be prefetched."""
    n, zero = WIDTHS[body], const(vec(F32, WIDTHS[body]), 0.0)
    parts, most = range(16 // n), 4 * (n // 8)
    out = [list(a) for a in accs]
    step = format.tile_nbytes // 8                   # of the tile per turn of the loop below
    for low, group in ((low, group) for low in range(0, len(xs), most) for group in range(2)):
        tokens = range(low, min(low + most, len(xs)))
        sums = {(t, p): cgutils.alloca_once_value(b, zero) for t in tokens for p in parts}
        for v in sums.values():
            b.store(zero, v)
        with cgutils.for_range(b, const(I64, 32 // AT_ONCE)) as loop:
            fresh(b)
            at = b.mul(loop.index, const(I64, 4 * AT_ONCE))
            totals = {k: b.load(v) for k, v in sums.items()}
            cache: list[dict[int, Value]] = [{} for _ in parts]
            pulled = b.add(ahead, b.mul(loop.index, const(I64, step)))
            for c in range(AT_ONCE):
                if low == 0 and 64 * c < step:
                    prefetch(b, pulled, 4 * step * group + 64 * c)
                columns = [_column(b, format, w, loop.index, c, group, n * p, n, cache[p]) for p in parts]
                for t in tokens:
                    x = spread(b, b.add(xs[t], at), F32, n, 4 * (32 * group + c))
                    for p in parts:
                        totals[t, p] = fma(b, columns[p], x, totals[t, p])
                        if body in ("avx2", "avx_vnni") and len(xs) > 1:
                            totals[t, p] = kept(b, totals[t, p])
            for k, v in sums.items():
                b.store(totals[k], v)
        for p in parts:
            scale = scales_of(b, format, body, w, group, n * p, n) if format.scale else None
            for t in tokens:
                s = b.load(sums[t, p])
                out[t][p] = b.fadd(out[t][p], s) if scale is None else fma(b, s, scale, out[t][p])
    return out
