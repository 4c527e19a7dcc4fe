"""int4_g32 and int8_g32: the bytes of their tiles, and a tile times the activations of 1..m tokens. Knows no expert and no thread.

**int4_g32**, 576 B: 16 fp16 scales of rows 0..15 for columns 0..31 | 16 for columns 32..63 | 8 lines of 64 B, byte n·4 + kk of line j
holds q[n, 4j + kk] in its low and q[n, 32 + 4j + kk] in its high nibble; weight = (q − 8) · scale, q in 0..15.

**int8_g32**, 1,088 B: 16 bf16 scales for columns 0..31 | 16 for columns 32..63 | 16 lines of 64 B, byte n·4 + kk of line i is
w[n, 4i + kk], two's complement; weight = w · scale.

One line is an operand of `vpdpbusd` (16 rows × 4 columns) and a row of an AMX int8 B tile.

The int8 activation of 64 columns is one block of 80 B: 64 codes | 2 float32 scales | 2 int32 starts of the sums, which take the zero
point of unsigned weights away: −zero · Σ codes. Where the high nibble is multiplied unshifted (`shifted` below), the second scale is
divided by 16 and the second start multiplied by it: both exact, so all bodies give the same bits.
"""
from typing import Any

from ..formats import Format
from ..lanes import (
    F32,
    I1,
    I8,
    I32,
    WIDTHS,
    Builder,
    Value,
    bf16_to_f32,
    byte,
    call,
    const,
    dpbusd,
    fresh,
    half_to_f32,
    kept,
    load,
    maddubs,
    pair_sums,
    prefetch,
    sign_of,
    spread,
    vec,
)

BLOCK_NBYTES = 80
SCALE_AT, START_AT = 64, 72
LINES_AT = 64                                        # of the codes within a tile


def at_once(format: Format, body: str) -> tuple[int, ...]:
    """Tokens whose sums fit in registers, most first."""
    if body == "avx2":
        return (4, 2, 1) if format.name == "int8_g32" else (2, 1)
    return {"generic": (1,), "avx_vnni": (2, 1), "avx512_vnni": (8, 4, 2, 1)}[body]


def zero_of(format: Format, body: str) -> int:
    """The zero point that `start` takes away."""
    if format.name == "int4_g32":
        return 8
    return 128 if "vnni" in body else 0


def shifted(format: Format, body: str) -> int:
    """What the sums of columns 32..63 are multiplied by (16 where a high nibble stays where it is)."""
    return 16 if format.name == "int4_g32" and "vnni" in body else 1


def scales_of(b: Builder, format: Format, body: str, tile: Value, group: int, first: int, n: int) -> Value:
    offset = 32 * group + 2 * first
    return half_to_f32(b, tile, n, body, offset) if format.scale == "f16" else bf16_to_f32(b, tile, n, offset)


def _nibbles(b: Builder, raw: Value, group: int, keep: bool) -> Value:
    mask = const(raw.type, 0x0F0F0F0F)
    if not group:
        return b.and_(raw, mask)
    return b.and_(raw, const(raw.type, -0x0F0F0F10)) if keep else b.and_(b.lshr(raw, const(raw.type, 4)), mask)


def _start(b: Builder, x: Value, group: int, n: int) -> Value:
    return spread(b, x, I32, n, START_AT + 4 * group)


def _columns(b: Builder, format: Format, body: str, raw: Value, group: int) -> tuple[Value, ...]:
    """One line's part as the body multiplies it: (codes,), or for AVX2's int8 (codes, their magnitudes)."""
    if format.name == "int4_g32":
        return (_nibbles(b, raw, group, "vnni" in body),)
    if "vnni" in body:
        return (b.xor(raw, const(raw.type, -0x7F7F7F80)),)
    if body == "generic":
        return (raw,)
    return raw, b.bitcast(call(b, "abs", b.bitcast(raw, vec(I8, 32)), const(I1, 0)), raw.type)


def _add(b: Builder, body: str, total: Value | None, w: tuple[Value, ...], x: Value) -> Value:
    """total + 4 products per lane; AVX2's total starts as None and is int16 pairs for int4."""
    if body == "generic":
        assert total is not None
        for kk in range(4):
            total = b.add(total, b.mul(byte(b, w[0], kk, True), byte(b, x, kk, True)))
        return total
    if body != "avx2":
        total = dpbusd(b, total, w[0], x)
        return total if body == "avx512_vnni" else kept(b, total)
    if len(w) == 1:                                  # 8 products of at most 2 · 15 · 127 stay below 2^15
        p = maddubs(b, w[0], x)
    else:
        p = pair_sums(b, maddubs(b, w[1], sign_of(b, x, w[0])))
    return p if total is None else kept(b, b.add(total, p))


def tile(b: Builder, format: Format, body: str, add: Any, w: Value, xs: list[Value], ahead: Value) -> None:
    """add(token, part, value, scale) takes float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens' activation
    blocks; ahead: a tile to be prefetched, line by line between the products: in one burst, prefetches fill the queue of misses and
    stop everything."""
    n, int4 = WIDTHS[body], format.name == "int4_g32"
    parts, tokens = range(16 // n), range(len(xs))
    fresh(b)
    sums: dict[Any, Any] = {(t, g, p): None if body == "avx2" else _start(b, xs[t], g, n) for t in tokens for g in range(2) for p in parts}
    for groups in ([0, 1],) if int4 else ([0], [1]):
        for i in range(8):
            line = 64 * (i + 8 * groups[0])
            fresh(b)
            prefetch(b, ahead, line)
            raw = [load(b, w, vec(I32, n), LINES_AT + line + 4 * n * p, 4 * n) for p in parts]
            for g in groups:
                columns = [_columns(b, format, body, r, g) for r in raw]
                for t in tokens:
                    x = spread(b, xs[t], I32, n, 32 * g + 4 * i)
                    for p in parts:
                        sums[t, g, p] = _add(b, body, sums[t, g, p], columns[p], x)
        if groups[-1]:
            prefetch(b, ahead, format.tile_nbytes - 64)
        for g in groups:
            scales = [scales_of(b, format, body, w, g, n * p, n) for p in parts]
            for t in tokens:
                sx = spread(b, xs[t], F32, n, SCALE_AT + 4 * g)
                for p in parts:
                    total = sums[t, g, p]
                    if body == "avx2":
                        total = b.add(pair_sums(b, total) if int4 else total, _start(b, xs[t], g, n))
                    add(t, p, b.sitofp(total, vec(F32, n)), b.fmul(scales[p], sx))
