"""Which handoff works on this machine, proven at start by a graph whose layers the CPU echoes with other data in every round; knows no model."""

from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from cpu_kernels.jobs import echo
from cpu_kernels.team import Prepared, Team, prepare
from hetero.errors import HeteroError, UnusableHardware
from hetero.model.handoff import KINDS, Handoff

LAYERS, ROUNDS = 16, 100


@dataclass(frozen=True)
class Proven:
    """The best kind that echoed every round right. seconds_per_layer: what the graph takes longer, the echo included, than with all answers
    there. failed: what was tried before it, and why not."""

    kind: str
    seconds_per_layer: float
    failed: tuple[str, ...] = ()


def prove(team: Team, device: torch.device, dtype: torch.dtype, hidden: int, top_k: int, kinds: tuple[str, ...] = KINDS) -> Proven:
    """Tries each kind in order. UnusableHardware when none works."""
    failed: list[str] = []
    for kind in kinds:
        try:
            return Proven(kind, Echo(kind, team, device, dtype, hidden, top_k).run(), tuple(failed))
        except HeteroError as error:
            failed.append(f"{kind}: {error.message}")
    raise UnusableHardware(f"no handoff between GPU and CPU works: {'; '.join(failed)}", "--device cpu, or update the NVIDIA driver")


class Echo:
    """A few layers of one token; what is sent depends on the round and the layer, and is exact in bfloat16."""

    def __init__(self, kind: str, team: Team, device: torch.device, dtype: torch.dtype, hidden: int, top_k: int, deadline_s: float = 2.0) -> None:
        hidden -= hidden % 4
        self.copies = [np.zeros(top_k + top_k % 2, np.int32) for _ in range(LAYERS)]
        self.h = Handoff(self.jobs, LAYERS, team, hidden, len(self.copies[0]), 1, device, dtype, kind, deadline_s)
        self.columns = torch.arange(hidden, dtype=torch.int32, device=device)
        self.round = torch.zeros(1, dtype=torch.int32, device=device)
        self.weights = torch.ones(1, len(self.copies[0]), device=device)
        self.heard = torch.zeros(LAYERS, hidden, dtype=dtype, device=device)

    def jobs(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, out: np.ndarray) -> list[Prepared]:
        return [prepare(echo, np.array([x.ctypes.data, x.nbytes // 8, x.dtype == np.uint16, out.ctypes.data, ids.ctypes.data, ids.nbytes // 8,
                                        copy.ctypes.data], np.int64), (x, ids, out, copy)) for copy in self.copies]

    def said(self, at: Tensor | int, layer: int) -> Tensor:
        return (self.columns + at * 7 + layer * 13) & 127

    def forward(self) -> None:
        for l in range(LAYERS):
            words = self.said(self.round, l)
            self.h.post(l, words[None].to(self.h.dtype), (words[None, :self.weights.shape[1]].contiguous(), self.weights))
            self.heard[l:l + 1] = self.h.take(l, 1).take()
        self.round += 1
        self.h.close_step()

    def capture(self) -> torch.cuda.CUDAGraph:
        """The rounds as a graph, its kernels warm."""
        h, stream = self.h, torch.cuda.Stream(self.h.device)
        h.ready(1)
        h.live.fill_(1)
        h.flags.release()
        with torch.no_grad(), torch.cuda.stream(stream):
            self.forward()
            torch.cuda.synchronize(h.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.forward()
        return graph

    def run(self) -> float:
        """Seconds per layer. Raises UnusableHardware when a round came back wrong, EngineFailed when one did not come back."""
        h, graph = self.h, self.capture()
        alone = 0.0 if h.kind == "callback" else self.alone(graph)
        h.recover()
        self.round.zero_()
        taken = []
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for at in range(ROUNDS):
            start.record()
            graph.replay()
            end.record()
            h.play(1)
            torch.cuda.synchronize(h.device)
            self.compare(at)
            taken.append(start.elapsed_time(end) / 1e3)
        return (median(taken) - alone) / LAYERS

    def compare(self, at: int) -> None:
        """UnusableHardware when what the GPU heard, or what the CPU was told, is not what was said in round `at`."""
        for l in range(LAYERS):
            want = self.said(at, l)
            if not torch.equal(self.heard[l], want.to(self.h.dtype)) or want[:len(self.copies[l])].tolist() != self.copies[l].tolist():
                raise UnusableHardware(f"the echo of round {at}, layer {l} came back wrong", "")

    def alone(self, graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of the graph with every answer there."""
        self.h.flags.release()
        times = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self.h.device)
            times.append(start.elapsed_time(end) / 1e3)
        return median(times)
