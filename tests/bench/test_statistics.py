"""Intervals cover what they say, and equal things are never called a gain."""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.bench.quality import bootstrap
from hetero.bench.timer import gain, interval, ranks, ratio

positive = st.floats(1e-6, 1e6)


@given(st.lists(positive, min_size=35, max_size=80))
def test_equal_samples_are_never_a_gain(samples):
    found = ratio(samples, list(samples))
    assert not found.differs and "no difference seen" in gain(found, "a", "b") and "fast" not in gain(found, "a", "b")


@given(st.lists(positive, min_size=35, max_size=60), st.floats(1.02, 50))
def test_a_constant_factor_is_found_whatever_the_drift(samples, factor):
    found = ratio([factor * s for s in samples], samples)
    assert found.differs and found.median == pytest.approx(factor) and "times as fast" in gain(found, "b", "a")
    assert gain(ratio(samples, [factor * s for s in samples]), "a", "b").startswith("a is slower")


@given(st.lists(positive, min_size=1, max_size=60))
def test_an_interval_encloses_its_median(samples):
    middle, low, high = interval(samples)
    assert low <= middle <= high and (len(samples) < 6) == (low == float("-inf"))


@given(st.integers(6, 400), st.sampled_from([0.8, 0.95, 0.99]))
def test_ranks_lie_symmetrically_and_widen_with_confidence(n, confidence):
    low, high = ranks(n, confidence)
    assert 0 <= low <= high < n and low + high == n - 1 and ranks(n, 0.999)[0] <= low


@pytest.mark.parametrize("draw", [lambda r: r.lognormvariate(0, 0.5), lambda r: r.expovariate(0.6931), lambda r: 1 + (r.random() - 0.5) ** 3])
def test_the_interval_covers_the_known_median_as_often_as_it_says(draw):
    rng = random.Random(5)
    hits = 0
    for _ in range(600):
        _, low, high = interval([draw(rng) for _ in range(35)])
        hits += low <= 1.0 <= high
    assert hits / 600 >= 0.93                            # 95 % by construction; 0.93 is 2.2 standard deviations below


def test_noise_of_two_equal_machines_is_called_a_gain_at_most_once_in_twenty():
    rng, called = random.Random(9), 0
    for _ in range(400):
        drift = [1 + 0.3 * rng.random() for _ in range(35)]
        a, b = ([d * rng.lognormvariate(0, 0.2) for d in drift] for _ in range(2))
        called += ratio(a, b).differs
    assert called / 400 <= 0.07


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=2, max_size=20))
def test_a_bootstrap_interval_lies_within_the_lines(pairs):
    low, high = bootstrap(pairs, draws=200)
    means = [v / n for v, n in pairs]
    assert min(means) - 1e-9 <= low <= high <= max(means) + 1e-9
