"""Lines of 32 values between float32, bf16 and int8, and what rounding by row needs: intrinsics on addresses. Knows no matrix and no thread."""
from .lanes import F32, I8, I16, I32, I64, Builder, Value, call, cgutils, const, declare, fma, load, op, prefetch, spread, store, vec

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


def _bf16_row(b: Builder, source: Value, lines: Value, into: Value) -> None:
    """A row of `lines` times 32 float32 -> bf16 lines 2,048 B apart: one row of A tiles."""
    with cgutils.for_range(b, lines) as loop:
        _bf16_line(b, b.add(source, b.shl(loop.index, const(I64, 7))), b.add(into, b.shl(loop.index, const(I64, 11))))


def _copy_row(b: Builder, source: Value, lines: Value, into: Value) -> None:
    """The same from bf16."""
    with cgutils.for_range(b, lines) as loop:
        line = load(b, b.add(source, b.shl(loop.index, const(I64, 6))), vec(I32, 16), 0, 2)
        store(b, line, b.add(into, b.shl(loop.index, const(I64, 11))), 0, 64)


def _join_rows(b: Builder, where: Value) -> None:
    """out[tokens[r]] += weights[r] · (sums[r] + bias), some pieces of 32 columns side by side in `out`, `apart` bytes from each other in `sums`.

    Words at `where`: sums (rows 128 B apart), rows, tokens, weights, their stride, out, its row's bytes, bias, pieces, apart. Rows of `out`
    come in no order that a prefetcher could guess, so the next but one is asked for in time."""
    sums, rows, tokens, weights, stride, out, width, bias, pieces, apart = (load(b, where, I64, 8 * i, 8) for i in range(10))
    real = vec(F32, 16)
    last = b.sub(rows, const(I64, 1))

    def row_of(r: Value) -> Value:
        token = b.sext(load(b, b.add(tokens, b.shl(r, const(I64, 2))), I32, 0, 4), I64)
        return b.add(out, b.mul(token, width))
    with cgutils.for_range(b, rows) as row:
        soon = b.add(row.index, const(I64, 2))
        later = row_of(b.select(b.icmp_signed("<", soon, last), soon, last))
        y, s = row_of(row.index), b.add(sums, b.shl(row.index, const(I64, 7)))
        weight = spread(b, b.add(weights, b.mul(row.index, stride)), F32, 16)
        with cgutils.for_range(b, pieces) as piece:
            column = b.shl(piece.index, const(I64, 7))
            at, to, add = b.add(s, b.mul(piece.index, apart)), b.add(y, column), b.add(bias, column)
            for half in (0, 64):
                prefetch(b, b.add(later, column), half)
                v = b.fadd(load(b, at, real, half, 4), load(b, add, real, half, 4))
                store(b, fma(b, weight, v, load(b, to, real, half, 4)), to, half, 4)


def _dequantize_rows(b: Builder, sums: Value, rows: Value, scales: Value, columns: Value) -> None:
    """int32 sums of `rows` rows -> float32: times the row's scale and 32 column scales, in place."""
    with cgutils.for_range(b, rows) as loop:
        _dequantize(b, b.add(sums, b.shl(loop.index, const(I64, 7))), b.add(scales, b.shl(loop.index, const(I64, 2))), columns)


bf16_row, copy_row, join_rows, dequantize_rows = op(3, _bf16_row), op(3, _copy_row), op(1, _join_rows), op(4, _dequantize_rows)
bf16_line, greatest, int8_line = op(2, _bf16_line), op(2, _greatest), op(3, _int8_line)
scale_of, widen_line, zero_line = op(3, _scale_of), op(2, _widen_line), op(1, _zero_line)
