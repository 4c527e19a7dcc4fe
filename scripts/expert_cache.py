#!/usr/bin/env python3
"""Judges policies of the expert cache on recorded routing: hit rate and experts moved per step, by the share of experts that have a slot.

    python scripts/expert_cache.py record trace.npz                      # the embedded model on its own text, or --model and --text
    python scripts/expert_cache.py judge trace.npz --shares 0.25,0.5     # and of drawn routing: judge uniform, judge zipf:1.1

A trace is ids [steps, layers, k]. Policies: `hetero` as it runs (at most one swap per step for 128 ids asked), `lru` brings in every miss at once,
`fixed` keeps the experts that were used most in the first half, `best` those of the whole trace: what no fixed choice can beat.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hetero.memory.residents import Residents
from hetero.memory.slots import SHARE

STEPS, LAYERS, EXPERTS, TOP_K = 4000, 12, 128, 8         # of drawn traces


def record(model: str | None, texts: list[str], limit: int) -> tuple[np.ndarray, int]:
    """(ids [steps, layers, k], experts): every token of the texts as one step, one text after the other."""
    from hetero.llm import LLM
    from hetero.model.ffn import Routed

    with LLM(model, device="cpu", packed_cache=False) as llm:
        seen: list[list[np.ndarray]] = []
        parts = [b.ffn for b in llm.placed.decoder.blocks if isinstance(b.ffn, Routed)]
        for part in parts:
            asked, real = [], part.route
            seen.append(asked)

            def route(logits, real=real, asked=asked):       # type: ignore[no-untyped-def]
                chosen, weights = real(logits)
                asked.append(chosen.numpy().copy())
                return chosen, weights
            part.route = route
        for text in texts:
            if sum(len(ids) for ids in seen[0]) < limit:
                llm.logits(llm.encode(text)[:llm.plan.ctx])
        return np.stack([np.concatenate(asked) for asked in seen], 1), parts[0].part.experts


def drawn_trace(law: str) -> tuple[np.ndarray, int]:
    from hetero.model.drawn import drawn

    return np.stack([drawn(law, EXPERTS, TOP_K, STEPS, l) for l in range(LAYERS)], 1), EXPERTS


def hetero(trace: np.ndarray, experts: int, slots: int) -> tuple[float, float]:
    steps, layers, k = trace.shape
    r, most = Residents(layers, experts, slots), max(1, layers * k // SHARE)
    for i, ids in enumerate(trace):
        if i == steps // 2:                                  # the first half is for learning
            r.hits = r.asked = r.swapped = 0
        r.saw(ids)
        r.landed(r.swaps(most))
    return r.hit_rate, r.swapped / (steps - steps // 2)


def lru(trace: np.ndarray, experts: int, slots: int) -> tuple[float, float]:
    steps, layers, k = trace.shape
    hits = moved = 0
    for l in range(layers):
        order = list(range(slots))                           # least recent first
        for i in range(steps):
            for e in trace[i, l].tolist():
                hit = e in order
                if hit:
                    order.remove(e)
                else:
                    order.pop(0)
                order.append(e)
                if i >= steps // 2:
                    hits, moved = hits + hit, moved + (not hit)
    return hits / ((steps - steps // 2) * layers * k), moved / (steps - steps // 2)


def chosen(trace: np.ndarray, learned: np.ndarray, experts: int, slots: int) -> tuple[float, float]:
    """The experts used most in `learned`, judged on the second half of the trace."""
    late, hits = trace[len(trace) // 2:], 0
    for l in range(trace.shape[1]):
        top = np.argsort(-np.bincount(learned[:, l].ravel(), minlength=experts), kind="stable")[:slots]
        hits += int(np.isin(late[:, l], top).sum())
    return hits / late.size, 0.0


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("do", choices=("record", "judge"))
    p.add_argument("trace", help="an .npz file; to judge also uniform or zipf:S")
    p.add_argument("--model")
    p.add_argument("--text", type=Path, help="a text file, texts divided by blank lines [the embedded model's own]")
    p.add_argument("--tokens", type=int, default=8000)
    p.add_argument("--shares", type=lambda s: [float(n) for n in s.split(",")], default=[0.125, 0.25, 0.5])
    a = p.parse_args()
    if a.do == "record":
        from hetero.weights.source import EMBEDDED

        lines = [line for name in ("story", "mixed") for line in (EMBEDDED.parent / "eval" / f"{name}.jsonl").read_text().splitlines()]
        texts = a.text.read_text().split("\n\n") if a.text else [json.loads(line)["text"] for line in lines]
        ids, experts = record(a.model, texts, a.tokens)
        np.savez_compressed(a.trace, ids=ids.astype(np.int16), experts=experts)
        print(f"{ids.shape[0]} steps, {ids.shape[1]} layers, top {ids.shape[2]} of {experts}")
        return
    if a.trace.endswith(".npz"):
        with np.load(a.trace) as file:
            trace, experts = file["ids"].astype(np.int32), int(file["experts"])
    else:
        trace, experts = drawn_trace(a.trace)
    print(f"{a.trace}: {trace.shape[0]} steps, {trace.shape[1]} layers, top {trace.shape[2]} of {experts}; hit rate (experts moved per step)")
    for share in a.shares:
        slots = max(1, round(share * experts))
        half = len(trace) // 2
        rows = {"hetero": hetero(trace, experts, slots), "lru": lru(trace, experts, slots), "fixed": chosen(trace, trace[:half], experts, slots),
                "best": chosen(trace, trace[half:], experts, slots)}
        print(f"{slots:4d} slots  " + "  ".join(f"{name} {hit:5.1%} ({moved:.1f})" for name, (hit, moved) in rows.items()), flush=True)


if __name__ == "__main__":
    main()
