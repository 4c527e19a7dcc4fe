"""The router: scores to ids and weights, one token at a time; knows no experts' weights and no model."""

import math
from typing import Any

import numpy as np
from numba import carray

from .atoms import peek
from .jit import kernel
from .jobs import share
from .operands import f32, f64, i32

SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2, "sparsemixer": 3}


@kernel(inner=True)
def best_of(x: Any, n: int) -> int:
    """Where the largest of n is; the first of equals; NaN is never larger."""
    at = 0
    for i in range(1, n):
        if x[i] > x[at] or (x[at] != x[at] and x[i] == x[i]):
            at = i
    return at


@kernel(inner=True)
def choose_groups(pick: Any, experts: int, groups: int, top_groups: int, two: int, sums: Any) -> None:
    """Leaves -inf in every group of `pick` but the `top_groups` best, by the largest or by the sum of the two largest."""
    each = experts // groups
    for g in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(g * each, (g + 1) * each):
            if pick[i] > first:
                first, second = pick[i], first
            elif pick[i] > second:
                second = pick[i]
        sums[g] = first + second if two else first
    for _ in range(top_groups):
        g = best_of(sums, groups)
        sums[g] = np.nan                                 # kept
    for g in range(groups):
        if sums[g] == sums[g]:
            for i in range(g * each, (g + 1) * each):
                pick[i] = -np.inf


@kernel(inner=True)
def mix_sparse(logits: Any, left: Any, experts: int, k: int, jitter: float, ids: Any, weights: Any) -> None:
    for i in range(experts):
        left[i] = logits[i]
    for j in range(k):
        e = best_of(left, experts)
        best, total = left[e], np.float32(0)
        for i in range(experts):
            if left[i] > -np.inf and not (best - logits[i]) / max(abs(logits[i]), best) > 2 * jitter:   # 0 / 0 counts as near
                total += math.exp(left[i] - best)
        ids[j], weights[j] = e, 1 / total
        left[e] = -np.inf


@kernel(inner=True)
def scored(logits: Any, experts: int, kind: int, score: Any) -> None:
    if kind == 0:
        most, total = logits[best_of(logits, experts)], np.float32(0)
        for i in range(experts):
            score[i] = math.exp(logits[i] - most)
            total += score[i]
        for i in range(experts):
            score[i] /= total
    else:
        for i in range(experts):
            score[i] = np.float32(1) / (np.float32(1) + math.exp(-logits[i])) if kind == 1 else logits[i]


@kernel(inner=True)
def route(control: int, tid: int, threads: int, arguments: int) -> int:
    """operands: logits [T, E], T, E, k, score kind, correction [E] or 0, groups, top_groups, group by two, renormalize, ids i32 [T, k],
    weights [T, k], scratch [T, 2 E + groups]; reals: scale, jitter. Equal scores go to the lower id."""
    reals = carray(f64(peek(arguments)), 2)
    scale = np.float32(reals[0])
    T, E, k, kind = peek(arguments + 16), peek(arguments + 24), peek(arguments + 32), peek(arguments + 40)
    fix, groups, top_groups, two, renormalize = (peek(arguments + 48), peek(arguments + 56), peek(arguments + 64), peek(arguments + 72),
                                                 peek(arguments + 80))
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        logits = carray(f32(peek(arguments + 8) + 4 * E * t), E)
        ids, weights = carray(i32(peek(arguments + 88) + 4 * k * t), k), carray(f32(peek(arguments + 96) + 4 * k * t), k)
        room = peek(arguments + 104) + 4 * (2 * E + groups) * t
        score, pick, sums = carray(f32(room), E), carray(f32(room + 4 * E), E), carray(f32(room + 8 * E), groups)
        if kind == 3:
            mix_sparse(logits, pick, E, k, reals[1], ids, weights)
            for j in range(k):
                weights[j] *= scale
            continue
        scored(logits, E, kind, score)
        if fix != 0:
            correction = carray(f32(fix), E)
            for i in range(E):
                pick[i] = score[i] + correction[i]
        else:
            for i in range(E):
                pick[i] = score[i]
        if groups > 1:
            choose_groups(pick, E, groups, top_groups, two, sums)
        for j in range(k):
            e = best_of(pick, E)
            ids[j], weights[j] = e, score[e]
            pick[e] = -np.inf
        if kind == 2:
            scored(weights, k, 0, weights)
        factor = scale
        if renormalize:
            total = np.float32(1e-20)
            for j in range(k):
                total += weights[j]
            factor = scale / total
        for j in range(k):
            weights[j] *= factor
    return 0
