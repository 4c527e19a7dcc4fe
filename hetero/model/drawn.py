"""Routing that is drawn instead of computed, for runs with random weights, whose router says nothing: even, or in the proportions of Zipf's law.

The draws are made beforehand and lie on the device, so that a captured step can take the next ones; knows no expert.
"""

import numpy as np
import torch
from torch import Tensor

from hetero.gpu.ops import Route, Row
from hetero.model.decoder import Decoder
from hetero.model.ffn import Routed

DRAWS, STRIDE = 2048, 137                # per layer; from one token of a step to the next


def drawn(law: str, experts: int, top_k: int, draws: int, seed: int) -> np.ndarray:
    """ids [draws, top_k] int32, without repetition within a draw. law: "uniform", or "zipf:S": an expert's chance falls as rank ** -S, and which
    expert has which rank depends on the seed."""
    random = np.random.default_rng(seed)
    power = 0.0 if law == "uniform" else float(law.removeprefix("zipf:"))
    chance = -power * np.log(random.permutation(experts) + 1.0)
    score = chance + random.gumbel(size=(draws, experts))    # the k best of these are k draws without replacement
    return np.argsort(-score, axis=1)[:, :top_k].astype(np.int32)


class Turn:
    """Which draws a step takes: moved on by the first layer of every step."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.spread = torch.arange(most, device=device) * STRIDE
        self.rows = self.spread

    def next(self, tokens: int) -> None:
        self.at += 1
        self.rows = (self.spread[:tokens] + self.at) % DRAWS


class Drawn:
    def __init__(self, real: Route, turn: Turn, ids: np.ndarray, first: bool, law: str, device: torch.device) -> None:
        self.real, self.turn, self.first, self.law = real, turn, first, law
        self.ids = torch.from_numpy(ids).to(device)
        self.weights = torch.full((len(turn.spread), ids.shape[1]), 1.0 / ids.shape[1], device=device)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.first:
            self.turn.next(len(logits))
        return self.ids.index_select(0, self.turn.rows), self.weights[:len(logits)]

    def row(self) -> Row:
        row = self.real.row()
        return Row(row.part, row.device, "drawn", isa=row.isa, note=f"{self.law}, not the model's router")


def draw_routing(decoder: Decoder, law: str, most: int) -> None:
    """Every routed layer of the decoder takes its experts from draws, from now on of this law; steps of up to `most` tokens."""
    turn, first = Turn(decoder.ops.device, most), True
    for l, block in enumerate(decoder.blocks):
        if isinstance(block.ffn, Routed):
            part = block.ffn.part
            ids, old = drawn(law, part.experts, part.top_k, DRAWS, l), block.ffn.route
            if isinstance(old, Drawn):                       # captured steps read the old place
                old.ids.copy_(torch.from_numpy(ids))
                old.law = law
                continue
            block.ffn.route = Drawn(old, turn, ids, first, law, decoder.ops.device)
            first = False
