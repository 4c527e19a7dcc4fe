"""Formats of `formats.Coded`: a tile's codes as bytes, its scales and minimums, and a tile times the activations of 1..m tokens.

Knows no expert and no thread. The int8 activation of 64 columns is a block of 96 B: 64 codes | 2 float32 scales, one per 32 columns | 2 float32
sums of the 32 (scale · Σ codes), which minimums and zero points multiply | starts of the sums, int32 [2], or [4] where 16 columns share a
scale: −zero · Σ codes, as `rows.integer`'s. AVX2 sums nibbles in 16 bits that wrap around: its starts are two int16, of columns 4j, 4j + 1 and of
4j + 2, 4j + 3, and the sum of 32 products of at most (zero, 16) · 127 fits again.
"""
from typing import Any

from ..formats import Coded, Format
from ..lanes import (
    F32,
    I1,
    I8,
    I32,
    I64,
    WIDTHS,
    Builder,
    Value,
    byte,
    call,
    cgutils,
    const,
    declare,
    dpbusd,
    fma,
    fresh,
    half_to_f32,
    ir,
    kept,
    load,
    maddubs,
    pair_sums,
    prefetch,
    sign_of,
    splat,
    spread,
    vec,
)

BLOCK_NBYTES = 96
SCALE_AT, SUM_AT, START_AT = 64, 72, 80


def at_once(format: Format, body: str) -> tuple[int, ...]:
    """Tokens whose sums fit in registers, most first."""
    if body == "generic":
        return (1,)
    return (8, 4, 2, 1) if WIDTHS[body] == 16 else (2, 1)


def zero_of(c: Coded, body: str) -> int:
    """The zero point that starts take away: bytes are signed, and moved up by 128 where they meet an unsigned operand."""
    return 0 if signed(c, body) else c.zero if c.codes == "nibble" else 128 if "vnni" in body else 0


def signed(c: Coded, body: str) -> bool:
    """True for nibbles whose table AVX2 cannot multiply unsigned, for sums of two products must fit 16 bits: it multiplies them as signed bytes."""
    return body == "avx2" and max(c.table, default=0) > 127


def starts_of(c: Coded) -> int:
    return 4 if c.group == 16 else 2


def wraps(c: Coded, body: str) -> bool:
    """True where starts are pairs of int16."""
    return body == "avx2" and c.codes == "nibble" and not signed(c, body)


# ---- codes -------------------------------------------------------------------------------------------------------------------------

