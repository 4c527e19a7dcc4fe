"""Proof of execution: what runs where, as told by the parts themselves, beside what was planned and measured; computes and decides nothing."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cpu_kernels.jit import watch_compiles
from hetero.engine.engine import Stats
from hetero.gpu.ops import Check, Row
from hetero.memory.cost import Machine
from hetero.memory.residents import Residents

MiB = 1 << 20


@dataclass(frozen=True)
class Report:
    """A loaded model's account of itself. Sizes in bytes."""

    model: str
    facts: Mapping[str, Any]                       # named one-line facts: machine, plan against measured, how experts were loaded
    rows: tuple[tuple[int | None, Row], ...]       # (layer, row), None for what belongs to no layer
    options: tuple[tuple[str, str, str], ...]      # (name, value, source)
    checks: tuple[Check, ...]
    speeds: Mapping[str, float]

    def text(self, long: bool = False) -> str:
        """For a terminal: equal rows of many layers in one line; `long` adds every option, not only those that were set."""
        lines = [self.model, *(f"  {name}: {value}" for name, value in self.facts.items()), ""]
        table = [("layers", "part", "device", "kernel", "format", "MiB", "isa", "threads", "note")]
        for layers, row in grouped(self.rows):
            threads = f"{row.threads} on {spans(row.cores)}" if row.cores else ""
            mib = f"{row.nbytes / MiB:.1f}" if row.nbytes else ""
            table.append((layers, row.part, row.device, row.kernel, row.format, mib, row.isa, threads, row.note))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
        if self.checks:
            lines += ["", "self-test against the plain twins"]
            lines += [f"  {c.part} {c.kernel} {c.format}: {c.error:.2e} of {c.bound:.0e} {'ok' if c.passed else 'WRONG'}" for c in self.checks]
        if self.speeds:
            lines += ["", *(f"  {name}: {value:.4g}" for name, value in self.speeds.items())]
        shown = [f"  {name} = {value} ({source})" for name, value, source in self.options if long or source != "default"]
        return "\n".join(lines + (["", "options", *shown] if shown else []))

    def record(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"model": self.model, "facts": dict(self.facts), "layers": [{"layer": l, **asdict(row)} for l, row in self.rows],
                "options": [{"name": n, "value": v, "source": s} for n, v, s in self.options],
                "checks": [{**asdict(c), "passed": c.passed} for c in self.checks], "speeds": dict(self.speeds)}


def reached(stats: Stats, machine: Machine, token_bytes: tuple[float, float], residents: Residents | None,
            copied_bytes: int | None) -> dict[str, float]:
    """Speeds since the start, and the ceilings. Both rates are floors: a decode step reads one token's weights at least (`token_bytes`: of routed
    experts, of other weights), and steps with prompts do more than wait for the bytes that they stream (`copied_bytes`; None: no GPU)."""
    found = {"DRAM ceiling GB/s": machine.dram_bytes_s / 1e9}
    if machine.pcie_bytes_s:
        found["PCIe ceiling GB/s"] = machine.pcie_bytes_s / 1e9
    if residents is not None:
        found |= {"expert cache hit ratio": residents.hit_rate, "expert cache asked": residents.asked, "expert cache hits": residents.hits,
                  "expert cache swaps": residents.swapped}
    if stats.decode_s:
        experts, dense = token_bytes
        missed = 1.0 - residents.hit_rate if residents is not None else 1.0
        rate = stats.decode_steps * (experts * missed + dense) / stats.decode_s
        found |= {"decode tok/s": stats.decode_tokens / stats.decode_s, "CPU GB/s": rate / 1e9,
                  "CPU share of DRAM ceiling": rate / machine.dram_bytes_s}
    if copied_bytes is not None and stats.prefill_s:
        rate = copied_bytes / stats.prefill_s
        found |= {"PCIe GB/s": rate / 1e9} | ({"PCIe share of ceiling": rate / machine.pcie_bytes_s} if machine.pcie_bytes_s else {})
    return found


def grouped(rows: Iterable[tuple[int | None, Row]]) -> list[tuple[str, Row]]:
    """Rows that are equal but for their layer as one, its bytes summed: ("0-7", row)."""
    found: dict[Row, list[int | None]] = {}
    for layer, row in rows:
        found.setdefault(row, []).append(layer)
    out = []
    for row, layers in found.items():
        numbers = sorted({l for l in layers if l is not None})
        out.append((spans(numbers) if numbers else "-", Row(**{**asdict(row), "nbytes": row.nbytes * len(layers)})))
    return out


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0-2,5" """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def announce_compiles() -> None:
    """Says on stderr, once, that kernels are being compiled: a first start takes half a minute longer, and silence looks like a hang."""
    told: list[str] = []

    def tell(kernel: str) -> None:
        if not told:
            print("compiling the kernels for this CPU: at the first start only, for about half a minute", file=sys.stderr, flush=True)
        told.append(kernel)
    watch_compiles(tell)
