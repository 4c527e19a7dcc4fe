"""Float matrices of any precision into packed tiles, by kernels that need no Python lock: one matrix per call, a few hundred bytes of scratch.

int4: of eight scales around the one that maps the largest magnitude to −8 (or to 7), the one whose codes' least-squares scale leaves the
smallest error is kept, that scale rounded to five significant bits (times a code it is a bf16 exactly, which tile products want), with the
nearest codes for it: a sixth less error than rounding to the largest magnitude / 7. int8: largest magnitude / 127.
Knows the tiles' bytes as `rows/` documents them; no expert, no thread.
"""
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import codes as coded
from . import lanes
from .formats import COLS, FORMATS, ROWS, Format
from .jit import kernel
from .lanes import F32, I8, I16, I32, I64, Builder, Value, const, load, op, splat, store, vec

TAGS = {"f32": 4, "f16": 2, "bf16": 2}               # bytes of one value, by dtype tag
CANDIDATES = (-8.0, -9.2, -8.6, -7.4, -6.8, -6.2, 7.4, 6.6)        # codes of the largest magnitude, before clipping to −8..7
TINY = 1e-30
FINITE_BITS = 0x7F800000
NOT_FINITE = 1                                       # what a packing kernel returns when it met NaN or infinity
SPARE_NBYTES = 256 + 64                              # 64 float32 of one row, 64 codes

_R, _W = vec(F32, 8), vec(I32, 8)


def _widen(tag: str) -> Any:
    """16 values -> 16 float32."""
    def emit(b: Builder, source: Value, into: Value) -> None:
        if tag == "f32":
            v = load(b, source, vec(F32, 16), 0, 4)
        else:
            v = lanes.bf16_to_f32(b, source, 16) if tag == "bf16" else lanes.half_to_f32(b, source, 16, "generic")
        if tag == "f16":                             # that conversion takes infinity and NaN for large numbers
            wide = vec(I32, 16)
            h = b.and_(b.zext(load(b, source, vec(I16, 16), 0, 2), wide), const(wide, 0x7C00))
            v = b.select(b.icmp_signed("==", h, const(wide, 0x7C00)), const(vec(F32, 16), float("inf")), v)
        store(b, v, into, 0, 4)
    return op(2, emit)


def _half_bits(b: Builder, x: Value) -> Value:
    """float32 -> 16 bits of fp16, to nearest even, magnitudes above 65504 clamped."""
    bits = b.bitcast(x, I32)
    sign = b.and_(b.lshr(bits, const(I32, 16)), const(I32, 0x8000))
    magnitude = lanes.least(b, b.bitcast(b.and_(bits, const(I32, 0x7FFFFFFF)), F32), const(F32, 65504.0))
    small = b.bitcast(b.fmul(magnitude, const(F32, 2.0 ** -112)), I32)
    odd = b.and_(b.lshr(small, const(I32, 13)), const(I32, 1))
    return b.trunc(b.or_(b.lshr(b.add(b.add(small, const(I32, 0xFFF)), odd), const(I32, 13)), sign), I16)


def _bf16_bits(b: Builder, bits: Value) -> Value:
    """int32 (or lanes) of finite float32 -> the same with the upper half rounded to nearest even, lower half undefined."""
    odd = b.and_(b.lshr(bits, const(bits.type, 16)), const(bits.type, 1))
    return b.add(b.add(bits, const(bits.type, 0x7FFF)), odd)


def _sums8(b: Builder, v: list[Value]) -> Value:
    """Eight vectors of 8 lanes -> one vector of their sums."""
    for low, high in (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))):
        pairs = []
        for x, y in zip(v[::2], v[1::2], strict=True):
            one, two = (b.shuffle_vector(x, y, ir_indices([*half, *(8 + i for i in half)])) for half in (low, high))
            pairs.append(b.fadd(one, two))
        v = pairs
    return v[0]


