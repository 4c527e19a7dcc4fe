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
from hetero.memory.slots import SlotMemory
from hetero.model.decoder import Decoder
from hetero.model.handoff import Handoff

ROWS = {"tokens": 0, "positions": 0, "lengths": 1, "states": None}        # of a step, with what pads them; None: the spare state


def sizes_to(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then every 8."""
    return tuple(sorted({n for n in (1, 2, 4, *range(8, most + 1, 8), most) if 0 < n <= most}))


class Staged:
    """The step that graphs read, in one piece of device memory, with its twin in pinned memory: one copy brings a new step with the page table of the
    first of `groups` of layers (`Step.of`), and one more that of each other."""

    def __init__(self, most: int, width: int, device: torch.device, groups: int = 1) -> None:
        self.width, at = width, 0
        sizes = {"tokens": (most, 8), "slots": (groups * most, 8), "positions": (most, 4), "lengths": (most, 4), "states": (most, 4), "live": (1, 4),
                 "pages": (groups * most * width, 4)}            # pages last: of a small batch only its own are copied
        places = {}
        for name, (count, size) in sizes.items():
            places[name] = (at, at + count * size, size)
            at += -(-count * size // 16) * 16
        self.pages_at = places["pages"][0]
        self.here = torch.zeros(at, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.there = torch.zeros(at, dtype=torch.uint8, device=device)
        kinds = {4: torch.int32, 8: torch.int64}
        self.host = {n: self.here[a:b].view(kinds[size]).numpy() for n, (a, b, size) in places.items()}
        t = {n: self.there[a:b].view(kinds[size]) for n, (a, b, size) in places.items()}
        self.live, self.tables = t["live"], self.host["pages"].reshape(groups, most, width)
        self.slots = self.host["slots"].reshape(groups, most)
        (pages, slots), *others = zip(t["pages"].view(groups, most, width), t["slots"].view(groups, most), strict=True)
        self.step = Step(t["tokens"], t["positions"], torch.arange(most + 1, dtype=torch.int32, device=device), t["lengths"], pages, slots,
                         t["states"], torch.arange(most, device=device), 1, others=tuple(others))

    def part(self, n: int) -> Step:
        """The first n sequences."""
        s = self.step
        return Step(s.tokens[:n], s.positions[:n], s.starts[:n + 1], s.lengths[:n], s.pages[:n], s.slots[:n], s.states[:n], s.wanted[:n], 1,
                    others=tuple((pages[:n], slots[:n]) for pages, slots in s.others))

    def load(self, step: Step | None, n: int, size: int, spare: int) -> None:
        """n sequences of a step in host memory, padded to `size` with rows that write nothing and see one position of nothing."""
        h = self.host
        for name, value in ROWS.items():
            if step is not None:
                h[name][:n] = vars(step)[name].numpy()
            h[name][n:size] = spare if value is None else value
        for g, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            if step is not None:
                own = step.of(g)
                slots[:n], table[:n, :own.pages.shape[1]] = own.slots.numpy(), own.pages.numpy()
            slots[n:size], table[n:size, 0] = -1, -1
        h["live"][0] = n
        for g in range(len(self.tables)):
            first = self.pages_at + g * self.tables[0].nbytes if g else 0
            last = self.pages_at + g * self.tables[0].nbytes + size * self.width * 4
            self.there[first:last].copy_(self.here[first:last], non_blocking=True)


class Graphs:
    """A decoder over one cache, captured. `width`: pages of the longest sequence. Capturing takes the decoder's stream and its whole graph pool."""

    def __init__(self, decoder: Decoder, cache: Cache, handoff: Handoff | None, most: int, width: int, slots: SlotMemory | None = None) -> None:
        self.decoder, self.cache, self.handoff, self.slots = decoder, cache, handoff, slots
        device = cache.device
        self.staged = Staged(max(1, most), width, device, len(cache.sizes))
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        began = time.perf_counter()
        for n in sorted(sizes_to(most), reverse=True):           # the largest first: the smaller ones fit into its memory
            self.graphs[n] = self._capture(n)
        self.capture_s = time.perf_counter() - began
        self.replayed = self.eager = 0

    def _forward(self, n: int) -> Tensor:
        logits = self.decoder(self.staged.part(n), self.cache)
        if self.handoff is not None:
            self.handoff.close_step()
        return logits

    def _capture(self, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        h = self.handoff
        self.staged.load(None, 0, n, self.cache.spare)
        if h is not None:
            h.ready(n)
            h.recording, h.live = True, self.staged.live
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
                return self.decoder(step.to(self.cache.device), cache)
        self.staged.load(step.to("cpu") if step.tokens.is_cuda else step, n, size, self.cache.spare)
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
        if self.slots is not None:
            self.slots.turn(size)
        self.replayed += 1
        return logits[:n]

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return self.decoder.diagnose(step.to(self.cache.device), cache)

    def report(self) -> Iterator[tuple[int | None, Row]]:
        yield from self.decoder.report()
        sizes = ", ".join(map(str, sorted(self.graphs)))
        yield None, Row("graphs", str(self.cache.device), f"{len(self.graphs)} CUDA graphs", note=f"batches {sizes}")