def look_up(b: Builder, body: str, table: tuple[int, ...], index: Value) -> Value:
    """Bytes of a 16-entry table by bytes 0..15, in lanes of 32 bits."""
    n = index.type.count
    bytes_ = vec(I8, 4 * n)
    name = {(8, "avx2"): "avx2.pshuf.b", (8, "avx_vnni"): "avx2.pshuf.b", (16, "avx512_vnni"): "avx512.pshuf.b.512"}.get((n, body))
    if name is not None:
        entries = ir.Constant(bytes_, list(table) * (n // 4))
        f = declare(b, f"llvm.x86.{name}", bytes_, bytes_, bytes_)
        return b.bitcast(b.call(f, [entries, b.bitcast(index, bytes_)]), index.type)

    def every(v: int) -> Value:
        return const(index.type, v * 0x01010101)

    def least(n: int) -> Value:
        """1 in bytes where the magnitude is at least n."""
        return b.and_(b.lshr(b.add(m, every(8 - n)), const(index.type, 3)), every(1))
    if max(table) > 24:
        found = every(0)
        for i, v in enumerate(table):                # 1 in bytes that are i, times the entry
            other = b.lshr(b.add(b.xor(index, every(i)), every(15)), const(index.type, 4))
            found = b.add(found, b.mul(b.and_(b.xor(other, every(1)), every(1)), const(index.type, v)))
        return found
    m = b.and_(index, every(7))                      # E2M1 without a table: 0 1 2 3 4 6 8 12 about 12
    top = least(7)
    v = b.add(b.add(m, least(5)), b.add(b.add(least(6), top), b.shl(top, const(index.type, 1))))
    negative = b.mul(b.and_(b.lshr(index, const(index.type, 3)), every(1)), const(index.type, 255))
    return b.sub(b.add(every(12), v), b.shl(b.and_(v, negative), const(index.type, 1)))


def _line(b: Builder, w: Value, line: Value | int, n: int, offset: int) -> Value:
    """n lanes of a line of 64 B whose number may be a value."""
    if isinstance(line, int):
        return load(b, w, vec(I32, n), offset + 64 * line, 32 if n == 8 else 4)
    return load(b, b.add(w, b.mul(line, const(I64, 64))), vec(I32, n), offset, 32 if n == 8 else 4)


def codes_of(b: Builder, format: Format, body: str, w: Value, j: Value | int, half: int, first: int, n: int) -> Value:
    """Codes of columns 32·half + 4j .. + 3 of rows first .. first + n − 1 as bytes of 32-bit lanes: unsigned after the table, bytes as stored."""
    c = format.coded
    assert c is not None
    if c.codes == "byte":
        return _line(b, w, j, n, c.lines_at + 512 * half + 4 * first)
    if isinstance(j, int):
        raw = _line(b, w, j % c.lines, n, c.lines_at + 4 * first)
        at: Value = const(raw.type, c.low * ((8 * half + j) // c.lines))
    else:
        raw = _line(b, w, b.urem(j, const(I64, c.lines)), n, c.lines_at + 4 * first)
        at = splat(b, b.trunc(b.mul(b.udiv(b.add(j, const(I64, 8 * half)), const(I64, c.lines)), const(I64, c.low)), I32), n)
    q = b.and_(b.lshr(raw, at), const(raw.type, ((1 << c.low) - 1) * 0x01010101))
    if c.table:
        return look_up(b, body, c.table, q)
    if c.planes:
        per = 8 // c.planes
        mask = const(raw.type, ((1 << c.planes) - 1) * 0x01010101)
        offset = c.planes_at + 64 * c.planes * half + 4 * first
        if isinstance(j, int):
            upper = _line(b, w, j // per, n, offset)
            shift: Value = const(raw.type, c.planes * (j % per))
        else:
            upper = _line(b, w, b.udiv(j, const(I64, per)), n, offset)
            shift = splat(b, b.trunc(b.mul(b.urem(j, const(I64, per)), const(I64, c.planes)), I32), n)
        q = b.or_(q, b.shl(b.and_(b.lshr(upper, shift), mask), const(raw.type, c.low)))
    return q


def fp8(b: Builder, code: Value) -> Value:
    """E4M3 in the upper byte of 32-bit lanes (the others 0) -> float32 · 2^−120, subnormals too: the exponent's bias differs by 120."""
    return b.bitcast(b.and_(b.ashr(code, const(code.type, 4)), const(code.type, -0x78100000)), vec(F32, code.type.count))


def fp8_columns(b: Builder, line: Value) -> list[Value]:
    """A line of E4M3, 4 columns -> their float32 · 2^−120: bf16 in the upper and lower halves of words, the odd columns' and the even ones'."""
    words = b.bitcast(line, vec(ir.IntType(16), 2 * line.type.count))
    mask, four = const(words.type, -0x7810), const(words.type, 4)
    odd = b.bitcast(b.and_(b.ashr(words, four), mask), line.type)
    even = b.bitcast(b.and_(b.ashr(b.shl(words, const(words.type, 8)), four), mask), line.type)
    halves = [b.shl(v, const(line.type, 16)) for v in (even, odd)] + [b.and_(v, const(line.type, -0x10000)) for v in (even, odd)]
    return [b.bitcast(v, vec(F32, line.type.count)) for v in halves]


def numbers(b: Builder, format: Format, body: str, w: Value, j: Value | int, half: int, kk: int, first: int, n: int, line: Value) -> Value:
    """float32 of column 32·half + 4j + kk before its scale; `line`: what `codes_of` gives of these columns."""
    c = format.coded
    assert c is not None
    if format.partner == "f32":
        up = b.shl(line, const(line.type, 24 - 8 * kk)) if kk < 3 else line
        return b.fmul(fp8(b, up), const(vec(F32, n), 2.0 ** 120))
    v = byte(b, line, kk, c.codes == "byte")
    return b.sitofp(b.sub(v, const(v.type, c.zero)) if c.codes == "nibble" else v, vec(F32, n))


# ---- scales ------------------------------------------------------------------------------------------------------------------------

def _field(b: Builder, c: Coded, name: str, w: Value, i: Value | int, first: int, n: int, body: str) -> Value:
    """Number i of rows first .. first + n − 1 of a field, as float32 or int32 lanes."""
    f = next(f for f in c.head if f.name == name)
    size = int(f.dtype[1])
    if not isinstance(i, int):
        w, i = b.add(w, b.mul(i, const(I64, 16 * size))), 0
    at = c.at(name) + 16 * size * i + size * first
    if f.dtype == "f4":
        return load(b, w, vec(F32, n), at, 4)
    if f.dtype == "f2":
        return half_to_f32(b, w, n, body, at)
    v = load(b, w, vec(I8, n), at, 1)
    return b.zext(v, vec(I32, n)) if f.dtype == "u1" else b.sext(v, vec(I32, n))


def group_at(b: Builder, c: Coded, half: int, sub: Value | int) -> Value | int:
    """Which of a row's groups in a tile."""
    if c.group == 16:
        return 2 * half + sub if isinstance(sub, int) else b.add(sub, const(I64, 2 * half))
    return 0 if c.group == 64 else half


def scale_of(b: Builder, format: Format, body: str, w: Value, half: int, sub: Value | int, first: int, n: int) -> Value:
    """float32 scales of n rows for columns 32·half (+ 16·sub where 16 share one)."""
    c, real, wide = format.coded, vec(F32, n), vec(I32, n)
    assert c is not None
    s = _field(b, c, "scales", w, group_at(b, c, half, sub), first, n, body)
    if format.scale in ("f16", "f32"):
        return s
    if format.scale == "e8m0":
        return b.bitcast(b.shl(s, const(wide, 23)), real)
    if format.scale == "e4m3":
        wider = b.fmul(b.bitcast(b.shl(s, const(wide, 20)), real), const(real, 2.0 ** 120))
        return b.fmul(wider, spread(b, w, F32, n, c.at("overall")))
    return b.fmul(b.sitofp(s, real), _field(b, c, "supers", w, 0, first, n, body))


def shift_of(b: Builder, format: Format, body: str, w: Value, half: int, sub: Value | int, first: int, n: int) -> Value:
    """What is added to each weight of these columns after (code − zero) · scale."""
    c, real = format.coded, vec(F32, n)
    assert c is not None
    s = scale_of(b, format, body, w, half, sub, first, n)
    if "zeros" in c.names:
        z = _field(b, c, "zeros", w, 0 if c.group == 64 else half, first, n, body)
        return b.fmul(s, b.sitofp(b.sub(const(z.type, c.zero), z), real))
    if "offsets" in c.names:
        return fma(b, s, const(real, float(c.zero)), _field(b, c, "offsets", w, half, first, n, body))
    m = b.fmul(b.sitofp(_field(b, c, "minimums", w, group_at(b, c, half, sub), first, n, body), real), _field(b, c, "least", w, 0, first, n, body))
    return fma(b, s, const(real, float(c.zero)), b.fneg(m))


def unpacker(b: Builder, format: Format, body: str, w: Value) -> Any:
    """weights(j, half): float32 weights of columns 32·half + 4j .. + 3 of all 16 rows; scales are read now, once."""
    c = format.coded
    assert c is not None
    subs = 2 if c.group == 16 else 1
    scales = [[scale_of(b, format, body, w, half, s, 0, 16) for s in range(subs)] for half in range(2)]
    shifts = [[shift_of(b, format, body, w, half, s, 0, 16) if c.shifts else None for s in range(subs)] for half in range(2)]

    def weights(j: int, half: int) -> list[Value]:
        line = codes_of(b, format, body, w, j, half, 0, 16)
        v = [numbers(b, format, body, w, j, half, kk, 0, 16, line) for kk in range(4)]
        s, m = scales[half][j * subs // 8], shifts[half][j * subs // 8]
        return [b.fmul(x, s) if m is None else fma(b, x, s, m) for x in v]
    return weights


# ---- products ----------------------------------------------------------------------------------------------------------------------

def _ready(b: Builder, c: Coded, body: str, raw: Value) -> tuple[Value, ...]:
    """Bytes as the body multiplies them: (bytes,), or for AVX2's signed ones (bytes, their magnitudes)."""
    if signed(c, body):
        raw = b.bitcast(b.sub(b.bitcast(raw, vec(I8, 32)), const(vec(I8, 32), c.zero)), raw.type)
    elif c.codes == "nibble" or body == "generic":
        return (raw,)
    if body == "avx2":
        return raw, b.bitcast(call(b, "abs", b.bitcast(raw, vec(I8, 32)), const(I1, 0)), raw.type)
    return (b.xor(raw, const(raw.type, -0x7F7F7F80)),)


def _add(b: Builder, c: Coded, body: str, total: Value, w: tuple[Value, ...], x: Value) -> Value:
    """total + 4 products per lane; AVX2's nibbles in pairs of int16."""
    if body == "generic":
        for kk in range(4):
            total = b.add(total, b.mul(byte(b, w[0], kk, c.codes == "byte"), byte(b, x, kk, True)))
        return total
    if body == "avx2":
        if c.codes == "nibble" and not signed(c, body):
            return kept(b, b.bitcast(b.add(b.bitcast(total, vec(ir.IntType(16), 16)), maddubs(b, w[0], x)), total.type))
        return kept(b, b.add(total, pair_sums(b, maddubs(b, w[1], sign_of(b, x, w[0])))))
    total = dpbusd(b, total, w[0], x)
    return total if body == "avx512_vnni" else kept(b, total)


def _looped(b: Builder, format: Format, w: Value, xs: list[Value], sums: dict[Any, Value], js: range) -> None:
    """The generic body's lines `js` in a loop: it has so many instructions per line that compiling them one by one takes seconds."""
    c = format.coded
    assert c is not None
    kept_sums = {k: cgutils.alloca_once_value(b, v) for k, v in sums.items()}
    for k, v in sums.items():
        b.store(v, kept_sums[k])
    with cgutils.for_range(b, const(I64, len(js))) as loop:
        j = b.add(loop.index, const(I64, js.start))
        for (t, h, p), place in kept_sums.items():
            column = codes_of(b, format, "generic", w, j, h, 8 * p, 8)
            x = spread(b, b.add(xs[t], b.shl(j, const(I64, 2))), I32, 8, 32 * h)
            b.store(_add(b, c, "generic", b.load(place), (column,), x), place)
    for k, place in kept_sums.items():
        sums[k] = b.load(place)


def tile(b: Builder, format: Format, body: str, add: Any, w: Value, xs: list[Value], ahead: Value) -> None:
    """add(token, part, value, scale) takes float32 sums of 16 rows in parts of the body's width; xs: addresses of the tokens' activation
    blocks; ahead: a tile to be prefetched, line by line between the products."""
    c = format.coded
    assert c is not None
    n, real = WIDTHS[body], vec(F32, WIDTHS[body])
    parts, tokens, subs = range(16 // n), range(len(xs)), 2 if c.group == 16 else 1
    rounds = [(s, hs) for hs in (((0, 1),) if c.codes == "nibble" else ((0,), (1,))) for s in range(subs)]
    lines, steps, step = -(-format.tile_nbytes // 64), len(rounds) * 8 // subs, 0
    for s, halves in rounds:
        fresh(b)
        sums: dict[Any, Any] = {(t, h, p): spread(b, xs[t], I32, n, START_AT + 4 * (subs * h + s)) for t in tokens for h in halves for p in parts}
        js = range(8 * s // subs, 8 * (s + 1) // subs)
        if body == "generic":
            _looped(b, format, w, xs, sums, js)
        for j in js if body != "generic" else ():
            fresh(b)
            for i in range(lines * step // steps, lines * (step + 1) // steps):
                prefetch(b, ahead, 64 * i)
            step += 1
            for h in halves:
                columns = [_ready(b, c, body, codes_of(b, format, body, w, j, h, n * p, n)) for p in parts]
                for t in tokens:
                    x = spread(b, xs[t], I32, n, 32 * h + 4 * j)
                    for p in parts:
                        sums[t, h, p] = _add(b, c, body, sums[t, h, p], columns[p], x)
        for h in halves:
            scales = [scale_of(b, format, body, w, h, s, n * p, n) for p in parts]
            shifts = [shift_of(b, format, body, w, h, s, n * p, n) for p in parts] if c.shifts else []
            for t in tokens:
                sx = spread(b, xs[t], F32, n, SCALE_AT + 4 * h)
                if shifts:
                    sums_x = spread(b, xs[t], F32, n, SUM_AT + 4 * h) if subs == 1 else sum_of(b, c, body, xs[t], START_AT + 4 * (2 * h + s), sx)
                for p in parts:
                    total = sums[t, h, p]
                    if wraps(c, body):
                        total = pair_sums(b, b.bitcast(total, vec(ir.IntType(16), 16)))
                    add(t, p, b.sitofp(total, real), b.fmul(scales[p], sx))
                    if shifts:
                        add(t, p, shifts[p], sums_x)


def sum_of(b: Builder, c: Coded, body: str, x: Value, start: int, scale: Value) -> Value:
    """Scale times the sum of 16 codes of an activation, from their start, which is −zero times that sum."""
    total = spread(b, x, I32, scale.type.count, start)
    if wraps(c, body):
        total = pair_sums(b, b.bitcast(total, vec(ir.IntType(16), 16)))
    return b.fmul(b.sitofp(total, scale.type), b.fmul(scale, const(scale.type, -1.0 / c.zero)))


# ---- activations -------------------------------------------------------------------------------------------------------------------

def emit_take(c: Coded, body: str) -> Any:
    """2 × 16 float32 -> codes, scale, sum and starts of half 0 or 1 of an activation block. A half with NaN or infinity gets
    codes 0 and scale NaN: all products of its token become NaN, and nobody else's."""
    zero, apart = zero_of(c, body), starts_of(c) == 4

    def emit(b: Builder, first: Value, second: Value, block: Value, half: Value) -> None:
        wide, real = vec(I32, 16), vec(F32, 16)
        v = [load(b, source, real, 0, 4) for source in (first, second)]
        bits = [b.and_(b.bitcast(x, wide), const(wide, 0x7FFFFFFF)) for x in v]
        top = b.select(b.icmp_unsigned(">", bits[0], bits[1]), bits[0], bits[1])
        top = b.call(declare(b, "llvm.vector.reduce.umax.v16i32", I32, wide), [top])
        m = b.bitcast(top, F32)
        finite = b.icmp_unsigned("<", top, const(I32, 0x7F800000))
        usable = b.and_(finite, b.fcmp_ordered(">", m, const(F32, 1e-30)))
        inverse = b.select(usable, b.fdiv(const(F32, 127.0), b.select(usable, m, const(F32, 1.0))), const(F32, 0.0))
        q = [b.fptosi(call(b, "rint", b.fmul(b.select(splat(b, usable, 16), x, const(real, 0.0)), splat(b, inverse, 16))), wide) for x in v]
        at = b.add(block, b.mul(half, const(I64, 32)))
        for i in range(2):
            store16(b, q[i], at, 16 * i)

        def total(x: Value, lanes_: tuple[int, ...] = (0, 1, 2, 3)) -> Value:
            mask = ir.Constant(wide, [-1 if i % 4 in lanes_ else 0 for i in range(16)])
            return b.call(declare(b, "llvm.vector.reduce.add.v16i32", I32, wide), [b.and_(x, mask)])

        def start(x: Value) -> Value:
            if not wraps(c, body):
                return b.mul(total(x), const(I32, -zero))
            low, high = (b.mul(total(x, lanes_), const(I32, -zero)) for lanes_ in ((0, 1), (2, 3)))
            return b.or_(b.shl(high, const(I32, 16)), b.and_(low, const(I32, 0xFFFF)))
        both = b.add(q[0], q[1])
        scale = b.select(finite, b.fmul(m, const(F32, 1 / 127)), const(F32, float("nan")))
        words = b.add(block, b.mul(half, const(I64, 4)))
        put(b, scale, words, SCALE_AT)
        put(b, b.fmul(scale, b.sitofp(total(both), F32)), words, SUM_AT)
        for i, x in enumerate(q if apart else [both]):
            put(b, start(x), b.add(words, b.mul(half, const(I64, 4))) if apart else words, START_AT + 4 * i)
    return emit


def store16(b: Builder, q: Value, address: Value, offset: int) -> None:
    b.store(b.trunc(q, vec(I8, 16)), b.inttoptr(b.add(address, const(I64, offset)), ir.PointerType()), align=1)


def put(b: Builder, value: Value, address: Value, offset: int) -> None:
    b.store(value, b.inttoptr(b.add(address, const(I64, offset)), ir.PointerType()), align=4)
