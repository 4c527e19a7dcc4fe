"""Grouped-query attention of one layer: projections around the device's paged attention; knows no other layer."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import KV, DeltaState, LatentKV, Ops, Row, Step
from hetero.model.weights import Weights


class Cache(Protocol):
    """Tensors behind pages, by layer."""

    def layer(self, l: int) -> KV | LatentKV: ...

    def state(self, l: int) -> DeltaState: ...


class Attention:
    def __init__(self, ops: Ops, part: spec.GQA, layer: int, eps: float, weights: Weights, format: str) -> None:
        w, self.layer, self.gated = weights.of(layer), layer, part.gate
        assert not (part.gate and part.bias)
        names = ("attn.q", "attn.k", "attn.v")
        bias = torch.cat([w(f"{n}.bias") for n in names]) if part.bias else None
        q, k, v = (w(n) for n in names)
        self.ops, self.width = ops, (part.heads + 2 * part.kv_heads) * part.head_dim
        if self.gated:                                   # per head query then gate: all queries first, all gates last
            q, gate = (t.flatten(0, 1) for t in q.unflatten(0, (part.heads, 2, -1)).unbind(1))
            v = torch.cat([v, gate])
        self.qkv = ops.matrix(torch.cat([q, k, v]), bias, format)
        self.attend = ops.attend(part, eps, w.maybe("attn.q_norm"), w.maybe("attn.k_norm"), w.maybe("attn.sinks"))
        self.out = ops.matrix(w("attn.o"), w.maybe("attn.o.bias"), format)

    def __call__(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """[T, H] -> [T, H]"""
        kv = cache.layer(self.layer)
        assert isinstance(kv, KV)
        step = step.of(kv.group)
        if not self.gated:
            return self.out(self.attend(self.qkv(x), kv, step))
        y = self.qkv(x)
        return self.out(self.ops.gate(self.attend(y[:, :self.width].contiguous(), kv, step), y[:, self.width:]))

    def report(self) -> Iterator[Row]:
        yield from (self.qkv.row(), self.attend.row(), self.out.row())
