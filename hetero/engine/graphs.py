"""Decode steps as CUDA graphs, one per batch size, played against the CPU's team; knows no request and no layer.

Stands where a decoder stands: pure decode steps whose every row wants logits are replayed, everything else runs eagerly. A batch is padded to
the next captured size with rows that write no KV, see no position and ask for no expert.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from hetero.errors import EngineFailed
from hetero.gpu.ops import Row, Step
from hetero.memory.cache import Cache
from hetero.model.decoder import Decoder
from hetero.model.handoff import Handoff


def sizes_to(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then every 8."""
    return tuple(sorted({n for n in (1, 2, 4, *range(8, most + 1, 8), most) if 0 < n <= most}))


class Graphs:
    """A decoder over one cache, captured. `width`: pages of the longest sequence. Capturing takes the decoder's stream and its whole graph pool."""

    def __init__(self, decoder: Decoder, cache: Cache, handoff: Handoff | None, most: int, width: int) -> None:
        self.decoder, self.cache, self.handoff, self.width = decoder, cache, handoff, width
        device = cache.device
        self.step = self._step(max(1, most), device)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        began = time.perf_counter()
        for n in sorted(sizes_to(most), reverse=True):           # the largest first: the smaller ones fit into its memory
            self.graphs[n] = self._capture(n)
        self.capture_s = time.perf_counter() - began
        self.replayed = self.eager = 0

    def _step(self, n: int, device: torch.device) -> Step:
        def full(size: int | tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size if isinstance(size, tuple) else (size,), value, dtype=dtype, device=device)

        return Step(full(n, 0, torch.int64), full(n, 0), torch.arange(n + 1, dtype=torch.int32, device=device), full(n, 1), full((n, self.width), -1),
                    full(n, -1, torch.int64), full(n, 0), torch.arange(n, device=device), 1)

    def _part(self, n: int) -> Step:
        s = self.step
        return Step(s.tokens[:n], s.positions[:n], s.starts[:n + 1], s.lengths[:n], s.pages[:n], s.slots[:n], s.states[:n], s.wanted[:n], 1)

    def _forward(self, n: int) -> Tensor:
        logits = self.decoder(self._part(n), self.cache)
        if self.handoff is not None:
            self.handoff.close_step()
        return logits

    def _capture(self, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        h = self.handoff
        if h is not None:
            h.ready(n)
            h.recording = True
            h.live.zero_()
            h.flags.release()                                    # nobody answers while kernels are warmed
        try:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch.no_grad():
                self._forward(n)
                if h is not None:
                    self.stream.synchronize()
                    h.flags.release()
                self._forward(n)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                logits = self._forward(n)
            torch.cuda.synchronize()
        finally:
            if h is not None:
                h.recording = False
                h.recover()
        return graph, logits

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """[R, V] float32 logits; those of a replay are valid until the next call. Raises EngineFailed, the device drained."""
        n = step.lengths.shape[0]
        size = next((s for s in sorted(self.graphs) if s >= n), None) if step.longest == 1 and step.wanted.shape[0] == n else None
        if size is None or cache is not self.cache:
            self.eager += 1
            with torch.no_grad():
                return self.decoder(step, cache)
        self._load(step, n, size)
        graph, logits = self.graphs[size]
        h = self.handoff
        if h is None:
            graph.replay()
        else:
            if h.gave_up():
                raise EngineFailed("a GPU kernel gave up waiting for the CPU experts", "the step before this one gave garbage")
            h.ready(size)
            try:
                graph.replay()
                h.play(size)
            except BaseException as error:
                if not isinstance(error, EngineFailed):
                    h.recover()
                raise
        self.replayed += 1
        return logits[:n]

    def _load(self, step: Step, n: int, size: int) -> None:
        s = self.step
        s.tokens[:n].copy_(step.tokens, non_blocking=True)
        s.positions[:n].copy_(step.positions, non_blocking=True)
        s.lengths[:n].copy_(step.lengths, non_blocking=True)
        s.pages[:n, :step.pages.shape[1]].copy_(step.pages, non_blocking=True)
        s.slots[:n].copy_(step.slots, non_blocking=True)
        s.states[:n].copy_(step.states, non_blocking=True)
        if size > n:
            s.slots[n:size].fill_(-1)
            s.states[n:size].fill_(self.cache.spare)             # a slot that no sequence has
            s.lengths[n:size].fill_(1)
            s.positions[n:size].fill_(0)
            s.pages[n:size, 0].fill_(-1)
            s.tokens[n:size].fill_(0)
        if self.handoff is not None:
            self.handoff.live.fill_(n)

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return self.decoder.diagnose(step, cache)

    def report(self) -> Iterator[tuple[int | None, Row]]:
        yield from self.decoder.report()
        sizes = ", ".join(map(str, sorted(self.graphs)))
        yield None, Row("graphs", str(self.cache.device), f"{len(self.graphs)} CUDA graphs", note=f"batches {sizes}")
