"""Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434): low-rank projections around the device's part."""

from collections.abc import Iterator

from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import LatentKV, Ops, Row, Step
from hetero.model.attention import Cache
from hetero.model.weights import Weights


class LatentAttention:
    def __init__(self, ops: Ops, part: spec.MLA, layer: int, eps: float, weights: Weights, format: str) -> None:
        w, self.layer = weights.of(layer), layer
        self.q_down = None if part.q_rank is None else ops.matrix(w("attn.q_a"), w.maybe("attn.q_a.bias"), format)
        self.q_norm = None if part.q_rank is None else ops.norm(w("attn.q_a_norm"), None, eps)
        self.q = ops.matrix(w("attn.q" if part.q_rank is None else "attn.q_b"), None, format)
        self.kv_down = ops.matrix(w("attn.kv_a"), w.maybe("attn.kv_a.bias"), format)
        self.attend = ops.latent_attend(part, eps, w("attn.kv_a_norm"), w("attn.kv_b"))
        self.out = ops.matrix(w("attn.o"), w.maybe("attn.o.bias"), format)

    def __call__(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """[T, H] -> [T, H]"""
        kv = cache.layer(self.layer)
        assert isinstance(kv, LatentKV)
        low = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        return self.out(self.attend(self.q(low), self.kv_down(x), kv, step.of(kv.group)))

    def report(self) -> Iterator[Row]:
        if self.q_down is not None:
            yield self.q_down.row()
        yield from (self.q.row(), self.kv_down.row(), self.attend.row(), self.out.row())
