"""From logits to tokens, for every sequence of a step at once, on whatever device the logits are; knows no model and no text.

The order is that of transformers and vLLM: logit bias, penalties, bans and masks; temperature; top-k; top-p over what top-k left; min-p relative to
the best. A token is drawn by inverse CDF over the kept tokens sorted by probability, then id, with one uniform number per token from
`request.uniform`, so the same seed gives the same token on every device. Log-probabilities are the model's own, before all of that.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero.request import Sampling, TokenLogprob, uniform

FLOOR = -1e4                             # of every log-probability that is told
COLD = 1e-5                              # temperatures below are greedy
CANDIDATES = 1024                        # sorted first; the whole vocabulary only when the draw falls outside


class Tally:
    """Which tokens one sequence has seen and how often it has said each, for penalties."""

    def __init__(self, prompt: Row[int]) -> None:
        self.prompt = np.unique(np.asarray(prompt, np.int64))
        self.said: dict[int, int] = {}

    def add(self, token: int) -> None:
        self.said[token] = self.said.get(token, 0) + 1

    def penalize(self, logits: Tensor, sampling: Sampling) -> None:
        """Changes one row, [V] float32, in place."""
        ids = np.fromiter(self.said.keys(), np.int64, len(self.said))
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.union1d(self.prompt, ids)).to(logits.device)
            seen = seen[seen < len(logits)]
            value = logits[seen]
            logits[seen] = torch.where(value > 0, value / sampling.repetition_penalty, value * sampling.repetition_penalty)
        if len(ids) and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = np.fromiter(self.said.values(), np.float32, len(self.said))
            less = torch.from_numpy(sampling.presence_penalty + sampling.frequency_penalty * counts).to(logits.device, logits.dtype)
            logits.index_add_(0, torch.from_numpy(ids).to(logits.device), less, alpha=-1)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits needs to become a token. `at`: tokens generated before; `stream`: which of n; `banned`: ids that may not come yet."""

    sampling: Sampling
    seed: int
    at: int
    stream: int = 0
    tally: Tally | None = None
    banned: tuple[int, ...] = ()
    mask: Row[int] | None = None         # bit mask over the vocabulary, uint32 words

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < COLD or self.sampling.top_k == 1 or self.sampling.top_p == 0.0

    @property
    def plain(self) -> bool:
        """Whether the model's own logits decide, unchanged."""
        return self.tally is None and not self.banned and self.mask is None and not self.sampling.logit_bias


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one row, or why there is none: "finite" (the logits are not) or "mask" (nothing was allowed)."""

    token: int
    logprob: TokenLogprob | None = None
    fault: str | None = None


def choose(logits: Tensor, draws: Row[Draw]) -> list[Choice]:
    """logits [R, V] float32, columns beyond the tokenizer's vocabulary already cut off; one choice per row. The device is waited for once,
    and once more only for draws that fall outside the best CANDIDATES tokens."""
    sound = torch.isfinite(logits.sum(-1))                             # NaN and either infinity all survive a sum
    changed = [i for i, draw in enumerate(draws) if not draw.plain]
    scores = _adjust(logits, draws, changed) if changed else logits
    warm = [i for i, draw in enumerate(draws) if not draw.greedy]
    best = scores.argmax(-1)                                           # the first of equals
    flags = sound
    if changed:
        flags = sound & (scores.gather(-1, best[:, None])[:, 0] > -torch.inf)
    if warm:
        tokens, unsure = _draw(scores[warm] if len(warm) < len(draws) else scores, [draws[i] for i in warm], CANDIDATES)
        best[warm] = tokens
        packed = torch.stack([best, sound.long(), flags.long(), torch.zeros_like(best)])
        packed[3, warm] = unsure.long()
    else:
        packed = torch.stack([best, sound.long(), flags.long()])
    told = packed.tolist()
    if warm and any(told[3]):
        again = [i for i, u in enumerate(told[3]) if u and told[2][i]]
        if again:
            tokens, _ = _draw(scores[again], [draws[i] for i in again], logits.shape[-1])
            for i, token in zip(again, tokens.tolist(), strict=True):
                told[0][i] = token
    faults = ["finite" if not s else None if f else "mask" for s, f in zip(told[1], told[2], strict=True)]
    asked = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and not faults[i]]
    scored = dict(zip(asked, score(logits[asked], [told[0][i] for i in asked], [draws[i].sampling.logprobs or 0 for i in asked]),
                      strict=True)) if asked else {}
    return [Choice(token, scored.get(i), fault) for i, (token, fault) in enumerate(zip(told[0], faults, strict=True))]


def score(logits: Tensor, tokens: Row[int], tops: Row[int]) -> list[TokenLogprob]:
    """Log-probabilities under logits [R, V] of one token per row, and of the `tops[r]` best."""
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - norm)[:, 0].clamp_min(FLOOR).tolist()
    most = min(max(tops, default=0), logits.shape[-1])
    if not most:
        return [TokenLogprob(t, p) for t, p in zip(tokens, chosen, strict=True)]
    ids, values = _best(logits, most)
    listed = list(zip(ids.tolist(), (values - norm).clamp_min(FLOOR).tolist(), strict=True))
    return [TokenLogprob(t, p, tuple(zip(i[:n], v[:n], strict=True))) for t, p, n, (i, v) in zip(tokens, chosen, tops, listed, strict=True)]


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """ids and values [R, k] of the k best, best first, equals by id."""
    if k >= scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return ids, values
    ids = scores.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values


def _adjust(logits: Tensor, draws: Row[Draw], changed: list[int]) -> Tensor:
    """A copy of the logits with each changed row's bias, penalties, bans and mask applied."""
    scores = logits.clone()
    for i in changed:
        draw, row = draws[i], scores[i]
        if draw.sampling.logit_bias:
            ids, values = zip(*draw.sampling.logit_bias, strict=True)
            row.index_add_(0, torch.tensor(ids, device=row.device), torch.tensor(values, dtype=row.dtype, device=row.device))
        if draw.tally is not None:
            draw.tally.penalize(row, draw.sampling)
        if draw.banned:
            row[torch.tensor(draw.banned, device=row.device)] = -torch.inf
        if draw.mask is not None:
            words = np.asarray(draw.mask, np.uint32)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:len(row)].astype(bool)
            row[:len(allowed)].masked_fill_(~torch.from_numpy(allowed).to(row.device), -torch.inf)
            row[len(allowed):] = -torch.inf
    return scores


