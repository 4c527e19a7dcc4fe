"""Arithmetic on spans of float32 in memory: dots, widening, and the three inner loops of attention; knows no head, no page and no thread.

Every kernel takes addresses. `spans(body)` makes them for one instruction set. Rows of attention come in groups of four that share keys and
values: scores and weights of a group are stored as [position][4], so that they meet as vectors. A row's arithmetic is the same whatever
the other three rows are.
"""

import functools
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import lanes
from .jit import kernel
from .lanes import F32, I8, I32, I64, Builder, Value, const, fma, load, op, splat, store, vec

F32_KIND, BF16_KIND, FP8_KIND, F16_KIND = range(4)   # as heads.KV_TYPES has them
ITEM = (4, 2, 1, 2)                                  # bytes of one number of each kind
PAD = 16                                             # widened rows are padded with zeros to multiples of this
LOWEST = -1e30                                       # a maximum over nothing: finite, so that differences are never inf - inf
ROWS = 4


class Spans(NamedTuple):
    """dot(a, b, n) -> float32 sum of a[i] * b[i].
    widen(from, to, n, kind): n numbers to float32, zeros up to a multiple of PAD.
    scores(q, k, width, first, words): words = [end, out]; out[j][r] := q[r] . k[j] for first <= j < end, in fours of j.
    weigh(s, n, words, state): s[j][r], j < n (a multiple of four), become softmax weights over first[r] <= j < end[r] and 0 elsewhere, times
    value scales; words = [key scales, value scales, softmax scale as float32 bits, first[4], end[4]]; state = float32 maximum[4], sum[4],
    factor[4]: maximum and sum go on, factor is what earlier results must be multiplied with.
    mix(p, v, words): acc[r] := acc[r] * factor[r] + sum over j of p[j][r] * v[j]; words = [first, end, width, stride of v in bytes, acc,
    factor]; mix_safe ignores v[j] where p[j][r] is 0, whatever it holds; mix1 is for one row.
    fold(state, acc, into, into_acc, width): joins a block's partial result to the running one."""

    dot: Any
    widen: Any
    scores: Any
    weigh: Any
    mix: Any
    mix_safe: Any
    mix1: Any
    fold: Any


def _at(b: Builder, base: Value, index: Value, size: int) -> Value:
    return b.add(base, b.mul(index, const(I64, size)))


def _half(b: Builder, v: Value) -> Value:
    """Adds the upper half of a vector to the lower."""
    n = v.type.count // 2
    low = b.shuffle_vector(v, v, _order(range(n)))
    high = b.shuffle_vector(v, v, _order(range(n, 2 * n)))
    return b.fadd(low, high)


def _order(numbers: Any) -> Value:
    numbers = list(numbers)
    return lanes.ir.Constant(vec(I32, len(numbers)), numbers)


def _sum(b: Builder, v: Value) -> Value:
    while v.type.count > 1:
        v = _half(b, v)
    return b.extract_element(v, const(I32, 0))


def _variables(b: Builder, kind: Any, count: int) -> list[Value]:
    made = [cgutils.alloca_once(b, kind) for _ in range(count)]
    for v in made:
        b.store(const(kind, 0.0), v)
    return made


def _emit_dot(n: int) -> Any:
    def emit(b: Builder, x: Value, y: Value, count: Value) -> Value:
        sums = _variables(b, vec(F32, n), 4)
        whole = b.sdiv(count, const(I64, 4 * n))
        with cgutils.for_range(b, whole) as loop:
            at = b.mul(loop.index, const(I64, 16 * n))
            for i, s in enumerate(sums):
                u, v = (load(b, b.add(a, at), vec(F32, n), 4 * n * i, 4) for a in (x, y))
                b.store(fma(b, u, v, b.load(s)), s)
        total = _sum(b, b.fadd(b.fadd(b.load(sums[0]), b.load(sums[1])), b.fadd(b.load(sums[2]), b.load(sums[3]))))
        rest = cgutils.alloca_once(b, F32)
        b.store(total, rest)
        with cgutils.for_range_slice(b, b.mul(whole, const(I64, 4 * n)), count, const(I64, 1), I64) as (i, _):
            b.store(fma(b, load(b, _at(b, x, i, 4), F32, 0, 4), load(b, _at(b, y, i, 4), F32, 0, 4), b.load(rest)), rest)
        return b.load(rest)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return emit(builder, *arguments)
    signature = types.float32(types.int64, types.int64, types.int64)
    return intrinsic(lambda context, x, y, count: (signature, generate))


