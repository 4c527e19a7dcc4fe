"""From how many tokens of an expert tile products pay on this machine: measured once per shape, kept in the cache folder; knows no model."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from cpu_kernels import ExpertLayer, Team, cpu, jit


def tune(layers: Iterable[ExpertLayer], team: Team, cache_dir: Path | None) -> str:
    """Sets every layer's `switch` to what is remembered of its shape, measuring what is not; says so in one line, "" where there are no tiles."""
    tiled = [layer for layer in layers if layer.amx]
    if not tiled:
        return ""
    machine = repr((cpu.read().name, cpu.isa(), team.threads, jit.sources_key()))
    file = cache_dir / f"switch-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json" if cache_dir else None
    known = _remembered(file)
    before = len(known)
    for layer in tiled:
        store = layer.store
        shape = f"{store.form} {store.experts}x{store.hidden}x{store.inter}{'' if store.gated else ' ungated'} {layer.act.kind}"
        if shape not in known:
            known[shape] = layer.tune(team)
        layer.switch = known[shape]
    if len(known) > before:
        _remember(file, known)
    low, high = min(layer.switch for layer in tiled), max(layer.switch for layer in tiled)
    how = "measured now" if len(known) > before else "measured before"
    return f"from {low if low == high else f'{low} to {high}'} tokens of an expert, {how}"


def _remembered(file: Path | None) -> dict[str, int]:
    try:
        kept = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    good = isinstance(kept, dict) and all(isinstance(v, int) and 1 <= v <= 4096 for v in kept.values())
    return kept if good else {}


def _remember(file: Path | None, known: dict[str, int]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known))
        fresh.replace(file)
    except OSError:                                      # a read-only cache folder only costs measuring again
        return
