"""One expert's FFN on a range of rows: activations into their partner format, gate and up, the activation function, down. Knows blocks of
memory at addresses and no thread; `moe` shares the ranges out.
"""
import functools
from typing import Any

from . import lanes, rows
from .formats import FORMATS
from .jit import address, kernel
from .lanes import F32, I8, I32, I64, Builder, Value, const, load, op, splat, store, vec
from .rows.coded import emit_take, starts_of, wraps
from .rows.coded import zero_of as coded_zero_of
from .rows.floating import LIFT
from .rows.integer import SCALE_AT, START_AT, shifted, zero_of

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")
MOST_TOKENS = 16                                     # of one expert at once
TINY = 1e-30                                         # groups below this are quantized as zero: their inverse would overflow
INF_BITS = 0x7F800000

peek32 = op(1, lambda b, a: b.sext(load(b, a, I32, 0, 4), I64), gives=True)
poke32 = op(2, lambda b, a, v: store(b, b.trunc(v, I32), a, 0, 4))
peek16 = op(1, lambda b, a: b.zext(load(b, a, lanes.I16, 0, 2), I64), gives=True)
prefetch_far = op(1, lambda b, a: lanes.prefetch(b, a, 0, 2))
_copy16 = op(2, lambda b, a, s: store(b, load(b, s, vec(F32, 16), 0, 4), a, 0, 4))
_widen16 = op(2, lambda b, a, s: store(b, lanes.bf16_to_f32(b, s, 16), a, 0, 4))
_lift16 = op(2, lambda b, a, s: store(b, b.fmul(load(b, s, vec(F32, 16), 0, 4), const(vec(F32, 16), LIFT)), a, 0, 4))
_zero16 = op(1, lambda b, a: store(b, const(vec(F32, 16), 0.0), a, 0, 4))


def _emit_quantize(zero: int, shift: int) -> Any:
    """2 × 16 float32 -> codes, scale and start of group 0 or 1 of an activation block. A group with NaN or infinity gets
    codes 0 and scale NaN: all products of its token become NaN, and nobody else's."""
    def emit(b: Builder, first: Value, second: Value, block: Value, group: Value) -> None:
        wide, real = vec(I32, 16), vec(F32, 16)
        v = [load(b, source, real, 0, 4) for source in (first, second)]
        bits = [b.and_(b.bitcast(x, wide), const(wide, 0x7FFFFFFF)) for x in v]
        top = b.select(b.icmp_unsigned(">", bits[0], bits[1]), bits[0], bits[1])
        top = b.call(lanes.declare(b, "llvm.vector.reduce.umax.v16i32", I32, wide), [top])
        m = b.bitcast(top, F32)
        finite = b.icmp_unsigned("<", top, const(I32, INF_BITS))
        usable = b.and_(finite, b.fcmp_ordered(">", m, const(F32, TINY)))
        inverse = b.select(usable, b.fdiv(const(F32, 127.0), b.select(usable, m, const(F32, 1.0))), const(F32, 0.0))
        odd = b.icmp_signed("!=", group, const(I64, 0))
        at = b.add(block, b.mul(group, const(I64, 32)))
        total = const(wide, 0)
        for i, x in enumerate(v):
            safe = b.select(splat(b, usable, 16), x, const(real, 0.0))
            q = b.fptosi(lanes.call(b, "rint", b.fmul(safe, splat(b, inverse, 16))), wide)
            store(b, b.trunc(q, vec(I8, 16)), at, 16 * i)
            total = b.add(total, q)
        s = b.call(lanes.declare(b, "llvm.vector.reduce.add.v16i32", I32, wide), [total])
        scale = b.fmul(m, const(F32, 1 / 127))
        scale = b.select(odd, b.fmul(scale, const(F32, 1 / shift)), scale)
        start = b.mul(s, b.select(odd, const(I32, -zero * shift), const(I32, -zero)))
        words = b.add(block, b.mul(group, const(I64, 4)))
        store(b, b.select(finite, scale, const(F32, float("nan"))), words, SCALE_AT, 4)
        store(b, start, words, START_AT, 4)
    return op(4, emit)


def _emit_activate(kind: str, gated: bool) -> Any:
    """16 lanes at `gate` (and `up`) -> gate; parameters: alpha, limit, up_shift as float32 at `p`."""
    def emit(b: Builder, gate: Value, up: Value, p: Value) -> None:
        real = vec(F32, 16)
        alpha, limit, shift = (lanes.spread(b, p, F32, 16, 4 * i) for i in range(3))
        g = load(b, gate, real, 0, 4)
        if gated:
            g = lanes.least(b, g, limit)
        one = const(real, 1.0)
        if kind == "silu":
            a = b.fdiv(g, b.fadd(one, lanes.exp(b, b.fneg(b.fmul(alpha, g)))))
        elif kind == "relu2":
            r = lanes.most(b, g, const(real, 0.0))
            a = b.fmul(r, r)
        elif kind == "gelu_tanh":                    # x · sigmoid(2z) = x (1 + tanh z) / 2
            cube = b.fmul(b.fmul(g, g), g)
            z = b.fmul(const(real, 2 * 0.7978845608028654), lanes.fma(b, cube, const(real, 0.044715), g))
            a = b.fdiv(g, b.fadd(one, lanes.exp(b, b.fneg(z))))
        else:
            a = b.fmul(b.fmul(const(real, 0.5), g), b.fadd(one, lanes.erf(b, b.fmul(g, const(real, 0.7071067811865476)))))
        if gated:
            u = lanes.least(b, load(b, up, real, 0, 4), limit)
            u = lanes.most(b, u, b.fneg(limit))
            a = b.fmul(a, b.fadd(u, shift))
        store(b, a, gate, 0, 4)
    return emit


