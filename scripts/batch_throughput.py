#!/usr/bin/env python3
"""Tokens per second of a batch against how many rows decode at once, on the embedded model: a table, and a plot with --plot; knows no file of rows.

    python scripts/batch_throughput.py [--sizes 1,2,4,8,16,32,64] [--tokens 64] [--rounds 3] [--no-reference] [--plot FILE.png] [--json]
                                       [OPTION=VALUE ...]

Each size answers the same number of rows, prompts included, with at most so many at once; "one" is one row after the other. transformers' generate
answers single rows of the same lengths with the same weights. Every round measures all of them one after the other, and a ratio is the median over
rounds, so that a busy machine slows both sides.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hetero.llm import LLM
from hetero.request import Request, Sampling

PROMPT = 32


def prompt(salt: int) -> tuple[int, ...]:
    return tuple(100 + (salt * 7919 + i * i * 31 + i * 17) % 7000 for i in range(PROMPT))


def answer(llm: LLM, rows: int, at_once: int, tokens: int, salt: int) -> float:
    """Tokens per second of `rows` rows with at most `at_once` in the engine."""
    sampling, began, started, live = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True), time.perf_counter(), 0, 0
    while started < rows or live:
        while started < rows and live < at_once:
            llm.engine.add(Request(f"{salt}.{started}", prompt(salt * 1000 + started), sampling, cache_prompt=False))
            started, live = started + 1, live + 1
        for output in llm.engine.step():
            assert output.error is None, output.error
            live -= output.finish is not None
    return rows * tokens / (time.perf_counter() - began)


def reference(tokens: int) -> Callable[[int], float]:
    """transformers' generate in float32 on as many threads as it likes: tokens per second of one row."""
    import os

    import reference
    import torch
    import transformers

    model = reference.model()
    settings = transformers.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def run(salt: int) -> float:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        ids = torch.tensor([prompt(salt)])
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        took = time.perf_counter() - began
        torch.set_num_threads(1)
        return tokens / took
    return run


def measure(llm: LLM, sizes: list[int], tokens: int, rounds: int, other: Callable[[int], float] | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {str(s): [] for s in sizes} | ({"transformers": []} if other else {})
    for size in sizes:
        answer(llm, size, size, 3, 900)
    for r in range(rounds):
        for i, size in enumerate(sizes):
            found[str(size)].append(answer(llm, max(4, 2 * size), size, tokens, 10 * r + i + 1))
        if other:
            found["transformers"].append(other(r))
    return found


def plot(sizes: list[int], rates: list[float], other: float | None, file: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot(sizes, rates, marker="o", label="hetero")
    axes.plot(sizes, [rates[0] * s / sizes[0] for s in sizes], linestyle=":", color="grey", label="if each row were free")
    if other:
        axes.axhline(other, linestyle="--", color="tab:orange", label="transformers, one row")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max(rates) * 1.15)
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.set_xlabel("rows at once")
    axes.set_ylabel("generated tokens per second")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", default="1,2,4,8,16,32,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true", help="without transformers")
    parser.add_argument("--plot", metavar="FILE", help="a PNG (pip install 'hetero-moe[plot]')")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", help="options of LLM as NAME=VALUE")
    args = parser.parse_args()
    sizes = sorted(int(s) for s in args.sizes.split(","))
    values: dict[str, Any] = {"max_batch": str(sizes[-1]), "max_stall_ms": "60000", "ctx": "1024"} | dict(o.split("=", 1) for o in args.options)
    with LLM(None, **values) as llm:
        found = measure(llm, sizes, args.tokens, args.rounds, None if args.no_reference else reference(args.tokens))
    one, rates = found[str(sizes[0])], [statistics.median(found[str(s)]) for s in sizes]
    gains = [statistics.median(b / a for a, b in zip(one, found[str(s)], strict=True)) for s in sizes]
    result: dict[str, Any] = {"sizes": sizes, "tok_s": rates, "over_one": gains}
    if other := found.get("transformers"):
        result |= {"transformers_tok_s": statistics.median(other),
                   "one_over_transformers": statistics.median(a / b for a, b in zip(one, other, strict=True))}
    if args.plot:
        plot(sizes, rates, result.get("transformers_tok_s"), args.plot)
    if args.json:
        print(json.dumps(result))
        return
    print("rows at once       tok/s   over one")
    for size, rate, gain in zip(sizes, rates, gains, strict=True):
        print(f"{size:12} {rate:11,.0f} {gain:10.2f}")
    if other:
        print(f"transformers {result['transformers_tok_s']:11,.0f}   one row here is {result['one_over_transformers']:.2f} times as fast")


if __name__ == "__main__":
    main()
