"""Router scores to expert ids and weights, one program per token, in Triton; knows no experts and no place they live."""

import torch
import triton
import triton.language as tl

from hetero.arch.spec import Router
from hetero.gpu.launch import early, follow

SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}


@triton.jit
def pick(logits, correction, t, E, PER, scale, SCORE: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
         BK: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTION: tl.constexpr, RENORMALIZE: tl.constexpr):
    """(ids [BK] int32, weights [BK] float32) of token t; equal scores go to the lower id."""
    g = tl.arange(0, BG)[:, None]
    j = tl.arange(0, BE)[None, :]
    ids = g * PER + j
    real = (g < GROUPS) & (j < PER)
    s = tl.load(logits + t.to(tl.int64) * E + ids, mask=real, other=float("-inf")).to(tl.float32)
    if SCORE == 0:
        s = tl.exp(s - tl.max(tl.max(s, 1), 0))
        s = s / tl.sum(tl.sum(s, 1), 0)
    if SCORE == 1:
        s = 1.0 / (1.0 + tl.exp(-s))
    v = s
    if CORRECTION:
        v += tl.load(correction + ids, mask=real, other=0.0).to(tl.float32)
    v = tl.where(real, v, float("-inf"))
    if GROUPS > 1:
        best = tl.max(v, 1)
        if TOP2:                                             # best two of each group; the second is the maximum once the first is gone
            first = tl.min(tl.where(v == best[:, None], j, BE), 1)
            best += tl.max(tl.where(j == first[:, None], float("-inf"), v), 1)
        gi = tl.arange(0, BG)
        best = tl.where(gi < GROUPS, best, float("-inf"))
        kept = tl.zeros((BG,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            m = tl.min(tl.where(best == tl.max(best, 0), gi, BG), 0)
            kept = tl.where(gi == m, 1, kept)
            best = tl.where(gi == m, float("-inf"), best)
        v = tl.where((kept[:, None] > 0) | (not real), v, 0.0)   # as published: groups not kept score 0, they are not excluded
        v = tl.where(real, v, float("-inf"))
    k = tl.arange(0, BK)
    out = tl.zeros((BK,), tl.int32)
    w = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(K):
        top = tl.max(tl.max(v, 1), 0)
        at = tl.min(tl.min(tl.where((v == top) & real, ids, GROUPS * PER), 1), 0)
        at = tl.minimum(at, GROUPS * PER - 1)                # a row of NaN still names experts that exist
        out = tl.where(k == i, at, out)
        w = tl.where(k == i, tl.sum(tl.sum(tl.where(ids == at, tl.where(real, s, 0.0), 0.0), 1), 0), w)
        v = tl.where(ids == at, float("-inf"), v)
    if SCORE == 2:
        w = tl.where(k < K, w, float("-inf"))
        w = tl.exp(w - tl.max(w, 0))
        w = w / tl.sum(w, 0)
    if RENORMALIZE:
        w = w / tl.sum(tl.where(k < K, w, 0.0), 0)
    return out, w * scale


@triton.jit
def _route(logits, correction, ids, weights, E, PER, scale, SCORE: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr,
           K: tl.constexpr, BK: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTION: tl.constexpr, RENORMALIZE: tl.constexpr,
           EARLY: tl.constexpr):
    follow(EARLY)
    t = tl.program_id(0)
    i, w = pick(logits, correction, t, E, PER, scale, SCORE, GROUPS, BG, BE, K, BK, TOP_GROUPS, TOP2, CORRECTION, RENORMALIZE)
    k = tl.arange(0, BK)
    tl.store(ids + t * K + k, i, mask=k < K)
    tl.store(weights + t * K + k, w, mask=k < K)


def constants(part: Router, corrected: bool) -> dict[str, int | bool]:
    """The kernel's compile-time numbers for one router; KeyError for a score this kernel does not know (sparsemixer stays with torch)."""
    per = part.experts // part.groups
    return {"SCORE": SCORES[part.score], "GROUPS": part.groups, "BG": triton.next_power_of_2(part.groups), "BE": triton.next_power_of_2(per),
            "K": part.top_k, "BK": triton.next_power_of_2(part.top_k), "TOP_GROUPS": part.top_groups, "TOP2": part.group_score == "top2",
            "CORRECTION": corrected, "RENORMALIZE": part.renormalize}


def route(part: Router, logits: torch.Tensor, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> (ids [T, k] int32, weights [T, k] float32), best first."""
    T, E = logits.shape
    ids = torch.empty(T, part.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(T, part.top_k, dtype=torch.float32, device=logits.device)
    _route[(T,)](logits, logits if correction is None else correction, ids, weights, E, E // part.groups, part.scale,
                 **constants(part, correction is not None), num_warps=1 if E <= 128 else 4, **early(logits))
    return ids, weights
