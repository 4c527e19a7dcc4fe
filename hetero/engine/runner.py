"""Builds the step record from picked work, calls the decoder and returns logits; knows no sampling and no request's meaning.

Step arrays are views of buffers in host memory that live as long as the runner, so building a step allocates nothing of the batch's size: a step's
tensors are valid until the next one is built. Who computes elsewhere sends them there.
"""

from collections.abc import Sequence as Row
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetero.engine.scheduler import Work
from hetero.gpu.ops import Step
from hetero.memory.cache import Cache


class Decoder(Protocol):
    """A model over a cache."""

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """Logits [R, V] float32 of the rows in `step.wanted`; writes the step's KV."""
        ...

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        """Runs the step again, layer by layer: the first layer after which a value is NaN or infinite. None: the head itself, or not known."""
        ...


class Shown:
    """The page table of one group of layers, a line per row of the batch, brought up to date by what was added; and the step's buffers for it."""

    def __init__(self, max_batch: int, width: int, most: int, pin: bool) -> None:
        self.lines = np.full((max_batch, width), -1, np.int32)
        self.of: list[list[int] | None] = [None] * max_batch             # whose pages a line shows, and how many of them and given back
        self.known = [(0, 0)] * max_batch
        self.pages = torch.zeros(max_batch * width, dtype=torch.int32, pin_memory=pin)
        self.slots = torch.zeros(most, dtype=torch.int64, pin_memory=pin)
        self.page_array, self.slot_array = self.pages.numpy(), self.slots.numpy()

    def line(self, row: int, pages: list[int], retired: int) -> np.ndarray:
        """That of a row: only what was added or given back is written, unless the list is another one."""
        line, (known, gone) = self.lines[row], self.known[row]
        if self.of[row] is not pages:
            known = gone = 0
            line[len(pages):] = -1
        if known < len(pages):
            line[known:len(pages)] = pages[known:]
        if gone < retired:
            line[gone:retired] = -1
        self.of[row], self.known[row] = pages, (len(pages), retired)
        return line


class Runner:
    """One decoder over one cache. `vocab`: tokens the tokenizer has; columns of the logits beyond it are padding and cut off."""

    def __init__(self, decoder: Decoder, cache: Cache, vocab: int, max_batch: int, max_tokens: int, max_length: int) -> None:
        self.decoder, self.cache, self.vocab = decoder, cache, vocab
        most, width, pin = max_tokens + max_batch, -(-max_length // cache.page_size) + 1, cache.device.type == "cuda"
        self.shown = [Shown(max_batch, width, most, pin) for _ in cache.sizes]
        self.buffers: dict[str, Tensor] = {}
        sizes = {"tokens": most, "positions": most, "starts": max_batch + 1, "lengths": max_batch, "states": max_batch, "wanted": most}
        for name, size in sizes.items():
            dtype = torch.int64 if name in ("tokens", "wanted") else torch.int32
            self.buffers[name] = torch.zeros(size, dtype=dtype, pin_memory=pin)
        self.arrays = {name: buffer.numpy() for name, buffer in self.buffers.items()}

    def run(self, work: Row[Work]) -> tuple[Step, Tensor]:
        """The step and its logits [R, vocab] float32, in the order of `work`: the last row of each, or all rows where prompts are scored."""
        step = self.build(work)
        return step, self.decoder(step, self.cache)[:, :self.vocab]

    def build(self, work: Row[Work]) -> Step:
        a = self.arrays
        at = rows = longest = 0
        a["starts"][0] = 0
        for s, w in enumerate(work):
            sequence, count = w.sequence, w.count
            start, end = sequence.computed, sequence.computed + count
            if count == 1:
                a["tokens"][at], a["positions"][at] = sequence.tokens[start], start
            else:
                a["tokens"][at:at + count], a["positions"][at:at + count] = sequence.tokens[start:end], np.arange(start, end)
            a["lengths"][s], a["states"][s], a["starts"][s + 1] = end, sequence.row, at + count
            if sequence.scoring:
                a["wanted"][rows:rows + count] = np.arange(at, at + count)
                rows += count
            else:
                a["wanted"][rows] = at + count - 1
                rows += 1
            at, longest = at + count, max(longest, count)
        view, n = self._view, len(work)
        (pages, slots), *others = [self._paged(work, group, at) for group in range(len(self.shown))]
        return Step(view("tokens", at), view("positions", at), view("starts", n + 1), view("lengths", n), pages, slots, view("states", n),
                    view("wanted", rows), longest, work[0].sequence.computed if n == 1 else -1, tuple(others))

    def _view(self, name: str, count: int) -> Tensor:
        return self.buffers[name][:count]

    def _paged(self, work: Row[Work], group: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Page table [S, P] and slots [T] of one group of layers."""
        shown, size, at = self.shown[group], self.cache.page_size, 0
        width = max(len(w.sequence.table.pages[group]) for w in work)
        pages, slots = shown.page_array[:len(work) * width].reshape(len(work), width), shown.slot_array
        for s, w in enumerate(work):
            table, start, count = w.sequence.table, w.sequence.computed, w.count
            line = shown.line(w.sequence.row, table.pages[group], table.retired[group])
            pages[s] = line[:width]
            if count == 1:
                slots[at] = line[start // size] * size + start % size
            else:
                where = np.arange(start, start + count)
                slots[at:at + count] = line[where // size].astype(np.int64) * size + where % size
            at += count
        return shown.pages[:len(work) * width].view(len(work), width), shown.slots[:tokens]
