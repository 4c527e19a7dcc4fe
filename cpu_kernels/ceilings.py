"""What this machine can do at most, measured: bytes read and products made per second by a team. Knows no format of ours.

The read ceiling is the better of two readers with four address streams each, plain and prefetching; random data, as tile clocks depend on it.
"""
import functools
import time
from typing import Any

import numpy as np

from . import lanes, tiles
from .atoms import add, load, peek
from .jit import kernel
from .jobs import claims
from .lanes import F32, I16, I32, I64, Builder, Value, cgutils, const, op, prefetch, store, vec
from .lanes import load as load_vec
from .rows import AHEAD_NBYTES
from .store import aligned
from .team import Team, prepare

CHUNK_NBYTES = 1 << 20


def _reader(ahead: int) -> Any:
    """Intrinsic (address, bytes, sink): adds up four quarters at once."""
    def emit(b: Builder, address: Value, nbytes: Value, sink: Value) -> None:
        kind = vec(I32, 16)
        quarter = b.lshr(nbytes, const(I64, 2))
        sums = [cgutils.alloca_once_value(b, const(kind, 0)) for _ in range(4)]
        with cgutils.for_range(b, b.lshr(quarter, const(I64, 7))) as loop:
            at = b.add(address, b.shl(loop.index, const(I64, 7)))
            for s in range(4):
                stream = b.add(at, b.mul(quarter, const(I64, s)))
                for line in (0, 64):
                    if ahead:
                        prefetch(b, stream, ahead + line)
                    b.store(b.add(b.load(sums[s]), load_vec(b, stream, kind, line, 64)), sums[s])
        store(b, b.add(b.add(b.load(sums[0]), b.load(sums[1])), b.add(b.load(sums[2]), b.load(sums[3]))), sink)
    return op(3, emit)


@functools.cache
def _read_job(ahead: int) -> Any:
    read = _reader(ahead)

    @kernel(key=ahead)
    def job(control: int, tid: int, threads: int, a: int) -> int:
        """a: address, chunks, sinks of 128 B."""
        counter = claims(control, tid, 0, 0)
        while load(counter) < peek(a + 8):
            i = add(counter, 1)
            if i < peek(a + 8):
                read(peek(a) + i * CHUNK_NBYTES, CHUNK_NBYTES, peek(a + 16) + 128 * tid)
        return 0
    return job


def read_s(team: Team, memory: np.ndarray[Any, Any], ahead: bool) -> float:
    """Seconds that the team takes to read memory (uint8, 64 B aligned; whole MiB of it are read)."""
    sinks = aligned(128 * team.threads)
    words = np.array([memory.ctypes.data, memory.nbytes // CHUNK_NBYTES, sinks.ctypes.data], np.int64)
    prepared = prepare(_read_job(AHEAD_NBYTES if ahead else 0), words, sinks)
    begin = time.perf_counter()
    team.run(prepared)
    return time.perf_counter() - begin


@functools.cache
def _tile_job(bf16: bool) -> Any:
    begin, end = tiles.power(True)
    body = tiles.Amx

    def emit(b: Builder, a: Value, n: Value) -> None:
        body.zero(b, a)
        with cgutils.for_range(b, n) as loop:
            at = b.add(a, b.shl(b.and_(loop.index, const(I64, 7)), const(I64, 12)))
            body.product(b, bf16, a, at, b.add(at, const(I64, 2048)), b.add(at, const(I64, 3072)), [lambda: None] * 4)
        body.finish(b, b.add(a, const(I64, 8 << 12)))
    products = op(2, emit)

    @kernel(key=bf16)
    def job(control: int, tid: int, threads: int, a: int) -> int:
        """a: configuration, data (9 × 4 KiB per thread), products."""
        begin(peek(a))
        products(peek(a + 8) + tid * (9 << 12), peek(a + 16))
        end(0)
        return 0
    return job


def tile_ops_s(team: Team, bf16: bool, products: int = 200_000) -> float:
    """Multiply-adds × 2 per second of all threads together, operands from L1, random data."""
    data = aligned(team.threads * (9 << 12))
    rng = np.random.default_rng(0)
    if bf16:
        data.view(np.uint16)[:] = (rng.standard_normal(data.size // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        data[:] = rng.integers(0, 256, data.size, dtype=np.uint8)
    words = np.array([tiles.configuration().ctypes.data, data.ctypes.data, products], np.int64)
    prepared = prepare(_tile_job(bf16), words, data)
    team.run(prepared)
    begin = time.perf_counter()
    team.run(prepared)
    return team.threads * products * 4 * 2 * 16 * 16 * (32 if bf16 else 64) / (time.perf_counter() - begin)


@functools.cache
def _vector_job(body: str, int8: bool) -> Any:
    n = lanes.WIDTHS[body]
    kind = vec(F32, n) if not int8 else vec(I16, 16) if body == "avx2" else vec(I32, n)
    size = 4 * n

    def product(b: Builder, total: Value, w: Value, x: Value) -> Value:
        if not int8:
            return lanes.fma(b, w, x, total)
        if body == "avx2":
            return b.add(total, lanes.maddubs(b, w, x))
        if body == "generic":
            return b.add(total, b.mul(w, x))
        return lanes.dpbusd(b, total, w, x)

    def emit(b: Builder, a: Value, turns: Value) -> None:
        sums = [cgutils.alloca_once_value(b, const(kind, 0)) for _ in range(8)]
        with cgutils.for_range(b, turns) as loop:
            at = b.add(a, b.shl(b.and_(loop.index, const(I64, 7)), const(I64, 8)))
            load_as = vec(F32, n) if not int8 else vec(I32, n)
            ws = [load_vec(b, at, load_as, size * i, 32) for i in range(4)]
            xs = [load_vec(b, at, load_as, 2048 + size * i, 32) for i in range(2)]
            for i, total in enumerate(sums):
                b.store(product(b, b.load(total), ws[i % 4], xs[i // 4]), total)
        for i, total in enumerate(sums):
            store(b, b.load(total), a, 4096 + size * i)
    products = op(2, emit)

    @kernel(key=(body, int8))
    def job(control: int, tid: int, threads: int, a: int) -> int:
        """a: data (40 KiB per thread), turns of 8 products."""
        products(peek(a) + tid * 40960, peek(a + 8))
        return 0
    return job


def vector_ops_s(team: Team, isa: str, int8: bool, turns: int = 300_000) -> float:
    """Multiply-adds × 2 per second of all threads together by vector products of bytes (`int8`: maddubs or vpdpbusd; one multiplication of 32 bits
    in the generic body) or of float32, operands from L1, random data."""
    body = lanes.body_of(isa)
    data = aligned(team.threads * 40960)
    data.view(np.float32)[:] = np.random.default_rng(0).standard_normal(data.size // 4)
    words = np.array([data.ctypes.data, turns], np.int64)
    prepared = prepare(_vector_job(body, int8), words, data)
    team.run(prepared)
    begin = time.perf_counter()
    team.run(prepared)
    per_lane = 4 if int8 and body != "generic" else 1
    return team.threads * turns * 8 * 2 * lanes.WIDTHS[body] * per_lane / (time.perf_counter() - begin)