def _draw(scores: Tensor, draws: list[Draw], most: int) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn from scores [R, V], looking at the `most` best of each row; unsure [R]: the answer may lie beyond them."""
    device, size = scores.device, scores.shape[-1]
    told = torch.tensor([(d.sampling.temperature, d.sampling.top_k if 0 < d.sampling.top_k < size else size, d.sampling.top_p, d.sampling.min_p,
                          uniform(d.seed, d.at, d.stream)) for d in draws], dtype=torch.float64).to(device)
    temperature, top_k, top_p, min_p, u = told.unsqueeze(-1).unbind(1)                        # each [R, 1]
    ids, values = _best(scores, min(most, size))
    peak = values[:, :1]
    total = ((scores - peak) / temperature.float()).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    weight = ((values - peak) / temperature.float()).exp_().double()
    rank = torch.arange(weight.shape[-1], device=device)
    keep = rank < top_k
    cut = weight * keep
    mass = torch.where(top_k < size, cut.sum(-1, keepdim=True), total)                        # what top-k left
    before = cut.cumsum(-1) - cut
    keep = keep & ((before < top_p * mass) | (top_p >= 1.0)) & (weight >= min_p)              # the best has weight 1
    keep[:, 0] = True
    kept = weight * keep
    upto = kept.cumsum(-1)
    inside = ~keep[:, -1:] | (weight[:, -1:] <= 0) | (rank.shape[0] == size)                  # whether the kept set ends within the candidates
    goal = u * torch.where(inside, upto[:, -1:], torch.where(top_p < 1.0, torch.inf, mass))
    place = torch.searchsorted(upto, goal, right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    unsure = ((place > last) & ~inside) | ((top_k < size) & (top_k > rank.shape[0]))
    place = torch.minimum(place, last).clamp_min_(0)                                          # -1 where nothing is finite: a fault, told elsewhere
    edge = values.gather(-1, place) <= values[:, -1:]                                         # equals of the last candidate were picked arbitrarily
    unsure |= edge & (rank.shape[0] < size)
    return ids.gather(-1, place)[:, 0], unsure[:, 0]
