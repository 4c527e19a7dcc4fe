"""A plan for people and for programs: the printed table and the JSON record; decides nothing."""

from itertools import groupby
from typing import Any

from hetero.memory.cost import Machine, Term
from hetero.memory.plan import Piece, Plan, size


def _layers(numbers: list[int]) -> str:
    """0-2,5 for consecutive layers."""
    runs = [[n for _, n in g] for _, g in groupby(enumerate(sorted(numbers)), key=lambda p: p[1] - p[0])]
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _pieces(plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """Rows of equal pieces joined: layers, kind, device, format, bytes."""
    joined: dict[tuple[str, str, str, int], list[Piece]] = {}
    for p in plan.pieces:
        joined.setdefault((p.kind, p.device, p.format, p.nbytes), []).append(p)
    rows = []
    for (kind, device, form, nbytes), pieces in sorted(joined.items(), key=lambda kv: -kv[0][3] * len(kv[1])):
        numbers = [p.layer for p in pieces if p.layer is not None]
        each = f" ({len(numbers)} x {size(nbytes)})" if len(numbers) > 1 else ""
        rows.append((_layers(numbers) if numbers else "all", kind, device, form, size(nbytes * len(pieces)) + each))
    return rows


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [min(40, max(len(r[i]) for r in rows)) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _terms(terms: tuple[Term, ...]) -> list[str]:
    return _columns([(t.name, f"{t.seconds * 1e3:.2f} ms", t.text) for t in terms])


def _count(n: int) -> str:
    """Parameters as people write them: 30.5B, 35.7M."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"


def text(plan: Plan, machine: Machine) -> str:
    """The plan as lines of text: weights, memory by item against its limit, KV, speed with the formula's terms, and the verdict."""
    total, active, looked_up = (_count(n) for n in (plan.total_params, plan.active_params, plan.active_params_with_embedding))
    lines = [f"{plan.family}: {total} parameters, {active} active per token ({looked_up} with the embedding)",
             f"on {machine.name or 'this machine'}: {machine.cores} cores, {machine.gpu if plan.device != 'cpu' else 'no GPU used'}", "", "weights"]
    lines += _columns([("layers", "kind", "device", "format", "bytes"), *_pieces(plan)])
    for where, items, total_bytes, limit in (("GPU memory", plan.vram, plan.vram_bytes, plan.vram_limit_bytes),
                                             ("system memory", plan.ram, plan.ram_bytes, plan.ram_limit_bytes)):
        if items:
            lines += ["", f"{where}: {size(total_bytes)} of {size(limit)}"]
            lines += _columns([(name, size(nbytes)) for name, nbytes in items.items()])
    pinned = f"; pinned: {size(plan.pinned_bytes)}" if plan.pinned_bytes else ""
    lines += ["", f"peak while loading: {size(plan.peak_load_ram_bytes)} of system memory{pinned}",
              f"KV cache: {plan.kv_tokens} tokens at {size(plan.kv_bytes_per_token)} each ({plan.kv_dtype}); context {plan.ctx}, "
              f"up to {plan.max_batch} sequences",
              *(f"  and of layers that see {g.window} tokens: {g.tokens} tokens at {size(g.token_nbytes)} each" for g in plan.kv[1:]),
              f"expert cache: {plan.cache_slots} slots per layer" if plan.cache_slots else f"expert cache: off ({plan.cache_note})",
              "", f"decode, one sequence, short context: {plan.decode_tok_s:.1f} tok/s", *_terms(plan.decode),
              f"prefill, {plan.chunk} tokens a chunk, experts {'over PCIe' if plan.prefill_by == 'streamed' else 'on the CPU'}: "
              f"{plan.prefill_tok_s:.0f} tok/s", *_terms(plan.prefill)]
    if plan.assumed:
        lines.append(f"not measured, assumed: {', '.join(plan.assumed)}")
    lines += ["", "it fits" if plan.fits else f"it does not fit: {plan.shortfall}", *(f"  - {change}" for change in plan.changes)]
    return "\n".join(lines)


def record(plan: Plan, machine: Machine) -> dict[str, Any]:
    """The plan as JSON-safe data. Sizes in bytes, rates per second."""
    return {
        "family": plan.family, "fits": plan.fits, "shortfall": plan.shortfall, "changes": list(plan.changes),
        "device": plan.device, "vram_bytes": plan.vram_bytes, "ram_bytes": plan.ram_bytes, "vram_limit_bytes": plan.vram_limit_bytes,
        "ram_limit_bytes": plan.ram_limit_bytes, "vram": dict(plan.vram), "ram": dict(plan.ram), "pinned_bytes": plan.pinned_bytes,
        "peak_load_ram_bytes": plan.peak_load_ram_bytes,
        "total_params": plan.total_params, "active_params": plan.active_params, "active_params_with_embedding": plan.active_params_with_embedding,
        "decode_tok_s": plan.decode_tok_s, "prefill_tok_s": plan.prefill_tok_s, "prefill_by": plan.prefill_by,
        "decode_terms": [vars(t) for t in plan.decode], "prefill_terms": [vars(t) for t in plan.prefill],
        "expert_formats": list(plan.expert_formats), "dense_format": plan.dense_format, "kv_dtype": plan.kv_dtype,
        "kv_bytes_per_token": plan.kv_bytes_per_token, "kv_tokens": plan.kv_tokens,
        "kv": [{"window": g.window, "tokens": g.tokens, "bytes_per_token": g.token_nbytes, "bytes": g.nbytes} for g in plan.kv],
        "ctx": plan.ctx, "max_batch": plan.max_batch, "chunk": plan.chunk,
        "expert_cache_slots": plan.cache_slots, "expert_cache_note": plan.cache_note, "machine": vars(machine) | {"assumed": list(machine.assumed)},
        "layers": [{"layer": p.layer, "kind": p.kind, "device": p.device, "format": p.format, "bytes": p.nbytes} for p in plan.pieces],
    }
