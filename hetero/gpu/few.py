"""Routed experts that live in slots on the GPU, for the few tokens of a decode step, in Triton: matrix-vector products over packed records.

Pairs (token, choice) whose slot is -1 belong to somebody else and are left out. Knows not which experts have slots, nor why.
"""

import torch
import triton
import triton.language as tl

from hetero.gpu.experts import Shape, halves
from hetero.gpu.launch import early, follow
from hetero.gpu.linear import KINDS, activated


@triton.jit
def _few_up(x, ids, slots, weights, records, gate_bias, up_bias, h, RECORD, UP, H, I, KT, alpha, limit, shift, top_k,
            BN: tl.constexpr, AHEAD: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
            LIMIT: tl.constexpr, WEIGH: tl.constexpr, ORDER: tl.constexpr, EARLY: tl.constexpr):
    """Program (block of rows, pair): h[pair, rows] = act(gate) * up."""
    pair = tl.program_id(1)
    follow(EARLY)
    slot = tl.load(slots + pair)
    if slot >= 0:
        e = tl.load(ids + pair)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live = n < I
        base = records + slot.to(tl.int64) * RECORD + tl.zeros((BN,), tl.int64)
        k = tl.arange(0, 32)
        xp = x + (pair // top_k).to(tl.int64) * H
        order = (records + slot.to(tl.int64) * RECORD + ORDER).to(tl.pointer_type(tl.int32))
        up = tl.zeros((BN, 32), tl.float32)
        gate = tl.zeros((BN, 32), tl.float32)
        for first in range(0, KT, AHEAD):
            for u in tl.static_range(0, AHEAD):              # several tiles are on their way at once
                kt = first + u
                c = kt * 64 + k
                c0 = tl.load(order + c, mask=c < H, other=0) if ORDER else c
                c1 = tl.load(order + c + 32, mask=c + 32 < H, other=0) if ORDER else c + 32
                x0 = tl.load(xp + c0, mask=c < H, other=0.0).to(tl.float32)[None, :]
                x1 = tl.load(xp + c1, mask=c + 32 < H, other=0.0).to(tl.float32)[None, :]
                w0, w1 = halves(base + UP, n, KT, kt, live & (n * 0 + kt < KT), tl.float32, FORMAT)
                up += w0 * x0 + w1 * x1
                if GATED:
                    g0, g1 = halves(base, n, KT, kt, live & (n * 0 + kt < KT), tl.float32, FORMAT)
                    gate += g0 * x0 + g1 * x1
        u = tl.sum(up, 1)
        g = tl.sum(gate, 1)
        if WEIGH:
            w = tl.load(weights + pair)
            u *= w
            g *= w
        if BIAS:
            u += tl.load(up_bias + e * I + n, mask=live, other=0.0)
            if GATED:
                g += tl.load(gate_bias + e * I + n, mask=live, other=0.0)
        if GATED:
            if LIMIT:
                g = tl.minimum(g, limit)
                u = tl.minimum(tl.maximum(u, -limit), limit)
            y = activated(g, KIND, alpha) * (u + shift)
        else:
            y = activated(u, KIND, alpha)
        tl.store(h + pair.to(tl.int64) * I + n, y, mask=live)


@triton.jit
def _few_down(h, ids, slots, weights, records, bias, out, RECORD, DOWN, H, I, KT, K: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
              FORMAT: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, EARLY: tl.constexpr):
    """Program (block of rows, token): the token's pairs summed; zero when it has none here."""
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < H
    k = tl.arange(0, 32)
    total = tl.zeros((BN,), tl.float32)
    follow(EARLY)
    for j in range(K):
        pair = t * K + j
        slot = tl.load(slots + pair)
        if slot >= 0:
            base = records + slot.to(tl.int64) * RECORD + DOWN + tl.zeros((BN,), tl.int64)
            hp = h + pair.to(tl.int64) * I + k
            acc = tl.zeros((BN, 32), tl.float32)
            for first in range(0, KT, AHEAD):
                for u in tl.static_range(0, AHEAD):
                    kt = first + u
                    c = kt * 64 + k
                    h0 = tl.load(hp + kt * 64, mask=c < I, other=0.0)[None, :]
                    h1 = tl.load(hp + kt * 64 + 32, mask=c + 32 < I, other=0.0)[None, :]
                    w0, w1 = halves(base, n, KT, kt, live & (n * 0 + kt < KT), tl.float32, FORMAT)
                    acc += w0 * h0 + w1 * h1
            y = tl.sum(acc, 1)
            if BIAS:
                y += tl.load(bias + tl.load(ids + pair) * H + n, mask=live, other=0.0)
            if WEIGH:
                y *= tl.load(weights + pair)
            total += y
    tl.store(out + t.to(tl.int64) * H + n, total, mask=live)


def few(s: Shape, x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """x [T, H]; ids, slots [T, k] int32 (slot -1: not here), weights [T, k] f32; records uint8, slot after slot -> [T, H] f32."""
    T, k = ids.shape
    h = torch.empty(T * k, s.inter, dtype=torch.float32, device=x.device)
    out = torch.empty(T, s.hidden, dtype=torch.float32, device=x.device)
    gate_bias, up_bias, down_bias = s.biases or (None, weights, weights)
    common = {"BN": 16, "AHEAD": 4, "BIAS": s.biases is not None, "num_warps": 4, **early(x)}
    _few_up[(triton.cdiv(s.inter, 16), T * k)](
        x, ids, slots, weights, records, weights if gate_bias is None else gate_bias, up_bias, h, s.record_nbytes, s.section_nbytes * s.gated,
        s.hidden, s.inter, -(-s.hidden // 64), s.act.alpha, s.act.limit or 0.0, s.act.up_shift, k, FORMAT=s.codes[0], GATED=s.gated,
        KIND=KINDS[s.act.kind], LIMIT=s.act.limit is not None, WEIGH=s.weight_on == "input", ORDER=s.order_at, **common)
    _few_down[(triton.cdiv(s.hidden, 16), T)](
        h, ids, slots, weights, records, down_bias, out, s.record_nbytes, s.section_nbytes * (1 + s.gated), s.hidden, s.inter, -(-s.inter // 64), K=k,
        FORMAT=s.codes[1], WEIGH=s.weight_on == "output", **common)
    return out
