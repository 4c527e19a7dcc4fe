"""The small jobs of a decoder's step: embed, add and norm, gate, gather; and many jobs as one (`in_series`); float32, one row at a time.

A row's arithmetic never depends on how many rows or threads there are. Knows no weight format but float32 and bf16, and no model.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray

from .atoms import call, clock, peek, poke
from .jit import kernel
from .jobs import INNER, LINE, OWN, OWN_ROUND, ROUND, SCRATCH, barrier, begin, share
from .operands import f32, f64, i64, ready, rms, squares, u16, u32
from .team import Prepared

ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}


@kernel(inner=True)
def embed(control: int, tid: int, threads: int, arguments: int) -> int:
    """operands: tokens i64 [T], table f32 or u16 [V, H], is bf16, T, H, out [T, H]; reals: scale."""
    scale = np.float32(carray(f64(peek(arguments)), 1)[0])
    T, H, bf16 = peek(arguments + 32), peek(arguments + 40), peek(arguments + 24)
    tokens, out = carray(i64(peek(arguments + 8)), T), peek(arguments + 48)
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        if bf16:
            row, bits = carray(u16(peek(arguments + 16) + 2 * H * tokens[t]), H), carray(u32(out + 4 * H * t), H)
            for i in range(H):
                bits[i] = np.uint32(row[i]) << np.uint32(16)
            if scale != 1:
                y = carray(f32(out + 4 * H * t), H)
                for i in range(H):
                    y[i] *= scale
        else:
            source, y = carray(f32(peek(arguments + 16) + 4 * H * tokens[t]), H), carray(f32(out + 4 * H * t), H)
            for i in range(H):
                y[i] = source[i] * scale
    return 0


@kernel(inner=True)
def norm(control: int, tid: int, threads: int, arguments: int) -> int:
    """operands: x [T, H], delta [T, H] or 0, weight [H], bias [H] or 0, T, H, out [T, H]; reals: eps, scale. x += scale * delta; out = norm(x)."""
    reals = carray(f64(peek(arguments)), 2)
    eps, scale = reals[0], np.float32(reals[1])
    T, H = peek(arguments + 40), peek(arguments + 48)
    delta, bias = peek(arguments + 16), peek(arguments + 32)
    weight = carray(f32(peek(arguments + 24)), H)
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        x, out = carray(f32(peek(arguments + 8) + 4 * H * t), H), carray(f32(peek(arguments + 56) + 4 * H * t), H)
        if delta != 0:
            d = carray(f32(delta + 4 * H * t), H)
            for i in range(H):
                x[i] += scale * d[i]
        if bias == 0:
            rms(x, weight, H, eps, out)
        else:
            shift = carray(f32(bias), H)
            mean = 0.0
            for i in range(H):
                mean += x[i]
            mean /= H
            for i in range(H):
                out[i] = np.float32(x[i] - mean)
            factor = np.float32(1.0 / math.sqrt(squares(out, H) / H + eps))
            for i in range(H):
                out[i] = out[i] * factor * weight[i] + shift[i]
    return 0


@kernel(inner=True)
def curve(g: float, kind: int, alpha: float) -> Any:
    """kind(alpha * g) / alpha in float32."""
    x = np.float32(g) * np.float32(alpha)
    if kind == 0:
        y = x / (np.float32(1) + np.float32(math.exp(-x)))
    elif kind == 1:
        y = np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476))
    elif kind == 2:
        y = np.float32(0.5) * x * np.float32(1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        y = max(x, np.float32(0)) * max(x, np.float32(0))
    return y / np.float32(alpha)


@kernel(inner=True)
def gate(control: int, tid: int, threads: int, arguments: int) -> int:
    """operands: gate | up [T, 2 I], T, I, kind, out [T, I]; reals: alpha, limit (0: none), up_shift. Shared out by 64 columns."""
    reals = carray(f64(peek(arguments)), 3)
    alpha, limit, shift = np.float32(reals[0]), np.float32(reals[1]), np.float32(reals[2])
    T, I, kind = peek(arguments + 16), peek(arguments + 24), peek(arguments + 32)
    pieces = (I + 63) // 64
    lo, hi = share(T * pieces, tid, threads)
    for task in range(lo, hi):
        t, piece = task // pieces, task % pieces
        g, out = carray(f32(peek(arguments + 8) + 8 * I * t), 2 * I), carray(f32(peek(arguments + 40) + 4 * I * t), I)
        for i in range(64 * piece, min(64 * piece + 64, I)):
            a, up = g[i], g[I + i]
            if limit > 0:
                a, up = min(a, limit), min(max(up, -limit), limit)
            out[i] = curve(a, kind, alpha) * (up + shift)
    return 0


@kernel(inner=True)
def add(control: int, tid: int, threads: int, arguments: int) -> int:
    """x += factor * delta. operands: x [T, H], delta [T, H], gate [T] or 0, T, H; reals: scale. factor: sigmoid(gate), or scale without one."""
    scale = np.float32(carray(f64(peek(arguments)), 1)[0])
    T, H = peek(arguments + 32), peek(arguments + 40)
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        x, delta = carray(f32(peek(arguments + 8) + 4 * H * t), H), carray(f32(peek(arguments + 16) + 4 * H * t), H)
        factor = scale
        if peek(arguments + 24) != 0:
            factor = np.float32(1 / (1 + math.exp(-carray(f32(peek(arguments + 24) + 4 * t), 1)[0])))
        for i in range(H):
            x[i] += factor * delta[i]
    return 0


@kernel(inner=True)
def rows(control: int, tid: int, threads: int, arguments: int) -> int:
    """operands: x [T, H], wanted i64 [R], R, H, out [R, H]."""
    R, H = peek(arguments + 24), peek(arguments + 32)
    wanted = carray(i64(peek(arguments + 16)), R)
    lo, hi = share(R, tid, threads)
    for r in range(lo, hi):
        x, out = carray(f32(peek(arguments + 8) + 4 * H * wanted[r]), H), carray(f32(peek(arguments + 40) + 4 * H * r), H)
        for i in range(H):
            out[i] = x[i]
    return 0


@kernel(inner=True)
def series(control: int, tid: int, threads: int, arguments: int) -> int:
    """Runs jobs one after another, a barrier between any two. operands: count, table i64 [count, 2] of (job, its arguments), times i64 [count + 1]:
    when each began and the last ended, in ns, written where times[0] is not 0."""
    count, table, times = peek(arguments + 8), peek(arguments + 16), peek(arguments + 24)
    own = control + OWN + tid * LINE
    turn = peek(own + OWN_ROUND)
    timed = tid == 0 and peek(times) != 0
    for i in range(count):
        begin(control, tid, turn + i)
        if timed:
            poke(times + 8 * i, clock(own + SCRATCH))
        code = call(peek(table + 16 * i), control, tid, threads, peek(table + 16 * i + 8), own + INNER)
        if peek(own + INNER) != 0:
            return -1
        if code != 0:
            return code
        if not barrier(control, tid, threads):
            return 0
    if timed:
        poke(times + 8 * count, clock(own + SCRATCH))
    if tid == 0 and count > 0:
        poke(control + ROUND, turn + count - 1)
    return 0


def in_series(jobs: Sequence[Prepared], times: np.ndarray | None = None) -> Prepared:
    """Prepared jobs as one: what one step of a decoder is when it is replayed. times: int64 [jobs + 1], filled by a run when times[0] is not 0."""
    times = np.zeros(len(jobs) + 1, np.int64) if times is None else times
    table = np.array([(job.job, job.arguments) for job in jobs], np.int64).reshape(-1, 2)
    return ready(series, [len(jobs), table.ctypes.data, times.ctypes.data], keep=(table, times, tuple(jobs)))
