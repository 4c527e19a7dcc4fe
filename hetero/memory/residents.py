"""Which experts have a slot on the GPU: a policy over counts of what was asked, a layer at a time; knows no device, no bytes and no clock.

A score is a count that halves every `half_life` steps: least recently and least frequently used leave first. An expert comes in only when its score
is above that of the one it displaces by more than chance explains, so that even routing moves nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

HALF_LIFE, CHANCE = 256, 3.0             # steps; standard deviations
PROMPT_STEPS = 64                        # a prompt counts as much as so many steps of decoding


@dataclass(frozen=True)
class Swap:
    """Expert `into` shall come to a slot of a layer in the place of expert `out`, which has left already."""

    layer: int
    slot: int
    out: int
    into: int


class Residents:
    """`where` [layers, experts] int32: slot of an expert, -1 when it has none or is on its way. Starts with the first experts in the slots."""

    def __init__(self, layers: int, experts: int, slots: int, half_life: float = HALF_LIFE, chance: float = CHANCE) -> None:
        assert 0 < slots <= experts
        self.slots, self.chance, self.growth = slots, chance, 2.0 ** (1.0 / half_life)
        self.where = np.full((layers, experts), -1, np.int32)
        self.where[:, :slots] = np.arange(slots, dtype=np.int32)
        self.coming = np.zeros((layers, experts), bool)
        self.counts = np.zeros((layers, experts))            # in units that grow, which is cheaper than to shrink every count
        self.unit = 1.0
        self.asked = self.hits = self.swapped = 0

    def saw(self, ids: np.ndarray) -> None:
        """ids [layers, n] of one step, -1: nobody. Counts hits by where experts were in that step."""
        layers, experts = self.where.shape
        flat = ids.reshape(layers, -1) + (np.arange(layers, dtype=np.int64) * experts)[:, None]
        counts = np.bincount(flat[ids.reshape(layers, -1) >= 0], minlength=layers * experts).reshape(layers, experts)
        self.asked += int(counts.sum())
        self.hits += int(counts[self.where >= 0].sum())
        self._age(1)
        self.counts += self.unit * counts

    def prompted(self, counts: np.ndarray, tokens: int) -> None:
        """counts [layers, experts]: how often a prompt of so many tokens asked for each."""
        if tokens:
            self.counts += self.unit * counts * (min(tokens, PROMPT_STEPS) / tokens)

    def _age(self, steps: int) -> None:
        self.unit *= self.growth ** steps
        if self.unit > 1e100:
            self.counts /= self.unit
            self.unit = 1.0

    def swaps(self, most: int) -> list[Swap]:
        """Up to `most` swaps, at most one a layer, the most useful first. The leaving experts have left when this returns."""
        score = self.counts / self.unit
        inside = self.where >= 0
        best = np.where(inside | self.coming, -1.0, score).argmax(1)
        worst = np.where(inside, score, np.inf).argmin(1)
        rows = np.arange(len(score))
        up, down = score[rows, best], score[rows, worst]
        down = np.where(inside.any(1), down, 0.0)
        gain = up - down - self.chance * np.sqrt(np.maximum(up + down, 0.0))
        gain[~inside.any(1) | inside[rows, best] | self.coming[rows, best]] = -1.0
        made = []
        for l in np.argsort(-gain, kind="stable")[:most].tolist():
            if gain[l] <= 0:
                break
            swap = Swap(l, int(self.where[l, worst[l]]), int(worst[l]), int(best[l]))
            self.where[l, swap.out], self.coming[l, swap.into] = -1, True
            made.append(swap)
        return made

    def landed(self, swaps: Iterable[Swap]) -> None:
        """Their bytes are there."""
        for swap in swaps:
            self.coming[swap.layer, swap.into] = False
            self.where[swap.layer, swap.into] = swap.slot
            self.swapped += 1

    def __str__(self) -> str:
        layers, experts = self.where.shape
        rate = f"{self.hit_rate:.0%} of {self.asked} found there, {self.swapped} swapped in" if self.asked else "nothing asked yet"
        return f"{self.slots} of {experts} experts in {layers} layers: {rate}"

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0
