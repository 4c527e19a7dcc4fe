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


class Runner:
    """One decoder over one cache. `vocab`: tokens the tokenizer has; columns of the logits beyond it are padding and cut off."""

    def __init__(self, decoder: Decoder, cache: Cache, vocab: int, max_batch: int, max_tokens: int, max_length: int) -> None:
        self.decoder, self.cache, self.vocab = decoder, cache, vocab
        most, width, pin = max_tokens + max_batch, -(-max_length // cache.page_size) + 1, cache.device.type == "cuda"
        self.held: list[list[int] | None] = [None] * max_batch           # whose pages a row of `table` shows, and how many of them
        self.shown = [(0, 0)] * max_batch
        self.table = np.full((max_batch, width), -1, np.int32)
        self.buffers: dict[str, Tensor] = {}
        sizes = {"tokens": most, "positions": most, "starts": max_batch + 1, "lengths": max_batch, "pages": max_batch * width, "slots": most,
                 "states": max_batch, "wanted": most}
        for name, size in sizes.items():
            dtype = torch.int64 if name in ("tokens", "slots", "wanted") else torch.int32
            self.buffers[name] = torch.zeros(size, dtype=dtype, pin_memory=pin)
        self.arrays = {name: buffer.numpy() for name, buffer in self.buffers.items()}

    def run(self, work: Row[Work]) -> tuple[Step, Tensor]:
        """The step and its logits [R, vocab] float32, in the order of `work`: the last row of each, or all rows where prompts are scored."""
        step = self.build(work)
        return step, self.decoder(step, self.cache)[:, :self.vocab]

    def build(self, work: Row[Work]) -> Step:
        a, size = self.arrays, self.cache.page_size
        at = rows = longest = 0
        width = max(len(w.sequence.table.pages) for w in work)
        pages = a["pages"][:len(work) * width].reshape(len(work), width)
        a["starts"][0] = 0
        for s, w in enumerate(work):
            sequence, count = w.sequence, w.count
            start, end = sequence.computed, sequence.computed + count
            line = self._show(sequence.row, sequence.table.pages, sequence.table.retired)
            pages[s] = line[:width]
            if count == 1:
                a["tokens"][at], a["positions"][at] = sequence.tokens[start], start
                a["slots"][at] = line[start // size] * size + start % size
            else:
                where = np.arange(start, end)
                a["tokens"][at:at + count], a["positions"][at:at + count] = sequence.tokens[start:end], where
                a["slots"][at:at + count] = line[where // size].astype(np.int64) * size + where % size
            a["lengths"][s], a["states"][s], a["starts"][s + 1] = end, sequence.row, at + count
            if sequence.scoring:
                a["wanted"][rows:rows + count] = np.arange(at, at + count)
                rows += count
            else:
                a["wanted"][rows] = at + count - 1
                rows += 1
            at, longest = at + count, max(longest, count)
        view, n = self._view, len(work)
        return Step(view("tokens", at), view("positions", at), view("starts", n + 1), view("lengths", n),
                    view("pages", n * width).view(n, width), view("slots", at), view("states", n), view("wanted", rows), longest,
                    work[0].sequence.computed if n == 1 else -1)

    def _view(self, name: str, count: int) -> Tensor:
        return self.buffers[name][:count]

    def _show(self, row: int, pages: list[int], retired: int) -> np.ndarray:
        """The row of the page table, brought up to date: only what was added, unless the list is another one or pages were given back."""
        line, (known, gone) = self.table[row], self.shown[row]
        if self.held[row] is not pages or gone != retired:
            known = 0
        if known < len(pages):
            line[known:len(pages)] = pages[known:]
        if self.held[row] is not pages:
            line[len(pages):] = -1
        self.held[row], self.shown[row] = pages, (len(pages), retired)
        return line
