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
    each = part.value_heads // part.key_heads
    wide = part.value_dim * each

    def apart(key: str, sizes: list[int]) -> list[Tensor]:
        return [t.flatten(0, 1) for t in w(key).unflatten(0, (part.key_heads, -1)).split(sizes, 1)]
    groups = apart("delta.qkvz", [part.key_dim, part.key_dim, wide, wide]) if part.grouped else [w("delta.qkv"), w("delta.z")]
    gates = apart("delta.ba", [each, each]) if part.paired else [w("delta.b"), w("delta.a")]
    return torch.cat([*groups, *gates])
