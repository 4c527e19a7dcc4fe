"""The feed-forward half of one layer: dense, or routed experts with an optional shared one; knows not where experts live."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import Addend, Experts, Matrix, Ops, Route, Row, settled
from hetero.model.weights import LayerWeights, Weights


class Glu:
    """gate and up as one matrix, activation, down. `at` is the prefix of the tensors' keys: "mlp" or "shared"."""

    def __init__(self, ops: Ops, act: spec.Act, at: str, w: LayerWeights, format: str) -> None:
        self.ops, self.act = ops, act
        gate_bias, up_bias = w.maybe(f"{at}.gate.bias"), w.maybe(f"{at}.up.bias")
        bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        self.gate_up = ops.matrix(torch.cat([w(f"{at}.gate"), w(f"{at}.up")]), bias, format)
        self.down = ops.matrix(w(f"{at}.down"), w.maybe(f"{at}.down.bias"), format)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return self.down(self.ops.glu(self.act, self.gate_up(x)))

    def report(self) -> Iterator[Row]:
        yield from (self.gate_up.row(), self.down.row())


class Routed:
    """Routed experts are started before the shared expert runs, and joined after it; without `overlap` before it, to measure the difference."""

    def __init__(self, ops: Ops, part: spec.MoE, layer: int, weights: Weights, experts: Experts, format: str, overlap: bool = True) -> None:
        w, self.ops, self.experts, self.overlap = weights.of(layer), ops, experts, overlap
        self.router = ops.matrix(w("router"), w.maybe("router.bias"), "f32", logits=True)
        self.part = part.router
        self.route: Route = ops.route(part.router, w.maybe("router.correction"))
        self.shared = Glu(ops, part.act, "shared", w, format) if part.shared else None
        self.shared_gate: Matrix | None = ops.matrix(w("shared_gate"), None, "f32") if part.shared_gate else None

    def __call__(self, x: Tensor) -> Addend:
        """[T, H] -> [T, H]"""
        self.experts.begin(x, self.router(x), self.route)
        if self.shared is None:
            return self.experts.finish()
        routed = None if self.overlap else settled(self.experts.finish())
        shared, gate = self.shared(x), None if self.shared_gate is None else self.shared_gate(x)
        return self.ops.join(self.experts.finish() if routed is None else routed, shared, gate)

    def report(self) -> Iterator[Row]:
        yield from (self.router.row(), self.route.row(), self.experts.row())
        if self.shared is not None:
            yield from self.shared.report()
