"""Vectors as LLVM values: builder functions of one name each, with a body per instruction set where they differ and a generic body always.

Knows no format and no thread. Everything here emits code into a builder; `op` makes a Numba intrinsic of int64 arguments (addresses,
counts) out of such an emitter, so that no vector type ever reaches Numba's typing.
"""
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
PTR = ir.PointerType()
WIDTHS = {"generic": 8, "avx2": 8, "avx_vnni": 8, "avx512_vnni": 16}      # float32 lanes of one vector, by body
BODIES = tuple(WIDTHS)

Value = Any
Builder = Any


def body_of(isa: str) -> str:
    """The body that an instruction set runs: bf16 dots and tiles are additions to the AVX-512 VNNI one."""
    return isa if isa in WIDTHS else "avx512_vnni"


def op(count: int, emit: Callable[..., Any], gives: bool = False) -> Any:
    """An intrinsic of `count` int64 arguments; emit(builder, *values) returns an int64 value when `gives`."""
    result = types.int64 if gives else types.void
    signature = result(*[types.int64] * count)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        value = emit(builder, *arguments)
        return value if gives else context.get_dummy_value()

    shapes: dict[int, Callable[..., Any]] = {                              # numba wants a function with that many names
        1: lambda context, a: (signature, generate),
        2: lambda context, a, b: (signature, generate),
        3: lambda context, a, b, c: (signature, generate),
        4: lambda context, a, b, c, d: (signature, generate),
        5: lambda context, a, b, c, d, e: (signature, generate),
        7: lambda context, a, b, c, d, e, f, g: (signature, generate),
    }
    return intrinsic(shapes[count])


def invoke(count: int) -> Any:
    """An intrinsic invoke(function, *arguments) that calls a kernel of `count` int64 arguments at an address (`jit.address`): its machine
    code is then neither inlined nor compiled again into its callers. What it returns or raises is lost."""
    def emit(b: Builder, function: Value, *arguments: Value) -> None:
        shape = ir.FunctionType(I32, [PTR, PTR] + [I64] * count)
        with b.goto_entry_block():
            result, raised = b.alloca(I64), b.alloca(PTR)
        b.call(b.inttoptr(function, shape.as_pointer()), [result, raised, *arguments])
    return op(count + 1, emit)


# ---- memory ----------------------------------------------------------------------------------------------------------------------

def vec(element: Any, n: int) -> Any:
    return ir.VectorType(element, n)


def plus(b: Builder, address: Value, offset: int) -> Value:
    return b.add(address, ir.Constant(I64, offset)) if offset else address


def load(b: Builder, address: Value, kind: Any, offset: int = 0, align: int = 1) -> Value:
    return b.load(b.inttoptr(plus(b, address, offset), PTR), align=align, typ=kind)


def store(b: Builder, value: Value, address: Value, offset: int = 0, align: int = 1) -> None:
    b.store(value, b.inttoptr(plus(b, address, offset), PTR), align=align)


def prefetch(b: Builder, address: Value, offset: int = 0, locality: int = 3) -> None:
    """A hint that may name any address, mapped or not. Locality 3: into L1; 2: into L2."""
    f = declare(b, "llvm.prefetch.p0", ir.VoidType(), PTR, I32, I32, I32)
    b.call(f, [b.inttoptr(plus(b, address, offset), PTR), ir.Constant(I32, 0), ir.Constant(I32, locality), ir.Constant(I32, 1)])


def fresh(b: Builder) -> None:
    """From here on memory is read again: keeps LLVM from holding loads of earlier code in registers that it has not got."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def kept(b: Builder, value: Value) -> Value:
    """The same vector, in an x86 register now: sums are neither put in another order nor left for later."""
    return b.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], side_effect=True)


# ---- values ----------------------------------------------------------------------------------------------------------------------

def declare(b: Builder, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def const(kind: Any, value: float) -> Value:
    """A scalar or a vector whose lanes are all `value`."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def splat(b: Builder, scalar: Value, n: int) -> Value:
    kind = vec(scalar.type, n)
    none = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(none, scalar, const(I32, 0)), none, const(vec(I32, n), 0))


def spread(b: Builder, address: Value, element: Any, n: int, offset: int = 0) -> Value:
    """One element of memory in all lanes."""
    return splat(b, load(b, address, element, offset, 4), n)


def _short(kind: Any) -> str:
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    name = {str(F32): "f32", str(F16): "f16"}.get(str(scalar), str(scalar))
    return f"v{kind.count}{name}" if isinstance(kind, ir.VectorType) else name


