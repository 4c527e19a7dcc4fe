"""Atomic words, fences, a pause, a clock, futexes and calls through addresses, as Numba intrinsics; knows no thread and no kernel.

Addresses are int64. Every operation has a body for any Linux target; only `pause` has a special one per architecture.
"""

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import kernel

_I32, _I64, _F32, _P = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType()
_i64, _void = types.int64, types.void
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_ARM = platform.machine().lower() in ("aarch64", "arm64")
_FUTEX = 202 if _X86 else 98                         # the generic Linux table (arm64, riscv64, loongarch64) has 98
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_syscall = types.ExternalFunction("syscall", _i64(*[_i64] * 7))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, _i64))


def _at(builder: Any, address: Any, kind: Any = _I64) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _define(emit: Callable[..., Any], result: Any, count: int) -> Any:
    """An intrinsic of `count` int64 arguments; numba wants a function with that many names, hence one lambda per count."""
    signature = result(*[_i64] * count)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if result is _void else value

    shapes: dict[int, Callable[..., Any]] = {
        0: lambda context: (signature, generate),
        1: lambda context, a: (signature, generate),
        2: lambda context, a, b: (signature, generate),
        3: lambda context, a, b, c: (signature, generate),
        6: lambda context, a, b, c, d, e, f: (signature, generate),
    }
    return intrinsic(shapes[count])


def _pause(builder: Any) -> None:
    if _X86:
        name = "llvm.x86.sse2.pause"
        function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), []), name)
        builder.call(function, [])
    elif _ARM:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "isb", "", (), side_effect=True)   # `yield` is a no-op on most cores
    else:
        builder.fence("seq_cst")


def _invoke(builder: Any, function: Any, control: Any, tid: Any, threads: Any, arguments: Any, line: Any) -> Any:
    """Numba's own convention: int32 f(int64 *result, exception **, ...); status and exception are left at line and line + 8."""
    shape = ir.FunctionType(_I32, [_P, _P, _I64, _I64, _I64, _I64])
    with builder.goto_entry_block():
        result, raised = builder.alloca(_I64), builder.alloca(_P)
    builder.store(ir.Constant(_I64, 0), result)
    builder.store(ir.Constant(_P, None), raised)
    status = builder.call(builder.inttoptr(function, shape.as_pointer()), [result, raised, control, tid, threads, arguments])
    builder.store(builder.sext(status, _I64), _at(builder, line))
    builder.store(builder.ptrtoint(builder.load(raised, typ=_P), _I64), _at(builder, builder.add(line, ir.Constant(_I64, 8))))
    return builder.load(result, typ=_I64)


def _exchange(builder: Any, address: Any, old: Any, new: Any) -> Any:
    return builder.extract_value(builder.cmpxchg(_at(builder, address), old, new, "acq_rel", "acquire"), 0)


load = _define(lambda b, a: b.load_atomic(_at(b, a), "acquire", 8), _i64, 1)
store = _define(lambda b, a, v: b.store_atomic(v, _at(b, a), "release", 8), _void, 2)
add = _define(lambda b, a, v: b.atomic_rmw("add", _at(b, a), v, "acq_rel"), _i64, 2)        # returns the value before
exchange = _define(_exchange, _i64, 3)                                                      # (address, old, new): returns what was there
peek_f32 = _define(lambda b, a: b.load(_at(b, a, _F32), align=4), types.float32, 1)         # plain, any float32 of memory
peek_f64 = _define(lambda b, a: b.load(_at(b, a, ir.DoubleType()), align=8), types.float64, 1)


@intrinsic
def poke_f32(_: Any, address: Any, value: Any) -> Any:
    """Plain store of a float32."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _at(builder, arguments[0], _F32), align=4)
        return context.get_dummy_value()
    return _void(_i64, types.float32), generate


load32 = _define(lambda b, a: b.zext(b.load_atomic(_at(b, a, _I32), "acquire", 4), _I64), _i64, 1)
store32 = _define(lambda b, a, v: b.store_atomic(b.trunc(v, _I32), _at(b, a, _I32), "release", 4), _void, 2)
peek = _define(lambda b, a: b.load(_at(b, a)), _i64, 1)                           # plain 8-byte load and store
poke = _define(lambda b, a, v: b.store(v, _at(b, a)), _void, 2)
fence = _define(lambda b: b.fence("seq_cst"), _void, 0)
pause = _define(_pause, _void, 0)
call = _define(_invoke, _i64, 6)          # (function, control, tid, threads, arguments, line) -> the function's result


@kernel(inner=True)
def clock(scratch: int) -> int:
    """CLOCK_MONOTONIC in ns; scratch: address of 16 writable bytes."""
    _clock_gettime(1, scratch)
    return peek(scratch) * 1_000_000_000 + peek(scratch + 8)


@kernel(inner=True)
def sleep_on(address: int, value: int) -> None:
    """Sleeps while the low 32 bits at address equal those of value; may wake early."""
    _syscall(_FUTEX, address, _WAIT_PRIVATE, value & 0xFFFFFFFF, 0, 0, 0)


@kernel(inner=True)
def nap_on(address: int, value: int, limit: int) -> None:
    """The same for a while: limit is the address of (seconds, nanoseconds)."""
    _syscall(_FUTEX, address, _WAIT_PRIVATE, value & 0xFFFFFFFF, limit, 0, 0)


@kernel(inner=True)
def wake_all(address: int) -> None:
    _syscall(_FUTEX, address, _WAKE_PRIVATE, 1 << 30, 0, 0, 0)
