"""A step of the engine through transformers' own forward: one sequence at a time, each with transformers' own cache; knows no file and no request.

What a sequence keeps is whatever object the model makes for itself. Marks (places to go on from) hold copies of it: layers that only ever
append are shared, all others are copied.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hetero.arch import spec
from hetero.bridge.kept import WORDS
from hetero.bridge.routed import Computed, joined
from hetero.errors import EngineFailed
from hetero.gpu.ops import Row, Step
from hetero.memory.cache import Cache
from hetero.memory.pool import Copy, StateCopy

APPENDING = (DynamicLayer, DynamicSlidingWindowLayer)                 # make new tensors, and leave old ones as they were
MARKS = 2


@dataclass
class Kept:
    """What one sequence keeps: transformers' cache after `tokens` tokens."""

    cache: Any = None
    tokens: int = 0

    def copy(self) -> "Kept":
        cache = self.cache
        layers = vars(cache).get("layers") if cache is not None else None
        if layers is None:
            return Kept(copy.deepcopy(cache), self.tokens)
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) if type(layer) in APPENDING else copy.deepcopy(layer) for layer in layers]
        return Kept(other, self.tokens)


class Conversations(Cache):
    """Pages are only counted; what sequences keep stands in a slot per row of the batch, then a slot per mark."""

    def __init__(self, model: spec.Model, pages: int, page_size: int, kv_dtype: str, device: str, rows: int = 1, marks: int = 0) -> None:
        super().__init__(model, pages, page_size, kv_dtype, device, 0, rows, marks)
        self.kept = [Kept() for _ in range(rows + marks + 1)]
        self.states = {-1: self.kept}                                 # type: ignore[dict-item]

    def copy(self, orders: Iterable[Copy | StateCopy]) -> None:
        for order in orders:
            assert isinstance(order, StateCopy)
            row, mark = order.row, self.rows + order.mark
            if order.keep:
                self.kept[mark] = self.kept[row].copy()
            else:
                self.kept[row] = self.kept[mark].copy()

    def scrub(self, pages: Sequence[Sequence[int]]) -> None:
        """Nothing: no page holds numbers, and a row starts from nothing."""


@dataclass
class Decoder:
    """`module` as the engine drives it. `whole`: prompts in pieces come out as in one (found by `check.check`), else every piece after the first goes
    token by token. `computed` and `linears` tell the report what runs."""

    module: Any
    model: spec.Model
    computed: dict[int, Computed]
    device: torch.device
    dtype: torch.dtype
    linears: list[Row] = field(default_factory=list)
    whole: bool = True

    def __post_init__(self) -> None:
        self.takes = frozenset(inspect.signature(self.module.forward).parameters)
        self.cache_word = next((w for w in WORDS if w in self.takes), "")
        if not self.cache_word:
            raise EngineFailed(f"{type(self.module).__name__}.forward takes no cache", "please report the model's name")

    @torch.no_grad()
    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """Logits [R, V] float32 of the wanted rows."""
        assert isinstance(cache, Conversations)
        starts, rows, wanted = step.starts.tolist(), step.states.tolist(), step.wanted.tolist()
        out = []
        for s, row in enumerate(rows):
            first, last = starts[s], starts[s + 1]
            picked = [w - first for w in wanted if first <= w < last]
            out.append(self.run(step.tokens[first:last], int(step.positions[first]), cache.kept[row], picked))
        return torch.cat(out)

    def run(self, tokens: Tensor, start: int, kept: Kept, wanted: list[int]) -> Tensor:
        """[len(wanted), V]: `tokens` [T] of one sequence from position `start` on; moves `kept` on."""
        if start == 0:
            kept.cache, kept.tokens = None, 0
        assert kept.tokens == start, (kept.tokens, start)
        if start and not self.whole and len(tokens) > 1:
            rows = [self.run(tokens[i:i + 1], start + i, kept, [0]) for i in range(len(tokens))]
            return torch.cat([rows[w] for w in wanted])
        given: dict[str, Any] = {"input_ids": tokens.to(self.device)[None], self.cache_word: kept.cache, "use_cache": True}
        at = torch.arange(start, start + len(tokens), device=self.device)
        given |= {k: v for k, v in (("position_ids", at[None]), ("cache_position", at), ("return_dict", True)) if k in self.takes}
        index = torch.tensor(wanted, device=self.device)
        if "logits_to_keep" in self.takes:
            given["logits_to_keep"] = index
        out = self.module(**given)
        logits = joined(out["logits"])[0]
        kept.cache, kept.tokens = next(out[w] for w in WORDS if w in out), start + len(tokens)
        found: Tensor = (logits if "logits_to_keep" in self.takes else logits[index]).float()
        return found

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return None

    def report(self) -> Iterator[tuple[int | None, Row]]:
        name, code = type(self.module).__name__, type(self.module).__module__.rsplit(".", 1)[-1]
        skip = {id(r) for r in self.linears}
        held = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.device.type != "meta")
        yield None, Row("bridge", str(self.device), f"transformers.{code}.{name}", str(self.dtype).removeprefix("torch."), held,
                        note="everything but routed experts" + (" and matrices" if skip else ""))
        yield from ((None, row) for row in self.linears)
        yield from ((l, c.row()) for l, c in self.computed.items())


def shared_beside(module: Any, at: str) -> list[tuple[str, nn.Module]]:
    """Shared experts beside the routed ones: modules of the same block whose name says so."""
    parent = module.get_submodule(at.rpartition(".")[0])
    return [(n, m) for n, m in parent.named_children() if "shared" in n and "gate" not in n]
