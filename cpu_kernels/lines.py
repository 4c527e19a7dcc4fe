"""Lines of 32 values between float32, bf16 and int8, and what rounding by row needs: intrinsics on addresses. Knows no matrix and no thread."""
from .lanes import F32, I8, I16, I32, Builder, Value, call, const, declare, load, op, spread, store, vec

TINY = 1e-30                                         # rows below this are rounded to zero: their inverse would overflow


def _bf16_line(b: Builder, source: Value, into: Value) -> None:
    """32 float32 -> 32 bf16, round to nearest even; NaN stays NaN."""
    for half in range(2):
        bits = load(b, source, vec(I32, 16), 64 * half, 4)
        odd = b.and_(b.lshr(bits, const(bits.type, 16)), const(bits.type, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, const(bits.type, 0x7FFF))), const(bits.type, 16))
        nan = b.icmp_unsigned(">", b.and_(bits, const(bits.type, 0x7FFFFFFF)), const(bits.type, 0x7F800000))
        store(b, b.trunc(b.select(nan, const(bits.type, 0x7FC0), rounded), vec(I16, 16)), into, 32 * half, 2)


def _greatest(b: Builder, source: Value, most: Value) -> None:
    """The float32 at `most` := max(itself, |32 float32|), compared as bits: infinity and then NaN are above all and stay."""
    m = load(b, most, I32, 0, 4)
    for half in range(2):
        bits = load(b, source, vec(I32, 16), 64 * half, 4)
        bits = b.and_(bits, const(bits.type, 0x7FFFFFFF))
        top = b.call(declare(b, "llvm.vector.reduce.umax.v16i32", I32, bits.type), [bits])
        m = b.select(b.icmp_unsigned(">", top, m), top, m)
    store(b, m, most, 0, 4)


def _int8_line(b: Builder, source: Value, inverse: Value, into: Value) -> None:
    """32 float32 times the float32 at `inverse` -> 32 int8; not finite: 0."""
    factor = spread(b, inverse, F32, 16)
    for half in range(2):
        v = b.fmul(load(b, source, vec(F32, 16), 64 * half, 4), factor)
        v = b.select(b.fcmp_ordered("ord", v, v), v, const(v.type, 0.0))
        v = call(b, "minnum", call(b, "maxnum", v, const(v.type, -127.0)), const(v.type, 127.0))
        store(b, b.trunc(b.fptosi(call(b, "rint", v), vec(I32, 16)), vec(I8, 16)), into, 16 * half, 1)


def _dequantize(b: Builder, sums: Value, row: Value, columns: Value) -> None:
    """32 int32 -> float32, times the row's scale and 32 column scales, in place."""
    for half in range(2):
        v = b.sitofp(load(b, sums, vec(I32, 16), 64 * half, 4), vec(F32, 16))
        v = b.fmul(v, b.fmul(spread(b, row, F32, 16), load(b, columns, vec(F32, 16), 64 * half, 4)))
        store(b, v, sums, 64 * half, 4)


def _scale_of(b: Builder, most: Value, scale: Value, inverse: Value) -> None:
    """max |x| of a row -> its scale (NaN when not finite, so that the whole row becomes NaN and no other) and 127 / max."""
    m = load(b, most, F32, 0, 4)
    finite = b.fcmp_ordered("<", m, const(F32, float("inf")))
    usable = b.and_(finite, b.fcmp_ordered(">", m, const(F32, TINY)))
    store(b, b.select(finite, b.fmul(m, const(F32, 1 / 127)), const(F32, float("nan"))), scale, 0, 4)
    store(b, b.select(usable, b.fdiv(const(F32, 127.0), b.select(usable, m, const(F32, 1.0))), const(F32, 0.0)), inverse, 0, 4)


def _widen_line(b: Builder, source: Value, into: Value) -> None:
    for half in range(2):
        bits = b.shl(b.zext(load(b, source, vec(I16, 16), 32 * half, 2), vec(I32, 16)), const(vec(I32, 16), 16))
        store(b, bits, into, 64 * half, 4)


def _zero_line(b: Builder, into: Value) -> None:
    store(b, const(vec(I32, 16), 0), into, 0, 4)


bf16_line, greatest, int8_line, dequantize = op(2, _bf16_line), op(2, _greatest), op(3, _int8_line), op(3, _dequantize)
scale_of, widen_line, zero_line = op(3, _scale_of), op(2, _widen_line), op(1, _zero_line)
