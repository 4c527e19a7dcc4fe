"""Weight tiles of any format as B tiles of 32 rows: the panels that tile products read, unpacked a quarter at a time under the products.

Knows the bytes of formats (`rows/`) and of tiles (`tiles`), no expert and no thread. A panel holds, per 64 columns, for bf16 products
4,096 B: (columns 0..31 of row block 0 | of row block 1 | columns 32..63 of 0 | of 1), each a B tile of 1 KiB; for int8 products 2,048 B: row
block 0 | row block 1. bf16 weights are B tiles already and need no panel: their quarters prefetch what comes next.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

from .formats import GROUP, Format
from .lanes import F32, I16, I32, I64, Builder, Value, bf16_to_f32, byte, call, cgutils, const, declare, half_to_f32, load, op, prefetch, store, vec
from .rows import coded

Quarters = list[Callable[[], None]]
WIDE, REAL, SHORT = vec(I32, 16), vec(F32, 16), vec(I16, 32)
LINES_AT = 64                                        # of the codes in a tile of int4_g32 and int8_g32


def _scales(b: Builder, format: Format, body: str, w: Value, group: int) -> Value:
    return half_to_f32(b, w, 16, body, 32 * group) if format.scale == "f16" else bf16_to_f32(b, w, 16, 32 * group)


def _join_bf16(b: Builder, even: Value, odd: Value) -> Value:
    """Two float32 vectors as pairs of bf16 (rounded half up), even in the low word."""
    low = b.lshr(b.add(b.bitcast(even, WIDE), const(WIDE, 0x8000)), const(WIDE, 16))
    high = b.and_(b.add(b.bitcast(odd, WIDE), const(WIDE, 0x8000)), const(WIDE, -0x10000))
    return b.or_(low, high)


def _nibble_value(b: Builder, body: str, raw: Value, shift: int) -> Value:
    """(nibble at `shift`) − 8 as float32; AVX-512 looks it up, as the table needs no mask."""
    index = b.lshr(raw, const(WIDE, shift)) if shift else raw
    if body == "avx512_vnni":
        table = REAL([float(k - 8) for k in range(16)])
        return b.call(declare(b, "llvm.x86.avx512.permvar.sf.512", REAL, REAL, WIDE), [table, index])
    return b.sitofp(b.sub(b.and_(index, const(WIDE, 15)), const(WIDE, 8)), REAL)



AHEAD_TILES = 8                                      # a panel: what is unpacked next but one is on its way from memory meanwhile


def _quarters(b: Builder, format: Format, w: Value, line: Callable[[int, int], None]) -> Quarters:
    lines = -(-format.tile_nbytes // 64)

    def quarter(q: int) -> None:
        for i in range(lines * q // 4, lines * (q + 1) // 4):
            prefetch(b, w, AHEAD_TILES * format.tile_nbytes + 64 * i)
        for j in (2 * q, 2 * q + 1):
            for g in range(2):
                line(j, g)
    return [partial(quarter, q) for q in range(4)]


def quarters_bf16(b: Builder, format: Format, body: str, w: Value, into: Value) -> Quarters:
    """A 16 × 64 tile at w -> B tiles at `into` (columns 0..31) and into + 2048 (columns 32..63)."""
    if format.name == "bf16":
        def fetch(q: int) -> None:
            for i in range(8):
                prefetch(b, w, AHEAD_TILES * format.tile_nbytes + 512 * q + 64 * i, 2)
                prefetch(b, w, 512 * q + 64 * i)
        return [partial(fetch, q) for q in range(4)]
    if format.coded:
        weights = coded.unpacker(b, format, body, w)
    else:
        scales = [_scales(b, format, body, w, g) for g in range(2)] if format.scale else []

    def line(j: int, g: int) -> None:
        """Columns 32g + 4j .. + 3."""
        if format.coded or format.name == "f16":
            f = weights(j, g) if format.coded else [half_to_f32(b, w, 16, body, 32 * (32 * g + 4 * j + kk)) for kk in range(4)]
            for h in range(2):
                store(b, _join_bf16(b, f[2 * h], f[2 * h + 1]), into, 2048 * g + 64 * (2 * j + h), 64)
            return
        int4 = format.name == "int4_g32"
        raw = load(b, w, WIDE, LINES_AT + 64 * (j if int4 else 8 * g + j), 64)
        v = [_nibble_value(b, body, raw, 8 * kk + 4 * g) if int4 else b.sitofp(byte(b, raw, kk, True), REAL) for kk in range(4)]
        f = [b.fmul(x, scales[g]) for x in v]
        for h in range(2):
            store(b, _join_bf16(b, f[2 * h], f[2 * h + 1]), into, 2048 * g + 64 * (2 * j + h), 64)
    return _quarters(b, format, w, line)


def _mulhrs(b: Builder, body: str, x: Value, m: Value) -> Value:
    """(x · m + 2^14) >> 15 of 32 int16."""
    if body == "avx512_vnni":
        return b.call(declare(b, "llvm.x86.avx512.pmul.hr.sw.512", SHORT, SHORT, SHORT), [x, m])
    long = vec(I32, 32)
    p = b.add(b.mul(b.sext(x, long), b.sext(m, long)), const(long, 1 << 14))
    return b.trunc(b.ashr(p, const(long, 15)), SHORT)


def factor(format: Format) -> float:
    """Codes times their group's scale over the row's, as int16 multipliers of `_mulhrs`: the numerator that row_scales divides by."""
    return 128.0 if format.name == "int4_g32" else 32767.0


def quarters_int8(b: Builder, format: Format, body: str, w: Value, inverse: Value, into: Value) -> Quarters:
    """The same to one int8 B tile of 64 columns; inverse: address of 16 float32, factor / row scale."""
    iv = load(b, inverse, REAL, 0, 4)
    multipliers = []
    for g in range(2):
        m = b.fptosi(call(b, "rint", b.fmul(_scales(b, format, body, w, g), iv)), WIDE)
        multipliers.append(b.bitcast(b.or_(b.and_(m, const(WIDE, 0xFFFF)), b.shl(m, const(WIDE, 16))), SHORT))

    def halves(j: int, g: int) -> tuple[Value, Value]:
        """Even and odd columns of a line as int16: int4 as (q − 8) · 256, int8 as they are."""
        if format.name == "int4_g32":
            raw = load(b, w, WIDE, LINES_AT + 64 * j, 64)
            mask, eight = const(WIDE, 0x0F000F00), const(SHORT, 0x0800)
            even = b.and_(b.shl(raw, const(WIDE, 8 - 4 * g)), mask)
            odd = b.and_(b.lshr(raw, const(WIDE, 4)) if g else raw, mask)
            return b.sub(b.bitcast(even, SHORT), eight), b.sub(b.bitcast(odd, SHORT), eight)
        raw = load(b, w, SHORT, LINES_AT + 64 * (8 * g + j), 64)
        return b.ashr(b.shl(raw, const(SHORT, 8)), const(SHORT, 8)), b.ashr(raw, const(SHORT, 8))

    def line(j: int, g: int) -> None:
        even, odd = (_mulhrs(b, body, x, multipliers[g]) for x in halves(j, g))
        store(b, b.or_(b.and_(even, const(SHORT, 0xFF)), b.shl(odd, const(SHORT, 8))), into, 64 * (8 * g + j), 64)
    return _quarters(b, format, w, line)


def row_scales(format: Format, body: str) -> Any:
    """Intrinsic (w, tiles, scales, inverses): for 16 rows, the scale that fits all of a row's groups into int8, and factor / scale.
    Formats without int8 products leave both alone."""
    top = (8.0 if format.name == "int4_g32" else 128.0) / 127.0

    def emit(b: Builder, w: Value, tiles: Value, scales: Value, inverses: Value) -> None:
        if not format.scale or format.coded:
            return
        most = cgutils.alloca_once_value(b, const(REAL, 1e-30))
        b.store(const(REAL, 1e-30), most)
        with cgutils.for_range(b, tiles) as loop:
            at = b.add(w, b.mul(loop.index, const(I64, format.tile_nbytes)))
            for g in range(64 // GROUP):
                s = call(b, "fabs", _scales(b, format, body, at, g))
                b.store(call(b, "maxnum", b.load(most), s), most)
        row = b.fmul(b.load(most), const(REAL, top))
        store(b, row, scales, 0, 4)
        limit = const(REAL, factor(format))
        store(b, b.fdiv(limit, row), inverses, 0, 4)
    return op(4, emit)

