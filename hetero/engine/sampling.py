"""From logits to tokens, for every sequence of a step at once, on whatever device the logits are; knows no model and no text.

The order is that of transformers and vLLM: logit bias, penalties, bans and masks; temperature; top-k; top-p over what top-k left; min-p relative to
the best. A token is drawn by inverse CDF over the kept tokens sorted by probability, then id, with one uniform number per token from
`request.uniform`, so the same seed gives the same token on every device. Log-probabilities are the model's own, before all of that.
"""

import math
from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero.request import Sampling, TokenLogprob, uniform

FLOOR = -1e4                             # of every log-probability that is told
COLD = 1e-5                              # temperatures below are greedy
REACHES = (1e-1, 1e-2, 1e-3, 1e-5, 0.0)  # a row is sorted only down to that share of its best token's probability which decides the draw


class Tally:
    """Which tokens one sequence has seen and how often it has said each, for penalties."""

    def __init__(self, prompt: Row[int]) -> None:
        self.prompt = np.unique(np.asarray(prompt, np.int64))
        self.inside = frozenset(self.prompt.tolist())
        self.said: dict[int, int] = {}
        self.new: list[int] = []                             # said, and not in the prompt

    def add(self, token: int) -> None:
        if token not in self.said and token not in self.inside:
            self.new.append(token)
        self.said[token] = self.said.get(token, 0) + 1

    def penalize(self, logits: Tensor, sampling: Sampling) -> None:
        """Changes one row, [V] float32, in place."""
        ids = np.fromiter(self.said.keys(), np.int64, len(self.said))
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.concatenate([self.prompt, np.array(self.new, np.int64)])).to(logits.device)
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
    """logits [R, V] float32, columns beyond the tokenizer's vocabulary already cut off; one choice per row. A GPU is waited for once."""
    changed = [i for i, draw in enumerate(draws) if not draw.plain]
    scores = _adjust(logits, draws, changed) if changed else logits
    tokens, faults = (pick_by_row if logits.device.type == "cpu" else pick_at_once)(logits, scores, draws)
    asked = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and not faults[i]]
    if not asked:
        return [Choice(token, None, fault) for token, fault in zip(tokens, faults, strict=True)]
    told = score(logits[asked], [tokens[i] for i in asked], [draws[i].sampling.logprobs or 0 for i in asked])
    scored = dict(zip(asked, told, strict=True))
    return [Choice(token, scored.get(i), fault) for i, (token, fault) in enumerate(zip(tokens, faults, strict=True))]


Picked = tuple[list[int], list[str | None]]


def pick_by_row(logits: Tensor, scores: Tensor, draws: Row[Draw]) -> Picked:
    """Tokens and faults from the model's logits (are they finite?) and the adjusted scores, row by row: for the CPU."""
    sums, rows = logits.sum(-1).tolist(), scores.numpy()                # NaN and either infinity all survive a sum
    tokens = rows.argmax(-1).tolist()                                   # the first of equals
    faults: list[str | None] = [None] * len(draws)
    for i, draw in enumerate(draws):
        if not math.isfinite(sums[i]):
            faults[i] = "finite"
        elif rows[i, tokens[i]] == -np.inf:
            faults[i] = "mask"
        elif not draw.greedy:
            tokens[i] = _draw_row(rows[i], float(rows[i, tokens[i]]), draw)
    return tokens, faults


def _draw_row(row: np.ndarray, peak: float, draw: Draw) -> int:
    """One token from one row of scores [V] whose best is `peak`. What is not among the candidates is read, and weighed only where its sum counts."""
    s, u = draw.sampling, uniform(draw.seed, draw.at, draw.stream)
    top_k = s.top_k if 0 < s.top_k < len(row) else len(row)
    every = top_k == len(row)
    with np.errstate(over="ignore", under="ignore"):
        x = row - np.float32(peak)
        x *= np.float32(1.0 / s.temperature)                            # logarithms of weights, the best one's is 0
        weight = np.exp(x) if every and (s.top_p < 1.0 or s.min_p == 0.0) else None
        total = 0.0 if weight is None else float(weight.sum())
        share = s.top_p if s.top_p < 1.0 else u                         # of the mass: what must be among the candidates
        for reach in REACHES:
            ids = np.flatnonzero(x >= np.float32(math.log(reach))) if reach else np.arange(len(x))
            if len(ids) >= top_k or (every and s.min_p > reach):
                break
            if weight is not None and float(weight[ids].sum()) > share * total * (1 + 1e-5):
                break
        order = _ordered(row[ids], ids)[:top_k]
        w = np.exp(x[order]).astype(np.float64)
    upto = w.cumsum()
    kept, mass = len(order), total if every else upto[-1]
    if s.top_p < 1.0:
        kept = max(1, int(np.searchsorted(upto - w, s.top_p * mass)))
    if s.min_p > 0.0:
        kept = min(kept, max(1, int(np.searchsorted(-w, -s.min_p, side="right"))))
    if s.top_p < 1.0 or s.min_p > 0.0:
        mass = upto[kept - 1]
    place = int(np.searchsorted(upto[:kept], u * mass, side="right"))
    return int(order[min(place, kept - 1, max(0, int(np.count_nonzero(w)) - 1))])


def _ordered(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`ids` by falling value (float32), equals by rising id: one sort of 64-bit keys."""
    bits = (values + np.float32(0.0)).view(np.int32)
    rising = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    return np.sort((~rising << 32) | ids) & 0xFFFFFFFF


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


def pick_at_once(logits: Tensor, scores: Tensor, draws: Row[Draw]) -> Picked:
    """The same as `pick_by_row` without waiting for the device before the end: for a GPU."""
    peak, best = scores.max(-1)
    sound, allowed = torch.isfinite(logits.sum(-1)), peak > -torch.inf
    warm = [i for i, draw in enumerate(draws) if not draw.greedy]
    if warm:
        best[warm] = _draw_batch(scores[warm] if len(warm) < len(draws) else scores, [draws[i] for i in warm])
    told = torch.stack([best, sound, allowed]).tolist()
    return told[0], [None if s and a else "mask" if s else "finite" for s, a in zip(told[1], told[2], strict=True)]


def _draw_batch(scores: Tensor, draws: list[Draw]) -> Tensor:
    """Tokens [R] drawn from scores [R, V]."""
    device, size = scores.device, scores.shape[-1]
    told = torch.tensor([(d.sampling.temperature, d.sampling.top_k if 0 < d.sampling.top_k < size else size, d.sampling.top_p, d.sampling.min_p,
                          uniform(d.seed, d.at, d.stream)) for d in draws], dtype=torch.float64).to(device)
    temperature, top_k, top_p, min_p, u = told.unsqueeze(-1).unbind(1)                        # each [R, 1]
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    weight = ((values - values[:, :1]) / temperature.float()).exp_().double()
    keep = torch.arange(size, device=device) < top_k
    weight = weight * keep
    before = weight.cumsum(-1) - weight
    keep = keep & ((before < top_p * weight.sum(-1, keepdim=True)) | (top_p >= 1.0)) & (weight >= min_p)       # the best has weight 1
    keep[:, 0] = True
    upto = (weight * keep).cumsum(-1)
    place = torch.searchsorted(upto, u * upto[:, -1:], right=True)
    last = ((weight > 0) & keep).sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(place, last).clamp_min_(0))[:, 0]                     # -1 where nothing is finite: a fault