def ir_indices(indices: list[int]) -> Value:
    return lanes.ir.Constant(vec(I32, len(indices)), indices)


def _reduce(b: Builder, name: str, v: Value) -> Value:
    short = "f32" if v.type.element == F32 else "i32"
    return b.call(lanes.declare(b, f"llvm.vector.reduce.{name}.v{v.type.count}{short}", v.type.element, v.type), [v])


def _largest(b: Builder, x: list[Value]) -> tuple[Value, Value, Value]:
    """(largest magnitude, its bits, 1 when something is not finite) of 4 × 8 float32."""
    bits = [b.and_(b.bitcast(v, _W), const(_W, 0x7FFFFFFF)) for v in x]
    most = bits[0]
    for v in bits[1:]:
        most = b.select(b.icmp_unsigned(">", v, most), v, most)
    top = _reduce(b, "umax", most)
    return b.bitcast(top, F32), top, b.zext(b.icmp_unsigned(">=", top, const(I32, FINITE_BITS)), I64)


def _emit_int4(b: Builder, source: Value, scale_at: Value, codes_at: Value) -> Value:
    """64 float32 -> two fp16 scales 32 B apart, 64 codes 0..15. The two groups go in step: one alone is a chain of instructions that wait."""
    bads, at = list[Value](), lanes.plus
    groups = [_int4_steps(b, at(b, source, 128 * g), at(b, scale_at, 32 * g), at(b, codes_at, 32 * g), bads) for g in range(2)]
    for _ in zip(*groups, strict=True):
        pass
    return b.or_(*bads)


def _int4_steps(b: Builder, source: Value, scale_at: Value, codes_at: Value, bads: list[Value]) -> Iterator[None]:
    """The code of one group, a piece at a time; puts 1 into `bads` when something is not finite."""
    x = [load(b, source, _R, 32 * i, 4) for i in range(4)]
    m, bits, bad = _largest(b, x)
    signed = [b.bitcast(v, _W) for v in x]           # as integers, floats above 0 have their order and those below are negative
    high = _reduce(b, "smax", functools.reduce(lambda u, v: b.select(b.icmp_signed(">", u, v), u, v), signed))
    usable = b.and_(b.fcmp_ordered(">", m, const(F32, TINY)), b.icmp_signed("==", bad, const(I64, 0)))
    top = b.select(b.icmp_signed("==", high, bits), m, b.fneg(m))
    inverse = b.select(usable, b.fdiv(const(F32, 1.0), b.select(usable, top, const(F32, 1.0))), const(F32, 0.0))
    x = [b.select(splat(b, usable, 8), v, const(_R, 0.0)) for v in x]

    def codes(factor: Value, c: float = -9.0) -> list[Value]:
        """Rounded by a constant that pushes the fraction out; clipped where a magnitude of |c| can pass the ends."""
        far = const(_R, 1.5 * 2.0 ** 23)
        q = [b.fsub(lanes.fma(b, v, factor, far), far) for v in x]
        if abs(c) >= 7.5:
            q = [lanes.least(b, v, const(_R, 7.0)) for v in q]
        return [lanes.most(b, v, const(_R, -8.0)) for v in q] if abs(c) > 8 else q
    products, squares = list[Value](), list[Value]()
    bads.append(bad)
    yield
    for c in CANDIDATES:
        q = codes(splat(b, b.fmul(inverse, const(F32, c)), 8), c)
        xq = qq = const(_R, 0.0)
        for v, w in zip(x, q, strict=True):
            xq, qq = lanes.fma(b, v, w, xq), lanes.fma(b, w, w, qq)
        products, squares = [*products, xq], [*squares, qq]
        yield
    xq, qq = _sums8(b, products), _sums8(b, squares)
    safe = lanes.most(b, qq, const(_R, 1.0))
    gain = b.fdiv(b.fmul(xq, xq), safe)
    yield
    rank = b.bitcast(gain, _W)                       # never negative
    best = b.icmp_signed(">=", rank, splat(b, _reduce(b, "smax", rank), 8))
    lane = _reduce(b, "umin", b.select(best, ir_indices(list(range(8))), const(_W, 7)))
    yield
    table = lanes.ir.Constant(_R, list(CANDIDATES))
    nearest = b.fdiv(b.extract_element(xq, lane), b.extract_element(safe, lane))
    short = b.and_(b.add(b.bitcast(nearest, I32), const(I32, 1 << 18)), const(I32, -1 << 19))
    unlike = b.icmp_signed("==", b.and_(short, const(I32, 0x7FFFFFFF)), const(I32, 0))
    scale = b.bitcast(short, F32)
    factor = b.select(unlike, b.fmul(inverse, b.extract_element(table, lane)), b.fdiv(const(F32, 1.0), scale))
    store(b, b.select(usable, _half_bits(b, scale), const(I16, 0)), scale_at, 0, 2)
    for i, q in enumerate(codes(splat(b, factor, 8))):
        store(b, b.trunc(b.add(b.fptosi(q, _W), const(_W, 8)), vec(I8, 8)), codes_at, 8 * i)
    yield