def call(b: Builder, name: str, *values: Value) -> Value:
    """An overloaded LLVM intrinsic on its first operand's type."""
    kind = values[0].type
    return b.call(declare(b, f"llvm.{name}.{_short(kind)}", kind, *[v.type for v in values]), list(values))


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x · y + z, rounded once where the CPU can."""
    return call(b, "fmuladd", x, y, z)


def half_to_f32(b: Builder, address: Value, n: int, body: str, offset: int = 0) -> Value:
    """n fp16 of memory -> float32, exactly for every finite value (the generic body does not rely on a conversion instruction)."""
    if body != "generic":
        return b.fpext(load(b, address, vec(F16, n), offset, 2), vec(F32, n))
    wide = vec(I32, n)
    h = b.zext(load(b, address, vec(I16, n), offset, 2), wide)
    magnitude = b.bitcast(b.shl(b.and_(h, const(wide, 0x7FFF)), const(wide, 13)), vec(F32, n))
    scaled = b.bitcast(b.fmul(magnitude, const(vec(F32, n), 2.0 ** 112)), wide)
    return b.bitcast(b.or_(scaled, b.shl(b.and_(h, const(wide, 0x8000)), const(wide, 16))), vec(F32, n))


def bf16_to_f32(b: Builder, address: Value, n: int, offset: int = 0) -> Value:
    wide = vec(I32, n)
    return b.bitcast(b.shl(b.zext(load(b, address, vec(I16, n), offset, 2), wide), const(wide, 16)), vec(F32, n))


def least(b: Builder, x: Value, y: Value) -> Value:
    """min that passes a NaN of x on."""
    return b.select(b.fcmp_ordered(">", x, y), y, x)


def most(b: Builder, x: Value, y: Value) -> Value:
    """max that passes a NaN of x on."""
    return b.select(b.fcmp_ordered("<", x, y), y, x)


def exp(b: Builder, x: Value) -> Value:
    """e^x within 2 ulp for |x| ≤ 87, clamped beyond (Cephes' polynomial); NaN gives an unspecified finite value or NaN."""
    f, i = x.type, vec(I32, x.type.count)
    x = call(b, "maxnum", call(b, "minnum", x, const(f, 87.0)), const(f, -87.0))
    n = call(b, "rint", b.fmul(x, const(f, 1.4426950408889634)))
    r = fma(b, n, const(f, 2.12194440e-4), fma(b, n, const(f, -0.693359375), x))
    p = const(f, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, const(f, c))
    p = fma(b, p, b.fmul(r, r), b.fadd(r, const(f, 1.0)))
    return b.bitcast(b.add(b.bitcast(p, i), b.shl(b.fptosi(n, i), const(i, 23))), f)


def erf(b: Builder, x: Value) -> Value:
    """erf with an absolute error below 2e-7 (Abramowitz and Stegun 7.1.26); NaN passes."""
    f = x.type
    magnitude = call(b, "fabs", x)
    t = b.fdiv(const(f, 1.0), fma(b, magnitude, const(f, 0.3275911), const(f, 1.0)))
    p = const(f, 1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = fma(b, p, t, const(f, c))
    y = b.fsub(const(f, 1.0), b.fmul(b.fmul(p, t), exp(b, b.fneg(b.fmul(x, x)))))
    return call(b, "copysign", y, x)


# ---- integer products: 4 bytes of each lane --------------------------------------------------------------------------------------

def maddubs(b: Builder, unsigned: Value, signed: Value) -> Value:
    """AVX2: 32 unsigned × 32 signed bytes -> 16 saturating int16 pair sums; both given as 8 × int32."""
    bytes_, words = vec(I8, 32), vec(I16, 16)
    return b.call(declare(b, "llvm.x86.avx2.pmadd.ub.sw", words, bytes_, bytes_), [b.bitcast(unsigned, bytes_), b.bitcast(signed, bytes_)])


def pair_sums(b: Builder, words: Value) -> Value:
    """AVX2: 16 int16 -> 8 int32."""
    wide = vec(I32, 8)
    return b.call(declare(b, "llvm.x86.avx2.pmadd.wd", wide, words.type, words.type), [words, const(words.type, 1)])


def sign_of(b: Builder, x: Value, w: Value) -> Value:
    """AVX2: bytes of x with the sign of w's (0 where w is 0)."""
    bytes_ = vec(I8, 32)
    return b.bitcast(b.call(declare(b, "llvm.x86.avx2.psign.b", bytes_, bytes_, bytes_), [b.bitcast(x, bytes_), b.bitcast(w, bytes_)]), x.type)


def dpbusd(b: Builder, acc: Value, unsigned: Value, signed: Value) -> Value:
    """AVX-VNNI or AVX-512 VNNI: acc + Σ of 4 unsigned × signed bytes per lane."""
    bits = acc.type.count * 32
    bytes_ = vec(I8, bits // 8)
    f = declare(b, f"llvm.x86.avx512.vpdpbusd.{bits}", acc.type, acc.type, bytes_, bytes_)
    return b.call(f, [acc, b.bitcast(unsigned, bytes_), b.bitcast(signed, bytes_)])


def byte(b: Builder, v: Value, i: int, signed: bool) -> Value:
    """Byte i of each 32-bit lane, extended."""
    kind = v.type
    if signed:
        return b.ashr(b.shl(v, const(kind, 24 - 8 * i)) if i < 3 else v, const(kind, 24))
    return b.and_(b.lshr(v, const(kind, 8 * i)), const(kind, 255))
