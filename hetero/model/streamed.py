"""Routed experts of large steps on the GPU, their packed records streamed through a ring; small steps go to the CPU. Knows no router."""

import torch
from torch import Tensor

from cpu_kernels import ExpertLayer
from hetero.arch import spec
from hetero.gpu import experts
from hetero.gpu.ops import Addend, Route, Row
from hetero.memory.stream import Group, Ring, groups_of
from hetero.model.handoff import HandedOver


def shape_of(part: spec.MoE, layer: ExpertLayer, device: torch.device) -> experts.Shape:
    """One layer's experts as the GPU's kernels see them."""
    s = layer.store
    biases = None
    if layer.biases is not None:
        gate, up, down = (None if b is None else torch.from_numpy(b).to(device) for b in layer.biases)
        assert up is not None and down is not None
        biases = (gate, up, down)
    return experts.Shape(s.form, s.experts, s.hidden, s.inter, s.gated, part.act, part.weight_on, biases)


def orders_of(layer: ExpertLayer) -> list[Group]:
    """The groups of one layer's records in the arena."""
    return groups_of(layer.store.address, layer.store.record_nbytes, layer.store.experts)


class Streamed:
    """One routed layer: from `least` tokens on by the GPU, with every expert streamed in the order of the ring; below by `small`."""

    def __init__(self, small: HandedOver, part: spec.MoE, ring: Ring, least: int) -> None:
        self.small, self.ring, self.least = small, ring, least
        self.shape = shape_of(part, small.layer, ring.device)
        self.groups = len(orders_of(small.layer))
        self.product: experts.Product | None = None
        self.layers, self.index = small.handoff.layers, small.index

    def begin(self, x: Tensor, logits: Tensor, route: Route) -> None:
        self.product = None
        if self.small.handoff.recording or x.shape[0] < self.least:
            self.small.begin(x, logits, route)
        else:
            self.start(x, *route(logits))

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.product = None                                  # of a step that ended early
        if self.small.handoff.recording or x.shape[0] < self.least:
            self.small.start(x, ids, weights)
            return
        grouped = experts.group(ids, weights, self.shape.experts)
        if self.small.cached is not None:
            self.small.cached.memory.prompted(self.index, grouped.starts, x.shape[0])
        self.product = experts.Product(self.shape, x.contiguous(), grouped)
        if self.index == 0 and self.ring.taken % len(self.ring.orders):
            self.ring.restart()                              # the step before this one ended early
        for _ in range(self.groups):
            order, slot = self.ring.next()
            self.product.run(slot, order.first, order.count)
            self.ring.done()

    def finish(self) -> Addend:
        if self.product is None:
            return self.small.finish()
        out, self.product = self.product.out(), None
        return out

    def row(self) -> Row:
        row = self.small.row()
        size = max(order.nbytes for order in self.ring.orders) / 2**20
        note = f"{row.note}; from {self.least} tokens on: triton.grouped on {self.ring.device}, ring of {len(self.ring.slots)} x {size:.0f} MiB"
        return Row(**{**vars(row), "note": note})
