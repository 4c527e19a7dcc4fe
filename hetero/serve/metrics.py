"""Numbers for Prometheus: gauges and counters of the engine, histograms of what clients felt; knows no route."""

import re
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetero.request import Output

if TYPE_CHECKING:
    from hetero.serve.seat import Seat

TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
GAUGES = {"running", "waiting", "pages", "pages_held", "pages_cached", "host_pages", "host_pages_used", "worst_gap_s"}


@dataclass
class Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        found, seen = [f"# TYPE {name} histogram"], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            found.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*found, f"{name}_sum {self.total:g}", f"{name}_count {seen}"]


class Meter:
    """What requests felt, over all APIs: time to the first token, and per token after it; how they ended, and why their prompts were not cached."""

    def __init__(self) -> None:
        self.ttft, self.tpot = Histogram(TTFT_S), Histogram(TPOT_S)
        self.left = 0                        # clients that left before their answer was whole
        self.misses: Counter[str] = Counter()

    def begin(self) -> "Felt":
        return Felt(self)


class Felt:
    """One request as it goes."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._began_s, self._first_s, self._last_s, self._tokens = meter, time.monotonic(), 0.0, 0.0, 0

    def take(self, output: Output) -> None:
        if not output.tokens or output.index:
            return
        self._last_s = time.monotonic()
        if not self._tokens:
            self._first_s = self._last_s
            self._meter.ttft.add(self._first_s - self._began_s)
            if output.cache_miss:
                self._meter.misses[output.cache_miss.split("@")[0]] += 1
        self._tokens += len(output.tokens)

    def end(self, left: bool) -> None:
        """left: its client did not wait for the whole."""
        self._meter.left += left
        if self._tokens > 1:
            self._meter.tpot.add((self._last_s - self._first_s) / (self._tokens - 1))


def text(seat: "Seat", meter: Meter) -> str:
    """All of it in Prometheus' text format."""
    relay = seat.loaded.relay if seat.loaded else None
    lines = metric("up", "gauge", int(relay is not None and relay.alive))
    lines += metric("requests_active", "gauge", relay.active if relay else 0)
    lines += metric("clients_left_total", "counter", meter.left)
    stats: dict[str, Any] = relay.stats if relay else {}
    for name, value in stats.items():
        if isinstance(value, (int, float)):
            lines += metric(name if name in GAUGES else f"{name}_total", "gauge" if name in GAUGES else "counter", value)
    if stats.get("pages"):
        lines += metric("kv_usage_ratio", "gauge", stats["pages_held"] / stats["pages"])
    if stats.get("expert_asked"):
        lines += metric("expert_cache_hit_ratio", "gauge", stats["expert_hits"] / stats["expert_asked"])
    if stats.get("prompt_tokens"):
        lines += metric("prefix_cache_hit_ratio", "gauge", stats["cached_tokens"] / stats["prompt_tokens"])
    for name, value in (relay.speeds if relay else {}).items():
        lines += metric(re.sub(r"[^a-z0-9]+", "_", name.lower().replace("/", "_per_")).strip("_"), "gauge", value)
    if meter.misses:
        lines += ["# TYPE hetero_prefix_cache_misses_total counter",
                  *(f'hetero_prefix_cache_misses_total{{reason="{reason}"}} {n}' for reason, n in sorted(meter.misses.items()))]
    return "\n".join([*lines, *meter.ttft.lines("hetero_ttft_seconds"), *meter.tpot.lines("hetero_tpot_seconds")]) + "\n"


def metric(name: str, kind: str, value: float) -> list[str]:
    return [f"# TYPE hetero_{name} {kind}", f"hetero_{name} {value:g}"]
