"""Numbers for Prometheus: gauges and counters of the engine, histograms of what clients felt; knows no route."""

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero.serve.relay import Relay

T = TypeVar("T")
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
    """What requests felt: time to the first event with content, and per event after it."""

    def __init__(self) -> None:
        self.ttft, self.tpot = Histogram(TTFT_S), Histogram(TPOT_S)
        self.left = 0                        # clients that left before their answer was whole

    async def watch(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        began, first, n = time.monotonic(), 0.0, 0
        done = False
        try:
            async for e in events:
                n += 1
                if n == 2:                   # the first one only says who speaks
                    first = time.monotonic()
                    self.ttft.add(first - began)
                yield e
            done = True
        finally:
            await events.aclose()
            self.left += not done
            if first and n > 4:
                self.tpot.add((time.monotonic() - first) / (n - 3))

    async def one(self, work: Awaitable[T]) -> T:
        done = False
        try:
            found = await work
            done = True
        finally:
            self.left += not done
        if isinstance(found, dict) and (t := found.get("timings")):
            self.ttft.add(t["ttft_s"])
            if t["decode_tok_s"]:
                self.tpot.add(1 / t["decode_tok_s"])
        return found


def text(relay: Relay, meter: Meter) -> str:
    """All of it in Prometheus' text format."""
    lines = ["# TYPE hetero_up gauge", f"hetero_up {int(relay.alive)}",
             "# TYPE hetero_requests_active gauge", f"hetero_requests_active {relay.active}",
             "# TYPE hetero_clients_left_total counter", f"hetero_clients_left_total {meter.left}"]
    stats: dict[str, Any] = relay.stats
    for name, value in stats.items():
        if isinstance(value, (int, float)):
            gauge = name in GAUGES
            full = f"hetero_{name}" + ("" if gauge else "_total")
            lines += [f"# TYPE {full} {'gauge' if gauge else 'counter'}", f"{full} {value:g}"]
    return "\n".join([*lines, *meter.ttft.lines("hetero_ttft_seconds"), *meter.tpot.lines("hetero_tpot_seconds")]) + "\n"
