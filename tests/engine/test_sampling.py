"""Sampling against a plain twin in float64, and the promises of `request.Sampling`."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.engine.sampling import Draw, Tally, _adjust, choose, pick_at_once, pick_by_row, score
from hetero.request import Sampling, uniform


def twin(logits, draw):
    """One row, one token, by the definition: sort everything, cut, draw."""
    s, x = draw.sampling, logits.astype(np.float64)
    for token, value in s.logit_bias:
        x[token] += value
    if draw.tally is not None:
        for token in {*draw.tally.prompt.tolist(), *draw.tally.said}:
            x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        for token, count in draw.tally.said.items():
            x[token] -= s.presence_penalty + s.frequency_penalty * count
    x[list(draw.banned)] = -np.inf
    if draw.mask is not None:
        x = np.where([(draw.mask[t // 32] >> (t % 32)) & 1 for t in range(len(x))], x, -np.inf)
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if draw.greedy:
        return order[0]
    p = np.exp((x[order] - x[order[0]]) / s.temperature)
    if 0 < s.top_k < len(p):
        p[s.top_k:] = 0
    p /= p.sum()
    before = np.cumsum(p) - p
    keep = (before < s.top_p) if s.top_p < 1 else np.ones(len(p), bool)
    keep &= p >= s.min_p * p[0]
    keep[0] = True
    p = np.where(keep, p, 0)
    goal = uniform(draw.seed, draw.at, draw.stream) * p.sum()
    return order[min(int(np.searchsorted(np.cumsum(p), goal, side="right")), int((p > 0).sum()) - 1)]


settings_ = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 1e-8, 0.3, 1.0, 5.0]), top_k=st.sampled_from([-1, 0, 1, 2, 5, 10**6]), top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]), repetition_penalty=st.sampled_from([1.0, 1.3]), presence_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]), logit_bias=st.sampled_from([(), ((3, 2.0), (7, -100.0))]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(settings_, st.integers(0, 2**64 - 1), st.booleans(), st.booleans()), min_size=1, max_size=6), st.integers(0, 10**6), st.booleans())
def test_every_row_of_a_batch_is_what_the_plain_twin_draws(rows, noise, by_row):
    V = 50
    rng = np.random.default_rng(noise)
    logits = (rng.integers(-40, 40, (len(rows), V)) / 8).astype(np.float32)      # with equals
    draws = []
    for i, (s, seed, masked, early) in enumerate(rows):
        tally = Tally([1, 2, 3])
        for t in (3, 4, 4):
            tally.add(t)
        mask = rng.integers(1, 2**32, 2, np.uint32).tolist() if masked else None
        draws.append(Draw(s, seed, i, i % 3, tally, (0, 9) if early else (), mask))
    scores = _adjust(torch.from_numpy(logits.copy()), draws, list(range(len(draws))))
    got, faults = (pick_by_row if by_row else pick_at_once)(torch.from_numpy(logits.copy()), scores, draws)
    assert faults == [None] * len(draws)
    for i, draw in enumerate(draws):
        want = twin(logits[i].copy(), draw)
        if got[i] != want:                                                 # a draw may fall within rounding of an edge
            close = [twin(logits[i].copy(), Draw(Sampling(**{**vars_of(draw.sampling), "top_p": draw.sampling.top_p + e}), draw.seed, draw.at, draw.stream,
                                                 draw.tally, draw.banned, draw.mask)) for e in (-1e-6, 1e-6)]
            assert got[i] in close


def vars_of(s):
    return {name: getattr(s, name) for name in s.__dataclass_fields__}


def test_the_best_candidates_alone_give_the_same_token_as_the_whole_vocabulary():
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * 2
    for s in (Sampling(), Sampling(top_k=40), Sampling(top_p=0.5), Sampling(temperature=3.0, top_p=0.99), Sampling(top_k=2000), Sampling(min_p=0.2)):
        draws = [Draw(s, seed, 0) for seed in range(8)]
        want = [twin(row, draw) for row, draw in zip(logits.numpy().copy(), draws, strict=True)]
        assert pick_by_row(logits, logits, draws) == pick_at_once(logits, logits, draws) == (want, [None] * 8)


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    got = np.bincount([c.token for c in choose(logits, [Draw(Sampling(temperature=2.0), 5, i) for i in range(4000)])], minlength=4) / 4000
    want = torch.softmax(logits[0] / 2, 0).numpy()
    assert np.abs(got - want).max() < 0.03


def test_a_row_that_is_not_finite_is_told_and_its_neighbours_are_untouched():
    logits = torch.randn(4, 3000)
    want = choose(logits, [Draw(Sampling(), i, 0) for i in range(4)])
    for value in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[1, 17] = value
        assert pick_at_once(broken, broken, [Draw(Sampling(), i, 0) for i in range(4)])[1] == [None, "finite", None, None]
        got = choose(broken, [Draw(Sampling(), i, 0) for i in range(4)])
        assert got[1].fault == "finite" and [got[i] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]
        greedy = choose(broken, [Draw(Sampling(temperature=0), i, 0) for i in range(4)])
        assert [c.fault for c in greedy] == [None, "finite", None, None]


def test_huge_finite_logits_and_tiny_temperatures_give_a_token():
    logits = torch.tensor([[-3e38, 3e38, 0.0, 0.0]])
    for t in (1e-8, 1e-4, 1.0, 1e6):
        assert choose(logits, [Draw(Sampling(temperature=t), 1, 0)])[0] .token == 1


def test_log_probabilities_are_the_models_own_and_never_minus_infinity():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e30]])
    choice = choose(logits, [Draw(Sampling(temperature=0, logprobs=4, logit_bias=((0, 100.0),)), 1, 0)])[0]
    want = torch.log_softmax(logits[0], 0)
    assert choice.token == 0 and choice.logprob.logprob == pytest.approx(float(want[0]))
    assert [t for t, _ in choice.logprob.top] == [2, 1, 0, 3] and choice.logprob.top[3][1] == -1e4
    assert score(logits, [1], [0])[0].top == ()


def test_masks_shorter_than_the_vocabulary_forbid_the_rest():
    logits = torch.zeros(1, 70)
    logits[0, 69] = 5
    assert choose(logits, [Draw(Sampling(temperature=0), 1, 0, mask=[0xFFFFFFFF] * 2)])[0].token == 0
