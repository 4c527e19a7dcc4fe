"""The contender that is ours: `cpu_kernels.ExpertLayer`. METHOD: a format, with +fast for int8 products in prefill where there are tiles."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cpu_kernels import ExpertLayer, ExpertStore, Team, cpu, measure


class Ours:
    def __init__(self, method: str, threads: int, gib: float) -> None:
        format, _, fast = method.partition("+")
        self.precision = fast or "accurate"
        self.team = Team(cpu.read().pick(threads))
        self.team.seat().__enter__()
        stores: list[ExpertStore] = []
        first = ExpertStore(format, peer.KINDS, peer.HIDDEN, peer.INTER)
        for k in range(peer.KINDS):
            first.put(k, *peer.drawn(k))
        self.expert_nbytes, self.layers = float(first.record_nbytes), peer.layers_for(first.record_nbytes, gib)
        for _ in range(self.layers):
            store = ExpertStore(format, peer.EXPERTS, peer.HIDDEN, peer.INTER)
            for e in range(peer.EXPERTS):
                store.record(e)[...] = first.record(e % peer.KINDS)
            stores.append(store)
        self.stack = [ExpertLayer(store) for store in stores]
        switch = self.stack[0].tune(self.team)
        for layer in self.stack:
            layer.switch = switch
        self.name = f"hetero {method} ({cpu.isa()})"

    def prepare(self, tokens: int, calls: int) -> Callable[[list[np.ndarray], np.ndarray, np.ndarray, int], np.ndarray]:
        out = np.empty((tokens, peer.HIDDEN), np.float32)

        def run(ids: list[np.ndarray], x: np.ndarray, weights: np.ndarray, first: int) -> np.ndarray:
            for i, each in enumerate(ids):
                self.stack[(first + i) % self.layers].run(x, each, weights, out, self.team, self.precision)
            return out
        return run


def make(method: str, threads: int, gib: float) -> Ours:
    return Ours(method, threads, gib)


def ceiling(experts: Ours) -> dict[str, float]:
    """Bytes per second that the same threads read of the experts' memory, operations per second of the products that prefill uses."""
    rng = np.random.default_rng()
    layer = experts.stack[int(rng.integers(experts.layers))]
    return {"read": max(measure.read_bytes_s(experts.team, measure.somewhere(layer.store, rng)) for _ in range(2)),
            "peak": measure.peak_ops_s(layer, experts.team, experts.precision)}
