"""Grouped-query attention of one layer: projections around the device's paged attention; knows no other layer."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import KV, LatentKV, Ops, Row, Step
from hetero.model.weights import Weights


class Cache(Protocol):
    """Tensors behind pages, by layer."""

    def layer(self, l: int) -> KV | LatentKV: ...


class Attention:
    def __init__(self, ops: Ops, part: spec.GQA, layer: int, eps: float, weights: Weights, format: str) -> None:
        w, self.layer = weights.of(layer), layer
        names = ("attn.q", "attn.k", "attn.v")
        bias = torch.cat([w(f"{n}.bias") for n in names]) if part.bias else None
        self.qkv = ops.matrix(torch.cat([w(n) for n in names]), bias, format)
        self.attend = ops.attend(part, eps, w.maybe("attn.q_norm"), w.maybe("attn.k_norm"), w.maybe("attn.sinks"))
        self.out = ops.matrix(w("attn.o"), w.maybe("attn.o.bias"), format)

    def __call__(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """[T, H] -> [T, H]"""
        kv = cache.layer(self.layer)
        assert isinstance(kv, KV)
        return self.out(self.attend(self.qkv(x), kv, step))

    def report(self) -> Iterator[Row]:
        yield from (self.qkv.row(), self.attend.row(), self.out.row())
