import math

import pytest

from hetero.bench.timer import interleave, ranks, ratio, spread


def test_runs_take_turns_and_the_order_flips_each_round():
    seen = []
    times = interleave({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=3, warmup=0)
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert {k: len(v) for k, v in times.items()} == {"a": 3, "b": 3}


def test_ranks_are_the_binomial_ones():
    # n = 35: P(X <= 11) = 0.0205 < 0.025 < P(X <= 12), so the interval is the 12th and the 24th of 35
    assert ranks(35, 0.95) == (11, 23)
    assert ranks(6, 0.95) == (0, 5)


def test_a_ratio_pairs_neighbours_so_that_drift_cancels():
    b = [1.0 + 0.1 * i for i in range(40)]
    r = ratio([2 * x for x in b], b)
    assert (r.median, r.low, r.high, r.differs) == (2.0, 2.0, 2.0, True)


def test_an_interval_over_one_is_never_called_a_difference():
    r = ratio([1.0, 2.0] * 20, [2.0, 1.0] * 20)
    assert not r.differs
    assert str(r).startswith("no difference seen")


def test_too_few_pairs_prove_nothing():
    r = ratio([2.0] * 5, [1.0] * 5)
    assert (r.low, r.high, r.differs) == (0.0, math.inf, False)


def test_unpaired_samples_are_refused():
    with pytest.raises(ValueError, match="2 and 1"):
        ratio([1.0, 2.0], [1.0])


def test_spread_is_half_the_quartile_distance_over_the_median():
    assert spread([1.0, 1.0, 1.0, 1.0]) == 0.0
    assert spread([0.8, 0.9, 1.0, 1.1, 1.2]) == pytest.approx(0.1)
