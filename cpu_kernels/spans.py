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
    scores(q, k, width, first, words): words = [end, out]; out[j][r] := q[r] . k[j] for first <= j < end, in pairs of j.
    weigh(s, n, words, state): s[j][r], j < n (even), become softmax weights over first[r] <= j < end[r] and 0 elsewhere, times value scales;
    words = [key scales, value scales, softmax scale as float32 bits, first[4], end[4]]; state = float32 maximum[4], sum[4], factor[4]:
    maximum and sum go on, factor is what earlier results must be multiplied with.
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


def _sums4(b: Builder, four: list[Value]) -> Value:
    """Four vectors -> the four sums of their lanes, as one vector."""
    narrowed = []
    for v in four:
        while v.type.count > 4:
            v = _half(b, v)
        narrowed.append(v)
    even, odd = _order([0, 2, 4, 6]), _order([1, 3, 5, 7])
    pairs = [b.fadd(b.shuffle_vector(x, y, even), b.shuffle_vector(x, y, odd)) for x, y in (narrowed[:2], narrowed[2:])]
    return b.fadd(b.shuffle_vector(pairs[0], pairs[1], even), b.shuffle_vector(pairs[0], pairs[1], odd))


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


def _emit_scores(n: int) -> Any:
    rows = ROWS
    def emit(b: Builder, q: Value, k: Value, width: Value, first: Value, words: Value) -> None:
        end, out = load(b, words, I64, 0, 8), load(b, words, I64, 8, 8)
        stride = b.mul(width, const(I64, 4))
        start = b.and_(first, const(I64, -2))
        sums = _variables(b, vec(F32, n), 2 * rows)
        with cgutils.for_range_slice(b, start, end, const(I64, 2), I64) as (j, _):
            keys = [b.add(k, b.mul(j, stride)), b.add(k, b.mul(b.add(j, const(I64, 1)), stride))]
            queries = [b.add(q, b.mul(const(I64, r), stride)) for r in range(rows)]
            for s in sums:
                b.store(const(vec(F32, n), 0.0), s)
            with cgutils.for_range(b, b.sdiv(width, const(I64, n))) as loop:
                at = b.mul(loop.index, const(I64, 4 * n))
                two = [load(b, b.add(a, at), vec(F32, n), 0, 4) for a in keys]
                for r in range(rows):
                    x = load(b, b.add(queries[r], at), vec(F32, n), 0, 4)
                    for i in range(2):
                        s = sums[i * rows + r]
                        b.store(fma(b, x, two[i], b.load(s)), s)
            to = _at(b, out, j, 4 * rows)
            for i in range(2):
                store(b, _sums4(b, [b.load(s) for s in sums[i * rows:i * rows + rows]]), to, 16 * i, 4)
    return op(5, emit)


def _emit_weigh(b: Builder, s: Value, n: Value, words: Value, state: Value) -> None:
    four, eight, lanes4 = vec(F32, 4), vec(F32, 8), vec(I32, 4)
    key_scales, value_scales = load(b, words, I64, 0, 8), load(b, words, I64, 8, 8)
    scale = lanes.spread(b, words, F32, 4, 16)
    first, end = (b.trunc(load(b, words, vec(I64, 4), at, 8), lanes4) for at in (24, 56))
    before = load(b, state, four, 0, 4)
    top, total = cgutils.alloca_once(b, four), cgutils.alloca_once(b, eight)
    b.store(before, top)
    b.store(const(eight, 0.0), total)
    with cgutils.for_range(b, n) as loop:
        at = _at(b, s, loop.index, 16)
        factor = b.fmul(scale, splat(b, load(b, _at(b, key_scales, loop.index, 4), F32, 0, 4), 4))
        j = splat(b, b.trunc(loop.index, I32), 4)
        seen = b.and_(b.icmp_signed(">=", j, first), b.icmp_signed("<", j, end))
        score = b.select(seen, b.fmul(load(b, at, four, 0, 4), factor), const(four, float("-inf")))
        store(b, score, at, 0, 4)
        b.store(lanes.most(b, b.load(top), score), top)
    now = b.load(top)
    both = b.shuffle_vector(now, now, _order([0, 1, 2, 3] * 2))
    with cgutils.for_range(b, b.sdiv(n, const(I64, 2))) as loop:
        at = _at(b, s, loop.index, 32)
        distance = b.fsub(load(b, at, eight, 0, 4), both)
        weight = _falling_exp(b, distance)
        b.store(b.fadd(b.load(total), weight), total)
        pair = load(b, _at(b, value_scales, loop.index, 8), vec(F32, 2), 0, 4)
        store(b, b.fmul(weight, b.shuffle_vector(pair, pair, _order([0] * 4 + [1] * 4))), at, 0, 4)
    factor = _falling_exp(b, b.fsub(before, now))
    store(b, now, state, 0, 4)
    store(b, fma(b, load(b, state, four, 16, 4), factor, _half(b, b.load(total))), state, 16, 4)
    store(b, factor, state, 32, 4)


def _falling_exp(b: Builder, x: Value) -> Value:
    """e^x for x <= 0: 0 below -87, NaN for NaN."""
    zero = b.select(b.fcmp_ordered("<", x, const(x.type, -87.0)), const(x.type, 0.0), lanes.exp(b, x))
    return b.select(b.fcmp_unordered("uno", x, x), x, zero)


def _emit_mix(n: int, rows: int, safe: bool) -> Any:
    def emit(b: Builder, p: Value, v: Value, words: Value) -> None:
        first, end, width, stride, acc, factor = (load(b, words, I64, 8 * i, 8) for i in range(6))
        real, parts = vec(F32, n), PAD // n
        sums = _variables(b, real, rows * parts)
        with cgutils.for_range(b, b.sdiv(width, const(I64, PAD))) as loop:
            at = b.mul(loop.index, const(I64, 4 * PAD))
            own = [b.add(acc, b.add(at, b.mul(const(I64, 4 * r), width))) for r in range(rows)]
            for r in range(rows):
                f = lanes.spread(b, factor, F32, n, 4 * r)
                for i in range(parts):
                    b.store(b.fmul(f, load(b, own[r], real, 4 * n * i, 4)), sums[r * parts + i])
            with cgutils.for_range_slice(b, first, end, const(I64, 1), I64) as (j, _):
                value = b.add(b.add(v, at), b.mul(j, stride))
                chunk = [load(b, value, real, 4 * n * i, 4) for i in range(parts)]
                weights = _at(b, p, j, 4 * rows)
                for r in range(rows):
                    w = lanes.spread(b, weights, F32, n, 4 * r)
                    matters = b.fcmp_unordered("!=", w, const(real, 0.0))
                    for i in range(parts):
                        x = b.select(matters, chunk[i], const(real, 0.0)) if safe else chunk[i]
                        b.store(fma(b, w, x, b.load(sums[r * parts + i])), sums[r * parts + i])
            for r in range(rows):
                for i in range(parts):
                    store(b, b.load(sums[r * parts + i]), own[r], 4 * n * i, 4)
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

    return Spans(_emit_dot(n), widen, _emit_scores(n), op(4, _emit_weigh), _emit_mix(n, ROWS, False),
                 _emit_mix(n, ROWS, True), _emit_mix(n, 1, False), op(5, _emit_fold))
