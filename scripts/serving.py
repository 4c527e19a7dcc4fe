#!/usr/bin/env python3
"""Measures the engine as a server meets it, on the embedded model: throughput of 16 requests against one, the second turn of a chat, and the
worst gap between tokens while a long prompt comes in. Prints one table, and JSON with --json; knows no server.

    python scripts/serving.py [--only PART] [--tokens 64] [--rounds 3] [--batch 16] [--json] [OPTION=VALUE ...]

Rounds of one and of many are interleaved, so that a busy machine slows both; the ratio is the median over rounds. The embedded model's context is
1,024 tokens: it runs here with its positions extended to 8,192, which changes its answers and not the work.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hetero.llm import LLM
from hetero.request import Request, Sampling

EMBEDDED = Path(__file__).resolve().parents[1] / "hetero" / "embedded" / "model-int8"
CONTEXT = 8192


@contextmanager
def long_model() -> Iterator[Path]:
    """The embedded model under a longer context."""
    with tempfile.TemporaryDirectory() as folder:
        for file in EMBEDDED.iterdir():
            if file.name == "config.json":
                config = json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}
                (Path(folder) / file.name).write_text(json.dumps(config))
            else:
                (Path(folder) / file.name).symlink_to(file)
        yield Path(folder)


def prompt(length: int, salt: int) -> tuple[int, ...]:
    return tuple(100 + (salt * 7919 + i * i * 31 + i * 17) % 7000 for i in range(length))


def serve(llm: LLM, requests: list[Request]) -> tuple[float, dict[str, list[float]]]:
    """Seconds of decoding after every request's first token, and the times of each request's tokens."""
    times: dict[str, list[float]] = {r.id: [] for r in requests}
    for request in requests:
        llm.engine.add(request)
    while not llm.engine.idle:
        for output in llm.engine.step():
            assert output.error is None, output.error
            times[output.id] += [time.perf_counter()] * len(output.tokens)
    began = max(t[0] for t in times.values())
    return max(t[-1] for t in times.values()) - began, times


def rate(llm: LLM, count: int, tokens: int, salt: int) -> float:
    """Tokens per second of `count` requests decoding together."""
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    took, times = serve(llm, [Request(f"{count}.{salt}.{i}", prompt(32, salt * 100 + i), sampling) for i in range(count)])
    began = max(t[0] for t in times.values())
    return sum(sum(at > began for at in t) for t in times.values()) / took


def throughput(llm: LLM, tokens: int, rounds: int, batch: int) -> dict[str, float]:
    rate(llm, batch, 4, 999), rate(llm, 1, 4, 998)
    pairs = [(rate(llm, 1, tokens, 2 * r), rate(llm, batch, tokens, 2 * r + 1)) for r in range(rounds)]
    return {"one tok/s": statistics.median(a for a, _ in pairs), f"{batch} together tok/s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(b / a for a, b in pairs)}


def second_turn(llm: LLM, rounds: int, length: int = 2000) -> dict[str, float]:
    """Time to the first token of a chat's first turn of `length` tokens, and of its second with 40 more."""
    first, second, cached = [], [], []
    sampling = Sampling(temperature=0.0, max_tokens=32, ignore_eos=True)
    for r in range(rounds):
        turn = prompt(length, 5000 + r)
        for list_ in (first, second):
            request, told = Request(f"turn{r}.{len(second)}.{len(first)}", turn, sampling), []
            llm.engine.add(request)
            began, at = time.perf_counter(), None
            while not llm.engine.idle:
                for output in llm.engine.step():
                    at = at or time.perf_counter()
                    told += output.tokens
            list_.append((at or began) - began)
            turn = (*turn, *told, *prompt(40, 6000 + r))
        cached.append(output.cached_tokens)
    return {"first turn TTFT s": statistics.median(first), "second turn TTFT s": statistics.median(second), "cached tokens": min(cached),
            "ratio": statistics.median(b / a for a, b in zip(first, second, strict=True))}


def stall(llm: LLM, length: int = 4000, neighbours: int = 8) -> dict[str, float]:
    """The worst gap between two tokens of `neighbours` decoding requests while a prompt of `length` tokens comes in, and without it."""
    sampling = Sampling(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    engine, last, gaps, quiet = llm.engine, {}, [], []
    for i in range(neighbours):
        engine.add(Request(f"n{i}", prompt(32, 7000 + i), sampling))

    def step(into: list[float]) -> set[str]:
        ids = set()
        for output in engine.step():
            now = time.perf_counter()
            if output.id in last and output.id[0] == "n":
                into.append(now - last[output.id])
            last[output.id] = now
            ids.add(output.id)
        return ids
    while len(last) < neighbours:
        step([])
    for _ in range(20):
        step(quiet)
    for salt in (0, 1):                          # the first lets the engine learn this machine's pace
        gaps = []
        engine.add(Request(f"long{salt}", prompt(length, 8000 + salt), Sampling(temperature=0.0, max_tokens=1)))
        while f"long{salt}" not in step(gaps):
            pass
    for i in range(neighbours):
        engine.abort(f"n{i}")
    engine.step()
    return {"worst gap ms": max(gaps) * 1e3, "bound ms": engine.limits.max_stall_s * 1e3, "one decode step ms": statistics.median(quiet) * 1e3,
            "median gap ms": statistics.median(gaps) * 1e3, "steps": len(gaps) // neighbours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", choices=["throughput", "second turn", "stall"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", help="options of LLM as NAME=VALUE")
    args = parser.parse_args()
    values: dict[str, Any] = {"ctx": str(CONTEXT), "max_batch": str(args.batch)} | dict(option.split("=", 1) for option in args.options)
    with long_model() as folder, LLM(folder, **values) as llm:
        parts = {"throughput": lambda: throughput(llm, args.tokens, args.rounds, args.batch), "second turn": lambda: second_turn(llm, args.rounds),
                 "stall": lambda: stall(llm)}
        result = {name: part() for name, part in parts.items() if args.only in (None, name)}
    if args.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        print(f"{name:14}" + "   ".join(f"{key} {value:,.2f}" for key, value in row.items()))


if __name__ == "__main__":
    sys.exit(main())
