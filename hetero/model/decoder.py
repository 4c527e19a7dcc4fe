"""One decoder for every model, assembled from the spec: embed, layers, norm, head; knows no family, no file and no request."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import Addend, Embed, Matrix, Norm, Ops, Row, Step, settled
from hetero.model.attention import Attention, Cache
from hetero.model.delta import DeltaNet
from hetero.model.ffn import Glu, Routed
from hetero.model.mla import LatentAttention


class Block:
    """One layer. The residual's last addend travels on as `delta`, so that the next norm adds and norms in one go."""

    def __init__(self, ops: Ops, layer: spec.Layer, norms: tuple[Norm, Norm], attention: Attention | LatentAttention | DeltaNet,
                 ffn: Glu | Routed) -> None:
        self.ops, self.norm_after, self.scale = ops, layer.norm_after, layer.residual_scale
        (self.attn_norm, self.ffn_norm), self.attention, self.ffn = norms, attention, ffn

    def __call__(self, x: Tensor, delta: Addend | None, step: Step, cache: Cache) -> tuple[Tensor, Addend]:
        """x and delta [T, H] -> the same, one layer on; the residual stream is x + scale * delta."""
        x, h = self.enter(self.attn_norm, x, delta)
        x, h = self.enter(self.ffn_norm, x, self.leave(self.attn_norm, self.attention(h, step, cache)))
        return x, self.leave(self.ffn_norm, self.ffn(h))

    def enter(self, norm: Norm, x: Tensor, delta: Addend | None) -> tuple[Tensor, Tensor]:
        if self.norm_after:
            x = x if delta is None else self.ops.add(x, settled(delta), self.scale)
            return x, x
        return (x, norm(x)) if delta is None else norm.add(x, delta, self.scale)

    def leave(self, norm: Norm, y: Addend) -> Addend:
        return norm(settled(y)) if self.norm_after else y

    def report(self) -> Iterator[Row]:
        yield from self.attention.report()
        yield from self.ffn.report()


class Decoder:
    def __init__(self, ops: Ops, model: spec.Model, embed: Embed, blocks: list[Block], norm: Norm, head: Matrix) -> None:
        assert len({layer.residual_scale for layer in model.layers}) == 1      # an addend is scaled by the layer that takes it in
        self.ops, self.model, self.embed, self.blocks, self.norm, self.head = ops, model, embed, blocks, norm, head

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """[R, V] float32 logits of the wanted rows; each layer's new KV is in the cache."""
        x: Tensor = self.embed(step.tokens)
        delta: Addend | None = None
        for block in self.blocks:
            x, delta = block(x, delta, step, cache)
        assert delta is not None
        last = self.ops.rows(x, step.wanted), self.ops.rows(settled(delta), step.wanted)
        return self.head(self.norm.add(*last, self.blocks[-1].scale)[1])

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        """The first layer whose output is not finite, by running the step again (it writes the same KV); None when it is the head, or nothing."""
        x: Tensor = self.embed(step.tokens)
        delta: Addend | None = None
        for l, block in enumerate(self.blocks):
            x, delta = block(x, delta, step, cache)
            delta = settled(delta)
            if not bool(torch.isfinite(x).all() & torch.isfinite(delta).all()):
                return l
        return None

    def report(self) -> Iterator[tuple[int | None, Row]]:
        """What really runs, told by each part: (layer, row), None for what belongs to no layer."""
        yield None, self.embed.row()
        for l, block in enumerate(self.blocks):
            yield from ((l, row) for row in block.report())
        yield None, self.head.row()