def _emit_int8(b: Builder, source: Value, scale_at: Value, codes_at: Value) -> Value:
    """32 float32 -> bf16 scale, 32 codes −127..127."""
    x = [load(b, source, _R, 32 * i, 4) for i in range(4)]
    m, _, bad = _largest(b, x)
    usable = b.and_(b.fcmp_ordered(">", m, const(F32, TINY)), b.icmp_signed("==", bad, const(I64, 0)))
    rounded = b.and_(_bf16_bits(b, b.bitcast(b.fdiv(m, const(F32, 127.0)), I32)), const(I32, -0x10000))
    scale = b.bitcast(rounded, F32)
    inverse = b.select(usable, b.fdiv(const(F32, 1.0), b.select(usable, scale, const(F32, 1.0))), const(F32, 0.0))
    store(b, b.select(usable, b.trunc(b.lshr(rounded, const(I32, 16)), I16), const(I16, 0)), scale_at, 0, 2)
    for i, v in enumerate(x):
        q = lanes.call(b, "rint", b.fmul(b.select(splat(b, usable, 8), v, const(_R, 0.0)), splat(b, inverse, 8)))
        q = lanes.most(b, lanes.least(b, q, const(_R, 127.0)), const(_R, -127.0))
        store(b, b.trunc(b.fptosi(q, _W), vec(I8, 8)), codes_at, 8 * i)
    return bad


def _emit_finite(b: Builder, source: Value) -> Value:
    """1 when one of 64 float32 is not finite."""
    return b.or_(*(_largest(b, [load(b, source, _R, 128 * half + 32 * i, 4) for i in range(4)])[2] for half in range(2)))


def _emit_spread(format: Format) -> Any:
    """One row's 64 codes (or float32) into the lines of a tile; `line`: the address of the row's word in the tile's first line."""
    def emit(b: Builder, codes: Value, line: Value) -> None:
        if format.name == "int4_g32":
            low, high = (load(b, codes, vec(I32, 8), 32 * g) for g in range(2))
            v = b.or_(low, b.shl(high, const(_W, 4)))
            for j in range(8):
                store(b, b.extract_element(v, const(I32, j)), line, 64 * j, 4)
            return
        if format.name == "f16":
            for k in range(COLS):
                store(b, _half_bits(b, load(b, codes, F32, 4 * k, 4)), line, 32 * k, 2)
            return
        for j in range(16 if format.name == "int8_g32" else COLS if format.name == "f32" else 32):
            if format.name == "bf16":
                first, second = (_bf16_bits(b, load(b, codes, I32, 8 * j + 4 * i, 4)) for i in range(2))
                word = b.or_(b.lshr(first, const(I32, 16)), b.and_(second, const(I32, -0x10000)))
            else:
                word = load(b, codes, I32, 4 * j, 4)
            store(b, word, line, 64 * j, 4)
    return op(2, emit)


