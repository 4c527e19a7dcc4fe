"""How far a batch is: a bar on a terminal, a line every 5 s elsewhere, or JSON; knows counts alone."""

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Any

from hetero.errors import BadOption

EVERY_S, RATE_S = 5.0, 30.0
KINDS = ("auto", "bar", "lines", "json", "off")


@dataclass
class Meter:
    """What was done since this process began; `before` rows were finished earlier. `ideal_s`: seconds this machine would need at its ceiling for the
    tokens made, 0 when that is not known."""

    rows: int = 0
    before: int = 0
    good: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    running: int = 0
    ideal_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._past: deque[tuple[float, int, int]] = deque()

    @property
    def done(self) -> int:
        return self.before + self.good + self.bad

    @property
    def took_s(self) -> float:
        return max(1e-9, time.monotonic() - self.began_s)

    def rates(self) -> tuple[float, float]:
        """(prompt, generated) tokens per second over the last half minute."""
        now = time.monotonic()
        self._past.append((now, self.prompt_tokens, self.tokens))
        while now - self._past[0][0] > RATE_S and len(self._past) > 2:
            self._past.popleft()
        then, prompt, tokens = self._past[0] if now - self._past[0][0] > 0.5 else (self.began_s, 0, 0)
        span = max(1e-3, now - then)
        return (self.prompt_tokens - prompt) / span, (self.tokens - tokens) / span

    def record(self) -> dict[str, Any]:
        prompt, generated = self.rates()
        ran = self.good + self.bad
        return {"rows": self.rows, "done": self.done, "failed": self.bad, "running": self.running, "prompt_tok_s": round(prompt, 1),
                "generated_tok_s": round(generated, 1), "eta_s": round((self.rows - self.done) * self.took_s / ran, 1) if ran else None,
                "cache_hits": round(self.cached_tokens / self.prompt_tokens, 3) if self.prompt_tokens else 0.0,
                "of_ceiling": round(self.ideal_s / self.took_s, 3) if self.ideal_s else None, "elapsed_s": round(self.took_s, 1)}

    def text(self) -> str:
        r = self.record()
        parts = [f"{r['done']:,} of {r['rows']:,} rows", f"prompt {r['prompt_tok_s']:,.0f} tok/s", f"generated {r['generated_tok_s']:,.0f} tok/s",
                 f"prefix hits {r['cache_hits']:.0%}"]
        parts += [f"{r['of_ceiling']:.0%} of the ceiling"] if r["of_ceiling"] is not None else []
        parts += [f"{self.bad:,} failed"] if self.bad else []
        return ", ".join(parts) + (f", {clock(r['eta_s'])} left" if r["eta_s"] is not None and r["done"] < r["rows"] else "")


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Progress:
    """Shows a meter on stderr, in one of KINDS ("auto": a bar on a terminal, lines elsewhere)."""

    def __init__(self, meter: Meter, kind: str = "auto", to: IO[str] | None = None) -> None:
        if kind not in KINDS:
            raise BadOption(f"--progress {kind!r} is not known", f"known: {', '.join(KINDS)}")
        self.meter, self.to = meter, to or sys.stderr
        self.kind = ("bar" if self.to.isatty() else "lines") if kind == "auto" else kind
        self._shown_s = time.monotonic()
        self._bar: Any = None

    def tick(self, last: bool = False) -> None:
        """Shows what is due; `last`: whatever the time."""
        now = time.monotonic()
        if self.kind == "off" or (now - self._shown_s < (0.2 if self.kind == "bar" else EVERY_S) and not last):
            return
        self._shown_s = now
        if self.kind == "bar":
            self._draw(last)
        else:
            print(json.dumps(self.meter.record()) if self.kind == "json" else self.meter.text(), file=self.to, flush=True)

    def _draw(self, last: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(BarColumn(24), TextColumn("{task.description}"), console=Console(file=self.to), transient=False, auto_refresh=False)
            self._bar.add_task("", total=self.meter.rows)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self.meter.done, description=self.meter.text(), refresh=True)
        if last:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.to, flush=True)
