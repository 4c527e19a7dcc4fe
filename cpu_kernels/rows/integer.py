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
    fma,
    half_to_f32,
    load,
    maddubs,
    pair_sums,
    sign_of,
    splat,
    spread,
    vec,
)

BLOCK_NBYTES = 80
SCALE_AT, START_AT = 64, 72
LINES_AT = 64                                        # of the codes within a tile
AT_ONCE = {"generic": 1, "avx2": 4, "avx_vnni": 4, "avx512_vnni": 8}       # tokens whose sums stay in registers


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


def codes(b: Builder, format: Format, tile: Value, group: int, j: int, first: int, n: int) -> Value:
    """The line that holds columns 32·group + 4j .. + 3 of rows first .. first + n − 1, as n × int32 of raw bytes."""
    line = j if format.name == "int4_g32" else 8 * group + j
    return load(b, tile, vec(I32, n), LINES_AT + 64 * line + 4 * first, 4 * n)


def _nibbles(b: Builder, raw: Value, group: int, keep: bool) -> Value:
    mask = const(raw.type, 0x0F0F0F0F)
    if not group:
        return b.and_(raw, mask)
    return b.and_(raw, const(raw.type, -0x0F0F0F10)) if keep else b.and_(b.lshr(raw, const(raw.type, 4)), mask)


class _Sums:
    """The integer sum of one token over one group, in whatever the body adds best."""

    def __init__(self, b: Builder, format: Format, body: str, x: Value, group: int, n: int) -> None:
        self.b, self.body, self.int4, self.n = b, body, format.name == "int4_g32", n
        self.x, self.group = x, group
        self.sum: Any = self._start() if body != "avx2" else None

    def _start(self) -> Value:
        return spread(self.b, self.x, I32, self.n, START_AT + 4 * self.group)

    def add(self, w: Value, magnitude: Value, j: int) -> None:
        """w: the codes as the body wants them; magnitude: their absolute values (AVX2, int8)."""
        b, at = self.b, 32 * self.group + 4 * j
        if self.body == "generic":
            for kk in range(4):
                x = b.sext(load(b, self.x, I8, at + kk), I32)
                self.sum = b.add(self.sum, b.mul(byte(b, w, kk, not self.int4), splat(b, x, self.n)))
            return
        x = spread(b, self.x, I32, self.n, at)
        if self.body != "avx2":
            self.sum = dpbusd(b, self.sum, w, x)
            return
        if self.int4:                                # 8 products of at most 2 · 15 · 127 stay below 2^15
            p = maddubs(b, w, x)
        else:
            p = pair_sums(b, maddubs(b, magnitude, sign_of(b, x, w)))
        self.sum = p if self.sum is None else b.add(self.sum, p)

    def total(self) -> Value:
        if self.body != "avx2":
            return self.sum
        whole = pair_sums(self.b, self.sum) if self.int4 else self.sum
        return self.b.add(whole, self._start())


def tile(b: Builder, format: Format, body: str, accs: list[list[Value]], w: Value, xs: list[Value]) -> list[list[Value]]:
    """accs[token][part]: float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens' activation blocks."""
    n = WIDTHS[body]
    out = [list(a) for a in accs]
    for part in range(16 // n):
        scales = [scales_of(b, format, body, w, g, part * n, n) for g in range(2)]
        for low in range(0, len(xs), AT_ONCE[body]):
            tokens = range(low, min(low + AT_ONCE[body], len(xs)))
            sums = {(t, g): _Sums(b, format, body, xs[t], g, n) for t in tokens for g in range(2)}
            for j in range(8):
                for g in range(2):
                    c = codes(b, format, w, g, j, part * n, n)
                    magnitude = None
                    if format.name == "int4_g32":
                        c = _nibbles(b, c, g, "vnni" in body)
                    elif "vnni" in body:
                        c = b.xor(c, const(c.type, -0x7F7F7F80))
                    elif body == "avx2":
                        magnitude = b.bitcast(call(b, "abs", b.bitcast(c, vec(I8, 32)), const(I1, 0)), c.type)
                    for t in tokens:
                        sums[t, g].add(c, magnitude, j)
            for g in range(2):
                for t in tokens:
                    sx = spread(b, xs[t], F32, n, SCALE_AT + 4 * g)
                    out[t][part] = fma(b, b.sitofp(sums[t, g].total(), vec(F32, n)), b.fmul(scales[g], sx), out[t][part])
    return out
