"""Times things against each other: interleaved runs, paired ratios, and an interval that says what is noise; knows nothing of what it times.

Machines are shared and their clocks drift, so a single absolute time means little; the ratio of two runs made one after the other means
more, and the median over many such pairs more still. The interval of that median is the exact binomial one from order statistics
(David & Nagaraja, Order Statistics, 3rd ed., §7.1): no assumption on the distribution.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """Median of a/b over pairs, with a `confidence` interval for that median."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def differs(self) -> bool:
        """The interval leaves out 1: the difference is more than noise."""
        return not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        said = f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] from {self.pairs} pairs"
        return said if self.differs else f"no difference seen: {said}"


def interleave(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every run, `rounds` times each, in turn (the order flips each round, so that drift hits both ends alike)."""
    for _ in range(warmup):
        for run in runs.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name in list(runs) if i % 2 == 0 else list(runs)[::-1]:
            begin = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def ranks(n: int, confidence: float) -> tuple[int, int]:
    """0-based ranks (low, high) of the order statistics that enclose the median of n samples with at least this confidence."""
    tail, k = 0.0, 0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= (1 - confidence) / 2:
        tail += math.comb(n, k) / 2**n
        k += 1
    low = max(k - 1, 0)
    return low, n - 1 - low


def ratio(a: list[float], b: list[float], confidence: float = 0.95) -> Ratio:
    """Of paired samples: a[i] and b[i] were taken one after the other. Fewer than 6 pairs cannot carry 95 % and give (0, inf)."""
    if len(a) != len(b) or not a:
        raise ValueError(f"pairs wanted, {len(a)} and {len(b)} samples given")
    quotients = sorted(x / y for x, y in zip(a, b, strict=True))
    low, high = ranks(len(quotients), confidence)
    enough = 2 * 0.5 ** len(quotients) <= 1 - confidence
    return Ratio(median(quotients), quotients[low] if enough else 0.0, quotients[high] if enough else math.inf, len(quotients))


def spread(samples: list[float]) -> float:
    """The noise of repeats: half the distance between the quartiles, as a share of the median."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)


def interval(samples: list[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(median, low, high) of one list of samples, by the same order statistics."""
    ordered = sorted(samples)
    low, high = ranks(len(ordered), confidence)
    enough = len(ordered) > 0 and 2 * 0.5 ** len(ordered) <= 1 - confidence
    return median(ordered), ordered[low] if enough else -math.inf, ordered[high] if enough else math.inf


def gain(found: Ratio, fast: str, slow: str) -> str:
    """A ratio of times slow/fast in words; never called a gain while its interval covers 1."""
    if not found.differs:
        return f"{fast} against {slow}: {found}"
    said = f"[{found.low:.3f}, {found.high:.3f}] from {found.pairs} pairs"
    if found.median > 1:
        return f"{fast} is {found.median:.3f} times as fast as {slow} {said}"
    return f"{fast} is slower: {found.median:.3f} times as fast as {slow} {said}"