def _widened(b: Builder, address: Value, kind: int, n: int, body: str) -> Value:
    if kind == F32_KIND:
        return load(b, address, vec(F32, n), 0, 4)
    if kind == BF16_KIND:
        return lanes.bf16_to_f32(b, address, n)
    if kind == F16_KIND:
        return lanes.half_to_f32(b, address, n, body)
    wide = vec(I32, n)                               # e4m3fn: the exponent's bias differs by 120, also for subnormals
    code = b.zext(load(b, address, vec(I8, n), 0, 1), wide)
    size = b.fmul(b.bitcast(b.shl(b.and_(code, const(wide, 0x7F)), const(wide, 20)), vec(F32, n)), const(vec(F32, n), 2.0 ** 120))
    sign = b.shl(b.and_(code, const(wide, 0x80)), const(wide, 24))
    nan = b.icmp_signed("==", b.and_(code, const(wide, 0x7F)), const(wide, 0x7F))
    return b.bitcast(b.select(nan, const(wide, 0x7FC00000), b.or_(b.bitcast(size, wide), sign)), vec(F32, n))


def _emit_widen(kind: int, n: int, body: str) -> Any:
    def emit(b: Builder, source: Value, to: Value, count: Value) -> None:
        item = ITEM[kind]
        whole = b.sdiv(count, const(I64, n))
        with cgutils.for_range(b, whole) as loop:
            store(b, _widened(b, _at(b, source, loop.index, n * item), kind, n, body), _at(b, to, loop.index, 4 * n), 0, 4)
        start = b.mul(whole, const(I64, n))
        with cgutils.for_range_slice(b, start, count, const(I64, 1), I64) as (i, _):
            one = _widened(b, _at(b, source, i, item), kind, 1, body)
            store(b, one, _at(b, to, i, 4), 0, 4)
        end = b.and_(b.add(count, const(I64, PAD - 1)), const(I64, -PAD))
        with cgutils.for_range_slice(b, count, end, const(I64, 1), I64) as (i, _):
            store(b, const(F32, 0.0), _at(b, to, i, 4), 0, 4)
    return op(3, emit)