_zero16 = op(1, lambda b, a: store(b, const(vec(F32, 16), 0.0), a, 0, 4))
_int4, _int8, _finite = op(3, _emit_int4, gives=True), op(3, _emit_int8, gives=True), op(1, _emit_finite, gives=True)


@functools.cache
def packer(format: str, tag: str) -> Any:
    """A kernel pack(source, rows, cols, row_nbytes, tiles, blocks, spare) -> 0 or NOT_FINITE: a float matrix of that dtype tag
    whose rows are row_nbytes apart into `blocks` · 16 rows of tiles, zeros beyond its own. `spare`: SPARE_NBYTES of the caller's."""
    f = FORMATS[format]
    widen, widen_one, place = _widen(tag), _widen_first(tag), _emit_spread(f)
    width, size, scaled, int4, word = TAGS[tag], f.tile_nbytes, bool(f.scale), format == "int4_g32", 2 if format == "f16" else 4

    @kernel(key=("row", tag))
    def take_row(source: int, count: int, spare: int) -> None:
        """64 float32 at spare from `count` values."""
        if count >= 64:
            for i in range(4):
                widen(source + 16 * width * i, spare + 64 * i)
            return
        for i in range(4):
            _zero16(spare + 64 * i)
        for i in range(count):
            widen_one(source + width * i, spare + 4 * i)

    @kernel(key=(format, tag))
    def pack_tiles(source: int, rows: int, cols: int, row_nbytes: int, tiles: int, blocks: int, spare: int) -> int:
        per = (cols + COLS - 1) // COLS
        bad = 0
        for block in range(blocks):
            for k in range(per):
                tile = tiles + (block * per + k) * size
                for n in range(ROWS):
                    row = block * ROWS + n
                    take_row(source + row * row_nbytes + k * COLS * width, min(cols - k * COLS, COLS) if row < rows else 0, spare)
                    if scaled:
                        if int4:
                            bad |= _int4(spare, tile + 2 * n, spare + 256)
                        else:
                            for g in range(2):
                                bad |= _int8(spare + 128 * g, tile + 32 * g + 2 * n, spare + 256 + 32 * g)
                        place(spare + 256, tile + 64 + 4 * n)
                    else:
                        bad |= _finite(spare)
                        place(spare, tile + word * n)
        return bad

    return pack_tiles


def into(format: Format, w: np.ndarray[Any, Any], tag: str, tiles: np.ndarray[Any, Any]) -> bool:
    """A float matrix into all of `tiles` (uint8), whose blocks of 16 rows beyond the matrix become zeros. False: it holds NaN or infinity."""
    if format.coded:
        return _nearest(format, w, tag, tiles)
    if w.strides[1] != w.itemsize:
        w = np.ascontiguousarray(w)
    spare = np.empty(SPARE_NBYTES, np.uint8)
    blocks = tiles.size // format.nbytes(ROWS, w.shape[1])
    return not packer(format.name, tag)(w.ctypes.data, *w.shape, w.strides[0], tiles.ctypes.data, blocks, spare.ctypes.data)


def _widen_first(tag: str) -> Any:
    """One value -> float32."""
    def emit(b: Builder, source: Value, into: Value) -> None:
        if tag == "f32":
            v = load(b, source, F32, 0, 1)
        elif tag == "bf16":
            v = b.bitcast(b.shl(b.zext(load(b, source, I16, 0, 1), I32), const(I32, 16)), F32)
        else:
            h = b.zext(load(b, source, I16, 0, 1), I32)
            magnitude = b.fmul(b.bitcast(b.shl(b.and_(h, const(I32, 0x7FFF)), const(I32, 13)), F32), const(F32, 2.0 ** 112))
            magnitude = b.select(b.icmp_signed("==", b.and_(h, const(I32, 0x7C00)), const(I32, 0x7C00)), const(F32, float("inf")), magnitude)
            v = b.bitcast(b.or_(b.bitcast(magnitude, I32), b.shl(b.and_(h, const(I32, 0x8000)), const(I32, 16))), F32)
        store(b, v, into, 0, 4)
    return op(2, emit)


