"""Where routed experts are computed: executors that start and finish, each telling what it is; knows no router and no attention."""

import time
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from cpu_kernels import Act, ExpertLayer, ExpertStore
from hetero.arch import spec
from hetero.gpu.host import Host
from hetero.gpu.ops import Route, Row


def expert_layer(part: spec.MoE, store: ExpertStore, biases: Mapping[str, np.ndarray] | None) -> ExpertLayer:
    """The kernels' routed layer of one spec part over packed weights."""
    act = Act(part.act.kind, part.act.alpha, part.act.limit, part.act.up_shift)
    given = None if biases is None else (biases.get("gate"), biases["up"], biases["down"])
    return ExpertLayer(store, act, given, part.weight_on)


class OnCpu:
    """Experts computed by the team from packed records in system memory; activations already are there."""

    def __init__(self, layer: ExpertLayer, ops: Host, precision: str, deterministic: bool) -> None:
        self.layer, self.ops, self.precision, self.deterministic = layer, ops, precision, deterministic
        self.out: Tensor | None = None

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.out = out = self.ops.empty(*x.shape)
        arrays = x.numpy(), ids.numpy(), weights.numpy(), out.numpy()
        if self.ops.recording:
            self.ops.play(self.layer.prepared(*arrays, self.ops.team))
        else:
            began = time.perf_counter()
            self.layer.run(*arrays, self.ops.team, self.precision, self.deterministic)
            self.ops.spend("routed.job", time.perf_counter() - began)

    def begin(self, x: Tensor, logits: Tensor, route: Route) -> None:
        self.start(x, *route(logits))

    def finish(self) -> Tensor:
        out, self.out = self.out, None
        assert out is not None
        return out

    def row(self) -> Row:
        store = self.layer.store
        return self.ops.tell("experts", self.layer.kernel(self.precision, self.deterministic), store.form,
                             store.experts * store.record_nbytes, self.layer.refused)