def _gathered(b: Builder, vectors: list[Value]) -> Value:
    """As many vectors as one has lanes -> one vector, lane i the sum of vector i: neighbours are added and packed together, first inside
    the 128-bit lanes, where that is cheap, then across them."""
    n = vectors[0].type.count
    within = [[4 * (i // 4) + (2 * i + odd) % 4 + n * (i % 4 >= 2) for i in range(n)] for odd in (0, 1)]
    blocks = [[4 * (2 * i + odd) + k for i in range(n // 4) for k in range(4)] for odd in (0, 1)]
    for masks in (within, within, blocks, blocks)[:n.bit_length() - 1]:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(*(b.shuffle_vector(x, y, _order(mask)) for mask in masks)) for x, y in pairs]
    return vectors[0]


def _emit_scores(n: int) -> Any:
    keys = n // ROWS
    def emit(b: Builder, q: Value, k: Value, width: Value, first: Value, words: Value) -> None:
        end, out = load(b, words, I64, 0, 8), load(b, words, I64, 8, 8)
        stride = b.mul(width, const(I64, 4))
        start = b.and_(first, const(I64, -keys))
        sums = _variables(b, vec(F32, n), n)
        queries = [b.add(q, b.mul(const(I64, r), stride)) for r in range(ROWS)]
        with cgutils.for_range_slice(b, start, end, const(I64, keys), I64) as (j, _):
            rows = [b.add(k, b.mul(b.add(j, const(I64, i)), stride)) for i in range(keys)]
            for s in sums:
                b.store(const(vec(F32, n), 0.0), s)
            with cgutils.for_range(b, b.sdiv(width, const(I64, n))) as loop:
                at = b.mul(loop.index, const(I64, 4 * n))
                several = [load(b, b.add(a, at), vec(F32, n), 0, 4) for a in rows]
                for r in range(ROWS):
                    x = load(b, b.add(queries[r], at), vec(F32, n), 0, 4)
                    for i in range(keys):
                        s = sums[i * ROWS + r]
                        b.store(fma(b, x, several[i], b.load(s)), s)
            store(b, _gathered(b, [b.load(s) for s in sums]), _at(b, out, j, 4 * ROWS), 0, 4)
    return op(5, emit)


def _emit_weigh(lanes_: int) -> Any:
    """For vectors of `lanes_`: that many / 4 positions at once."""
    at_once = lanes_ // ROWS
    each = [i // ROWS for i in range(lanes_)]        # a position's number stands in four lanes
    again = list(range(ROWS)) * at_once              # four rows' numbers stand once per position

    def folded(b: Builder, v: Value, join: Any) -> Value:
        while v.type.count > ROWS:
            half = v.type.count // 2
            v = join(b.shuffle_vector(v, v, _order(range(half))), b.shuffle_vector(v, v, _order(range(half, 2 * half))))
        return v

    def emit(b: Builder, s: Value, n: Value, words: Value, state: Value) -> None:
        four, wide, whole, scales = vec(F32, ROWS), vec(F32, lanes_), vec(I32, lanes_), vec(F32, at_once)
        def repeated(v: Value, order: list[int]) -> Value:
            return b.shuffle_vector(v, v, _order(order))
        key_scales, value_scales = load(b, words, I64, 0, 8), load(b, words, I64, 8, 8)
        scale = lanes.spread(b, words, F32, lanes_, 16)
        first, end = (repeated(b.trunc(load(b, words, vec(I64, ROWS), at, 8), vec(I32, ROWS)), again) for at in (24, 56))
        offsets = lanes.ir.Constant(whole, each)
        before = load(b, state, four, 0, 4)
        top, total = cgutils.alloca_once(b, wide), cgutils.alloca_once(b, wide)
        b.store(repeated(before, again), top)
        b.store(const(wide, 0.0), total)
        turns = b.sdiv(n, const(I64, at_once))
        with cgutils.for_range(b, turns) as loop:
            at = _at(b, s, loop.index, 4 * lanes_)
            factor = b.fmul(scale, repeated(load(b, _at(b, key_scales, loop.index, 4 * at_once), scales, 0, 4), each))
            j = b.add(splat(b, b.trunc(b.mul(loop.index, const(I64, at_once)), I32), lanes_), offsets)
            seen = b.and_(b.icmp_signed(">=", j, first), b.icmp_signed("<", j, end))
            score = b.select(seen, b.fmul(load(b, at, wide, 0, 4), factor), const(wide, float("-inf")))
            store(b, score, at, 0, 4)
            b.store(lanes.most(b, b.load(top), score), top)
        now = folded(b, b.load(top), lambda x, y: lanes.most(b, x, y))
        both = repeated(now, again)
        with cgutils.for_range(b, turns) as loop:
            at = _at(b, s, loop.index, 4 * lanes_)
            weight = _falling_exp(b, b.fsub(load(b, at, wide, 0, 4), both))
            b.store(b.fadd(b.load(total), weight), total)
            store(b, b.fmul(weight, repeated(load(b, _at(b, value_scales, loop.index, 4 * at_once), scales, 0, 4), each)), at, 0, 4)
        factor = _falling_exp(b, b.fsub(before, now))
        store(b, now, state, 0, 4)
        store(b, fma(b, load(b, state, four, 16, 4), factor, folded(b, b.load(total), b.fadd)), state, 16, 4)
        store(b, factor, state, 32, 4)
    return op(4, emit)


def _falling_exp(b: Builder, x: Value) -> Value:
    """e^x for x <= 0: 0 below -87, NaN for NaN."""
    zero = b.select(b.fcmp_ordered("<", x, const(x.type, -87.0)), const(x.type, 0.0), lanes.exp(b, x))
    return b.select(b.fcmp_unordered("uno", x, x), x, zero)


def _emit_mix(n: int, rows: int, safe: bool) -> Any:
    real = vec(F32, n)

    def chunk(b: Builder, words: tuple[Value, ...], at: Value, parts: int) -> None:
        """`parts` vectors of every row from byte `at` on."""
        p, v, first, end, width, stride, acc, factor = words
        sums = _variables(b, real, rows * parts)
        own = [b.add(acc, b.add(at, b.mul(const(I64, 4 * r), width))) for r in range(rows)]
        for r in range(rows):
            f = lanes.spread(b, factor, F32, n, 4 * r)
            for i in range(parts):
                b.store(b.fmul(f, load(b, own[r], real, 4 * n * i, 4)), sums[r * parts + i])
        with cgutils.for_range_slice(b, first, end, const(I64, 1), I64) as (j, _):
            value = b.add(b.add(v, at), b.mul(j, stride))
            taken = [load(b, value, real, 4 * n * i, 4) for i in range(parts)]
            weights = _at(b, p, j, 4 * rows)
            for r in range(rows):
                w = lanes.spread(b, weights, F32, n, 4 * r)
                matters = b.fcmp_unordered("!=", w, const(real, 0.0))
                for i in range(parts):
                    x = b.select(matters, taken[i], const(real, 0.0)) if safe else taken[i]
                    b.store(fma(b, w, x, b.load(sums[r * parts + i])), sums[r * parts + i])
        for r in range(rows):
            for i in range(parts):
                store(b, b.load(sums[r * parts + i]), own[r], 4 * n * i, 4)

    def emit(b: Builder, p: Value, v: Value, words: Value) -> None:
        given = (p, v, *(load(b, words, I64, 8 * i, 8) for i in range(6)))
        vectors = b.sdiv(given[4], const(I64, n))
        pairs = b.sdiv(vectors, const(I64, 2))       # two vectors of four rows are as many sums as hide an FMA's latency
        with cgutils.for_range(b, pairs) as loop:
            chunk(b, given, b.mul(loop.index, const(I64, 8 * n)), 2)
        if n == PAD:
            with b.if_then(b.icmp_signed("!=", b.and_(vectors, const(I64, 1)), const(I64, 0))):
                chunk(b, given, b.mul(pairs, const(I64, 8 * n)), 1)
    return op(3, emit)


def _emit_fold(b: Builder, state: Value, acc: Value, into: Value, into_acc: Value, width: Value) -> None:
    four, wide = vec(F32, ROWS), vec(F32, 8)
    new, old = load(b, state, four, 0, 4), load(b, into, four, 0, 4)
    top = lanes.most(b, old, new)
    keep, take = _falling_exp(b, b.fsub(old, top)), _falling_exp(b, b.fsub(new, top))
    store(b, top, into, 0, 4)
    store(b, fma(b, load(b, into, four, 16, 4), keep, b.fmul(load(b, state, four, 16, 4), take)), into, 16, 4)
    for r in range(ROWS):
        k, t = (splat(b, b.extract_element(x, const(I32, r)), 8) for x in (keep, take))
        offset = b.mul(const(I64, 4 * r), width)
        with cgutils.for_range(b, b.sdiv(width, const(I64, 8))) as loop:
            at = b.add(offset, b.mul(loop.index, const(I64, 32)))
            here = b.add(into_acc, at)
            store(b, fma(b, load(b, here, wide, 0, 4), k, b.fmul(load(b, b.add(acc, at), wide, 0, 4), t)), here, 0, 4)


@functools.cache
def spans(body: str) -> Spans:
    """The kernels for one of lanes.BODIES."""
    n = lanes.WIDTHS[body]
    real, bf16, fp8, f16 = (_emit_widen(kind, n, body) for kind in range(4))

    @kernel(key=body, inner=True)
    def widen(source: int, to: int, count: int, kind: int) -> None:
        if kind == F32_KIND:
            real(source, to, count)
        elif kind == BF16_KIND:
            bf16(source, to, count)
        elif kind == F16_KIND:
            f16(source, to, count)
        else:
            fp8(source, to, count)

    return Spans(_emit_dot(n), widen, _emit_scores(n), _emit_weigh(n), _emit_mix(n, ROWS, False),
                 _emit_mix(n, ROWS, True), _emit_mix(n, 1, False), op(5, _emit_fold))