@functools.cache
def repacker(format: str) -> Any:
    """A kernel repack(codes, scales, rows, cols, groups, tiles, blocks, spare): codes of one byte [rows, cols] and their scales' bits
    [rows, groups] into `blocks` · 16 rows of tiles, zeros beyond their own."""
    f = FORMATS[format]
    place, size, nothing = _emit_spread(f), f.tile_nbytes, 0x08080808 if format == "int4_g32" else 0

    @kernel(key=format)
    def repack(codes: int, scales: int, rows: int, cols: int, groups: int, tiles: int, blocks: int, spare: int) -> int:
        per = (cols + COLS - 1) // COLS
        for block in range(blocks):
            for k in range(per):
                tile = tiles + (block * per + k) * size
                for n in range(ROWS):
                    row = block * ROWS + n
                    here = min(cols - k * COLS, COLS) if row < rows else 0
                    source = codes + row * cols + k * COLS
                    for i in range(0, 64, 4):
                        if i + 4 <= here:
                            _copy4(spare + i, source + i)
                        else:
                            _fill4(spare + i, nothing)
                    for i in range(here // 4 * 4, here):
                        _copy1(spare + i, source + i)
                    for g in range(2):
                        if row < rows and 2 * k + g < groups:
                            _copy2(tile + 32 * g + 2 * n, scales + 2 * (row * groups + 2 * k + g))
                        else:
                            _fill2(tile + 32 * g + 2 * n, 0)
                    place(spare, tile + 64 + 4 * n)
        return 0

    return repack


_copy4, _copy2, _copy1 = (op(2, lambda b, a, s, kind=kind: store(b, load(b, s, kind), a)) for kind in (I32, I16, I8))
_fill4, _fill2 = (op(2, lambda b, a, v, kind=kind: store(b, b.trunc(v, kind), a)) for kind in (I32, I16))


# ---- formats of `formats.Coded` ----------------------------------------------------------------------------------------------------

ROWS_AT_ONCE = 256                                   # that numpy looks for the nearest codes of


def _nearest(format: Format, w: np.ndarray[Any, Any], tag: str, tiles: np.ndarray[Any, Any]) -> bool:
    """Floats by the twin's rounding: slow, for weights that somebody asked to be rounded to a format they did not come in."""
    as_f32 = (w.astype(np.uint32) << 16).view(np.float32) if tag == "bf16" else np.asarray(w, np.float32)
    if not np.isfinite(as_f32).all():
        return False
    parts = [coded.quantize(format, as_f32[i:i + ROWS_AT_ONCE] if "overall" not in format.coded.names else as_f32)  # type: ignore[union-attr]
             for i in range(0, len(w), ROWS_AT_ONCE if "overall" not in format.coded.names else len(w))]  # type: ignore[union-attr]
    put_codes(format, np.concatenate([q for q, _ in parts]), {k: np.concatenate([f[k] for _, f in parts]) for k in parts[0][1]}, w.shape[1], tiles)
    return True


def put_codes(format: Format, q: np.ndarray[Any, Any], fields: coded.Fields, cols: int, tiles: np.ndarray[Any, Any]) -> None:
    """Codes [rows, cols] (nibbles also as pairs [rows, cols / 2], the even column in the low half) with checked fields into all of `tiles`,
    zeros beyond the matrix."""
    rows, per = len(q), (cols + COLS - 1) // COLS
    whole = tiles[:tiles.size // format.nbytes(ROWS, cols) * format.nbytes(ROWS, cols)].reshape(-1, per, format.tile_nbytes)
    head = coded.heads(format, fields, rows, cols)
    whole[:len(head), :, :head.shape[2]] = head
    whole[len(head):] = 0
    q, spare = np.ascontiguousarray(q), np.empty(64, np.uint8)
    placer(format.name, q.shape[1] != cols)(q.ctypes.data, rows, cols, whole.ctypes.data, spare.ctypes.data)


def _emit_pairs(b: Builder, source: Value, into: Value) -> None:
    """32 pairs of nibbles -> 64 codes."""
    kind = vec(I8, 32)
    v = load(b, source, kind)
    low, high = b.and_(v, const(kind, 15)), b.lshr(v, const(kind, 4))
    store(b, b.shuffle_vector(low, high, ir_indices([i // 2 + 32 * (i % 2) for i in range(64)])), into)


def _emit_lines(format: Format) -> Any:
    """64 codes of one row into a tile; `word`: the row's word in the tile's first line of codes."""
    c = coded.coded(format)

    def emit(b: Builder, codes: Value, word: Value) -> None:
        if c.codes == "byte":
            for j in range(16):
                store(b, load(b, codes, I32, 4 * j), word, 64 * j, 4)
            return
        halves = [load(b, codes, vec(I32, 8), 32 * g) for g in range(2)]
        low, high = (b.and_(v, const(_W, ((1 << c.low) - 1) * 0x01010101)) for v in halves)
        v = b.or_(low, b.shl(high, const(_W, 4)))
        for j in range(c.lines):
            of = [b.shl(b.extract_element(v, const(I32, i)), const(I32, 2 * (i // c.lines))) for i in range(j, 8, c.lines)]
            store(b, functools.reduce(b.or_, of), word, 64 * j, 4)
        per = 8 // max(c.planes, 1)
        for half, v in enumerate(halves if c.planes else ()):
            upper = b.and_(b.lshr(v, const(_W, c.low)), const(_W, ((1 << c.planes) - 1) * 0x01010101))
            upper = b.shl(upper, ir_indices([c.planes * (j % per) for j in range(8)]))
            for line in range(c.planes):
                bits = [b.extract_element(upper, const(I32, per * line + i)) for i in range(per)]
                store(b, functools.reduce(b.or_, bits), word, 64 * c.lines + 64 * (half * c.planes + line), 4)
    return op(2, emit)


@functools.cache
def placer(format: str, pairs: bool) -> Any:
    """A kernel place(codes, rows, cols, tiles, spare): the lines of codes of all tiles that hold rows; their heads are there."""
    f = FORMATS[format]
    place, size, at, double = _emit_lines(f), f.tile_nbytes, coded.coded(f).lines_at, op(2, _emit_pairs)
    row_nbytes = 1 if not pairs else 2               # codes per byte

    @kernel(key=(format, pairs))
    def place_codes(codes: int, rows: int, cols: int, tiles: int, spare: int) -> int:
        per, width = (cols + COLS - 1) // COLS, (cols + row_nbytes - 1) // row_nbytes
        for block in range((rows + ROWS - 1) // ROWS):
            for k in range(per):
                word = tiles + (block * per + k) * size + at
                for n in range(ROWS):
                    row, here = block * ROWS + n, min(cols - k * COLS, COLS)
                    source = codes + row * width + k * (COLS // row_nbytes)
                    if row >= rows or here < COLS:
                        for i in range(0, 64, 4):
                            _fill4(spare + i, 0)
                        for i in range(here if row < rows else 0):
                            _nibble1(spare + i, source + i // row_nbytes, (i & 1) * 4) if pairs else _copy1(spare + i, source + i)
                        place(spare, word + 4 * n)
                    elif pairs:
                        double(source, spare)
                        place(spare, word + 4 * n)
                    else:
                        place(source, word + 4 * n)
        return 0

    return place_codes


_nibble1 = op(3, lambda b, a, s, shift: store(b, b.and_(b.lshr(load(b, s, I8), b.trunc(shift, I8)), const(I8, 15)), a))
