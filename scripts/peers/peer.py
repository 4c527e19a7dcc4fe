"""What every contender is: a process with experts of one shape that computes a routed layer when it is told to; knows no engine.

A contender is a file with `make(method, threads, gib) -> Experts`, run as `python peer.py FILE METHOD THREADS GIB` in its own environment. It reads
one JSON command a line and answers with one: {"do": "decode", "calls": 8} or {"do": "prefill", "tokens": 512} -> {"seconds": …},
{"do": "check"} -> the output for known inputs. Experts are drawn alike for all: KINDS different ones, repeated.
"""

import base64
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

HIDDEN, INTER, EXPERTS, TOP_K, KINDS = 2048, 768, 128, 8, 2


class Experts(Protocol):
    """`layers` routed layers of EXPERTS experts each, of `expert_nbytes`; weights that they compute from, packed as the engine packs them."""

    name: str
    layers: int
    expert_nbytes: float

    def prepare(self, tokens: int, calls: int) -> Callable[[list[np.ndarray], np.ndarray, np.ndarray, int], np.ndarray]:
        """A function of (ids [T, k] of each call, x [T, H] float32, weights [T, k] float32, first layer): layer after layer, one call each, the
        output [T, H] float32 of the last. What only has to be done once for so many tokens and calls is done here."""
        ...


def drawn(kind: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate [I, H], up [I, H], down [H, I] float32, rounded to bf16."""
    rng = np.random.default_rng(kind)

    def one(rows: int, cols: int) -> np.ndarray:
        made = (rng.standard_normal((rows, cols), np.float32) * np.float32(cols ** -0.5)).view(np.uint32)
        return (((made + 0x7FFF + ((made >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return one(INTER, HIDDEN), one(INTER, HIDDEN), one(HIDDEN, INTER)


def bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves, for values that are bf16 already."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def inputs(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1000 + seed)
    x = rng.standard_normal((tokens, HIDDEN), np.float32)
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32), np.full((tokens, TOP_K), 1 / TOP_K, np.float32)


def draws(tokens: int, calls: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Independent routing: top_k different experts for each token."""
    return [np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32) for _ in range(calls)]


def reference(ids: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64 on the weights as they were drawn."""
    out = np.zeros(x.shape)
    kinds = [[m.astype(np.float64) for m in drawn(k)] for k in range(KINDS)]
    for t in range(len(x)):
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up, down = kinds[e % KINDS]
            g = gate @ x[t]
            out[t] += w * (down @ (g / (1 + np.exp(-g)) * (up @ x[t])))
    return out


def layers_for(expert_nbytes: float, gib: float) -> int:
    """So many that they fill `gib`, three at least."""
    return max(3, round(gib * 2**30 / (expert_nbytes * EXPERTS)))


def answer(experts: Experts, command: dict, state: dict) -> dict:
    if command["do"] == "check":
        x, weights = inputs(3, 7)
        ids = draws(3, 1, np.random.default_rng(5))
        out = experts.prepare(3, 1)(ids, x, weights, 0)
        return {"out": base64.b64encode(np.ascontiguousarray(out, np.float32).tobytes()).decode()}
    tokens, calls = (1, command["calls"]) if command["do"] == "decode" else (command["tokens"], 1)
    if (tokens, calls) not in state:
        state[tokens, calls] = experts.prepare(tokens, calls), inputs(tokens, 1)
    run, (x, weights) = state[tokens, calls]
    ids = draws(tokens, calls, state["rng"])
    first = state["turn"] = (state["turn"] + calls) % experts.layers
    begin = time.perf_counter()
    run(ids, x, weights, first)
    return {"seconds": time.perf_counter() - begin}


def main() -> None:
    file, method, threads, gib = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    told = os.fdopen(os.dup(1), "w")                     # engines print what they like on stdout: that goes to stderr
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        experts = module.make(method, threads, gib)
    except (ImportError, OSError, ValueError, RuntimeError, AttributeError) as why:
        print(json.dumps({"unable": f"{type(why).__name__}: {why}"}), file=told, flush=True)
        return
    print(json.dumps({"name": experts.name, "layers": experts.layers, "expert_nbytes": experts.expert_nbytes}), file=told, flush=True)
    state: dict = {"rng": np.random.default_rng(11), "turn": 0}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "ceiling":
            print(json.dumps(module.ceiling(experts)), file=told, flush=True)
            continue
        print(json.dumps(answer(experts, command, state)), file=told, flush=True)
    os._exit(0)                                          # engines with threads of their own do not all end


if __name__ == "__main__":
    main()