def _emit_scale_add(b: Builder, sums: Value, weight: Value, bias: Value) -> None:
    """sums := weight · sums + bias, 16 lanes; weight: address of a float32."""
    real = vec(F32, 16)
    w = lanes.spread(b, weight, F32, 16)
    store(b, b.fadd(b.fmul(w, load(b, sums, real, 0, 4)), load(b, bias, real, 0, 4)), sums, 0, 4)


def _emit_join(b: Builder, y: Value, sums: Value, weight: Value, bias: Value) -> None:
    """y += weight · (sums + bias), 16 lanes."""
    real = vec(F32, 16)
    v = b.fadd(load(b, sums, real, 0, 4), load(b, bias, real, 0, 4))
    store(b, lanes.fma(b, lanes.spread(b, weight, F32, 16), v, load(b, y, real, 0, 4)), y, 0, 4)


scale_add, join, zero16 = op(3, _emit_scale_add), op(4, _emit_join), _zero16
activations = {(k, g): op(3, _emit_activate(k, g)) for k in KINDS for g in (False, True)}


def _each(emit: Any) -> Any:
    """`emit` on `count` times 16 lanes that follow each other."""
    def all_lanes(b: Builder, gate: Value, up: Value, count: Value, p: Value) -> None:
        with lanes.cgutils.for_range(b, count) as loop:
            at = b.shl(loop.index, const(I64, 6))
            emit(b, b.add(gate, at), b.add(up, at), p)
    return op(4, all_lanes)


_silu, _gelu, _tanh, _relu2, _silu1, _gelu1, _tanh1, _relu21 = (_each(_emit_activate(k, g)) for g in (True, False) for k in KINDS)


@kernel(inner=True)
def activate(kind: int, gated: int, gate: int, up: int, count: int, p: int) -> None:
    """`count` times 16 lanes at `gate` (and `up`) -> gate."""
    if gated:
        if kind == 0:
            _silu(gate, up, count, p)
        elif kind == 1:
            _gelu(gate, up, count, p)
        elif kind == 2:
            _tanh(gate, up, count, p)
        else:
            _relu2(gate, up, count, p)
    elif kind == 0:
        _silu1(gate, up, count, p)
    elif kind == 1:
        _gelu1(gate, up, count, p)
    elif kind == 2:
        _tanh1(gate, up, count, p)
    else:
        _relu21(gate, up, count, p)


@kernel(inner=True)
def load32(x: int, bf16: int, at: int, K: int, into: int) -> None:
    """32 float32 at `into` from columns at.. of a row of K columns (bf16 != 0: 16-bit words); zeros beyond its end."""
    if at + 32 <= K:
        if bf16:
            _widen16(into, x + 2 * at)
            _widen16(into + 64, x + 2 * at + 32)
        else:
            _copy16(into, x + 4 * at)
            _copy16(into + 64, x + 4 * at + 64)
        return
    _zero16(into)
    _zero16(into + 64)
    for i in range(at, K):
        if bf16:
            poke32(into + 4 * (i - at), (peek16(x + 2 * i)) << 16)
        else:
            poke32(into + 4 * (i - at), peek32(x + 4 * i))


@functools.cache
def take(format: str, body: str, exact: bool) -> int:
    """Address of a kernel take(first, second, block, group): 2 × 16 float32 become group 0 or 1 of an activation block."""
    f = FORMATS[format]
    if rows.is_float(f, exact):
        return address(_take_lifted if f.name == "fp8" else _take_floats, 4)
    if f.coded:
        wide = op(4, emit_take(f.coded, body))

        @kernel(key=(coded_zero_of(f.coded, body), starts_of(f.coded), wraps(f.coded, body)), inner=True)
        def take_wide(first: int, second: int, block: int, group: int) -> int:
            wide(first, second, block, group)
            return 0

        return address(take_wide, 4)
    quantize = _emit_quantize(zero_of(f, body), shifted(f, body))

    @kernel(key=(zero_of(f, body), shifted(f, body)), inner=True)
    def take_codes(first: int, second: int, block: int, group: int) -> int:
        quantize(first, second, block, group)
        return 0

    return address(take_codes, 4)


@kernel(inner=True)
def _take_lifted(first: int, second: int, block: int, group: int) -> int:
    _lift16(block + 128 * group, first)
    _lift16(block + 128 * group + 64, second)
    return 0


@kernel(inner=True)
def _take_floats(first: int, second: int, block: int, group: int) -> int:
    _copy16(block + 128 * group, first)
    _copy16(block + 128 * group + 64, second)
    return 0


WALKS = {"APART1": (1, 1), "APART2": (2, 1), "APART4": (4, 1), "TOGETHER": (1, rows.MANY), "PAIRS": (2, 2)}


def walks(format: str, body: str, exact: bool, several: bool, down: bool) -> dict[str, int]:
    """Addresses of what a routed layer needs for one token, or for several of one expert at once; compiled or loaded now. Two streams of
    two tokens pay for gate and up where vectors are wide: elsewhere 0 stands for that walk."""
    wide = lanes.WIDTHS[body] == 16 and not down
    wanted = {name: shape for name, shape in WALKS.items() if (several or shape[1] == 1) and (wide or shape != (2, 2))}
    made = {name: rows.walk(format, body, exact, *shape) for name, shape in wanted.items()}
    return {"PAIRS": 0} | made | {"TAKE": take(format, body, exact)}
