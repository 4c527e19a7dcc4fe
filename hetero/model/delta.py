"""A gated delta net of one layer: one projection in, the device's recurrent part, one projection out; knows no other layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import Ops, Row, Step
from hetero.model.attention import Cache
from hetero.model.weights import LayerWeights, Weights


class DeltaNet:
    def __init__(self, ops: Ops, part: spec.GatedDeltaNet, layer: int, eps: float, weights: Weights, format: str) -> None:
        w, self.layer = weights.of(layer), layer
        self.inputs = ops.matrix(inputs(part, w), None, format)
        self.delta = ops.delta(part, eps, w("delta.conv")[:, 0], w("delta.dt_bias"), w("delta.a_log"), w("delta.norm"))
        self.out = ops.matrix(w("delta.o"), None, format)

    def __call__(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """[T, H] -> [T, H]"""
        return self.out(self.delta(self.inputs(x), cache.state(self.layer), step))

    def report(self) -> Iterator[Row]:
        yield from (self.inputs.row(), self.delta.row(), self.out.row())


def inputs(part: spec.GatedDeltaNet, w: LayerWeights) -> Tensor:
    """[channels + values + 2 value_heads, H]: rows q | k | v | z | b | a, however the checkpoint groups them."""
    if not part.grouped:
        return torch.cat([w(f"delta.{key}") for key in ("qkv", "z", "b", "a")])
    each = part.value_heads // part.key_heads
    wide = part.value_dim * each
    groups = w("delta.qkvz").unflatten(0, (part.key_heads, -1)).split([part.key_dim, part.key_dim, wide, wide], 1)
    gates = w("delta.ba").unflatten(0, (part.key_heads, -1)).split([each, each], 1)
    return torch.cat([t.flatten(0, 1) for t in (*groups, *gates)])
