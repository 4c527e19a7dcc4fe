"""Pages for tests: one cache tensor per layer, page numbers scattered on purpose, steps cut as a test likes."""
from __future__ import annotations

import pytest
import torch

from hetero.arch import spec
from hetero.gpu.ops import KV, DeltaState, LatentKV, Step

FP8 = torch.float8_e4m3fn


class Paged:
    """S sequences of up to `capacity` tokens each; page p of sequence s is numbered so that neighbours in a sequence are not neighbours in memory."""

    def __init__(self, model: spec.Model, sequences: int = 1, capacity: int = 64, page: int = 16, dtype: torch.dtype = torch.float32) -> None:
        per = -(-capacity // page)
        self.page, count = page, per * sequences + 1
        self.table = (torch.randperm(per * sequences, generator=torch.Generator().manual_seed(0)).reshape(sequences, per) + 1).int()
        self.lengths = [0] * sequences
        self.layers = [layer_pages(layer.attention, count, page, dtype) for layer in model.layers]
        self.states = [layer_states(layer.attention, sequences) for layer in model.layers]

    def layer(self, l: int) -> KV | LatentKV:
        return self.layers[l]

    def state(self, l: int) -> DeltaState:
        return self.states[l]

    def step(self, tokens: dict[int, list[int]], wanted: list[int] | None = None) -> Step:
        """The step that appends tokens[s] to each sequence s; `wanted` rows, all by default."""
        flat, positions, slots, starts, lengths = [], [], [], [0], []
        for s, new in tokens.items():
            at = range(self.lengths[s], self.lengths[s] + len(new))
            flat += new
            positions += at
            slots += [int(self.table[s, p // self.page]) * self.page + p % self.page for p in at]
            starts.append(len(flat))
            self.lengths[s] += len(new)
            lengths.append(self.lengths[s])
        t = torch.tensor
        return Step(t(flat), t(positions, dtype=torch.int32), t(starts, dtype=torch.int32), t(lengths, dtype=torch.int32),
                    self.table[list(tokens)].contiguous(), t(slots), t(list(tokens), dtype=torch.int32),
                    t(list(range(len(flat))) if wanted is None else wanted), max(map(len, tokens.values())))


def layer_states(part: spec.GQA | spec.MLA | spec.GatedDeltaNet, sequences: int) -> DeltaState | None:
    """NaN, so that a state that a new sequence should not have read shows."""
    if not isinstance(part, spec.GatedDeltaNet):
        return None
    return DeltaState(torch.full((sequences, part.channels, part.kernel - 1), torch.nan),
                      torch.full((sequences, part.value_heads, part.key_dim, part.value_dim), torch.nan))


def layer_pages(part: spec.GQA | spec.MLA | spec.GatedDeltaNet, count: int, page: int, dtype: torch.dtype) -> KV | LatentKV | None:
    """NaN where nothing was written, so that a read outside a sequence shows."""
    if isinstance(part, spec.GatedDeltaNet):
        return None
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan).to(dtype)
    if isinstance(part, spec.MLA):
        return LatentKV(empty(count, page, part.kv_rank + part.rope.dim), empty(count, page, dtype=torch.float32) if dtype == FP8 else None)
    shape = (count, part.kv_heads, page)
    scales = [empty(*shape, dtype=torch.float32) if dtype == FP8 else None for _ in range(2)]
    return KV(empty(*shape, part.head_dim), empty(*shape, part.head_dim), *scales)


@pytest.fixture
def paged() -> type[Paged]:
    return Paged
