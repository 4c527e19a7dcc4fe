#!/usr/bin/env python3
"""Routed experts of several engines side by side: the same shape, threads and routing, one after the other in each round, ratios with their spread.

    python scripts/peers/install.py llama kt                     # each into its own environment, .peers/NAME
    python scripts/peers/compare.py --threads 1 ours:int4_g32 llama:q4_0 llama:q4_k kt:raw4 [--prefill 128,512,2048] [--json FILE]

Shape of Qwen3-30B-A3B: 128 experts of 2048 x 768, top-8, independent routing. Decode: one token a call, layer after layer, through more memory than
any cache holds. Prefill: one layer. Every contender's output is checked against float64 on the weights as they were drawn. Before each turn the
machine must be quiet; rounds in which it was not are counted. Ratios are medians over rounds with the exact binomial interval.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import peer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetero.bench.result import markdown
from hetero.bench.timer import gain, ratio, spread

HERE = Path(__file__).resolve().parent
FILES = {"ours": "ours.py", "llama": "llama.py", "kt": "kt.py", "hf": "hf.py"}


class Contender:
    """One engine's process."""

    def __init__(self, word: str, threads: int, gib: float, pythons: dict[str, str], loud: bool) -> None:
        self.word = word
        kind, _, method = word.partition(":")
        own = HERE.parents[1] / ".peers" / kind / "bin" / "python"
        python = pythons.get(kind) or (str(own) if own.exists() else sys.executable)
        self.process = subprocess.Popen([python, str(HERE / "peer.py"), str(HERE / FILES[kind]), method, str(threads), str(gib)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if loud else subprocess.DEVNULL)
        self.about: dict = {}
        self.samples: dict[str, list[float]] = {}

    def read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"unable": f"ended with code {self.process.wait()}"}

    def ask(self, **command: object) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "end"}) + "\n")
        self.process.stdin.close()
        self.process.wait(20)

    def error(self) -> float:
        """Relative to float64 on the unquantized weights."""
        x, weights = peer.inputs(3, 7)
        ids = peer.draws(3, 1, np.random.default_rng(5))[0]
        want = peer.reference(ids, x, weights)
        got = np.frombuffer(base64.b64decode(self.ask(do="check")["out"]), np.float32).reshape(want.shape)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def idle_share(seconds: float) -> float:
    """Of all CPUs, now."""
    def read() -> tuple[int, int]:
        words = [int(w) for w in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return words[3] + words[4], sum(words)
    before = read()
    time.sleep(seconds)
    after = read()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def quiet(patience_s: float) -> bool:
    """Waits until the CPUs are idle but for a tenth of one."""
    end = time.monotonic() + patience_s
    while idle_share(0.06) < 1 - 0.1 / len(os.sched_getaffinity(0)) - 0.05:
        if time.monotonic() > end:
            return False
    return True


def one_round(contenders: list[Contender], work: str, command: dict, order: int, patience_s: float) -> bool:
    calm = True
    for contender in contenders if order % 2 == 0 else contenders[::-1]:
        calm &= quiet(patience_s)
        took = contender.ask(**command)["seconds"]
        contender.samples.setdefault(work, []).append(took)
        if contender.word.startswith("ours"):
            for name, value in contender.ask(do="ceiling").items():
                contender.samples.setdefault(f"{work} {name}", []).append(value)
    return calm


def table(contenders: list[Contender], work: str, command: dict, warm: int) -> tuple[list[dict], list[str]]:
    ours = contenders[0]
    rows, said = [], []
    for c in contenders:
        times = c.samples[work][warm:]
        row = {"contender": c.about["name"], "error": c.about["error"], "ms a layer": 1e3 * median(times) / command.get("calls", 1),
               "spread %": round(100 * spread(times), 1)}
        read, peak = (ours.samples[f"{work} {n}"][warm:] for n in ("read", "peak"))
        if command["do"] == "decode":
            speeds = [command["calls"] * peer.TOP_K * c.about["expert_nbytes"] / t for t in times]
            row |= {"GB/s": median(speeds) / 1e9, "of the read ceiling": median(s / r for s, r in zip(speeds, read, strict=True))}
        else:
            ops = command["tokens"] * peer.TOP_K * 6.0 * peer.HIDDEN * peer.INTER
            row |= {"TOPS": ops / median(times) / 1e12, "of our peak": median(ops / t / p for t, p in zip(times, peak, strict=True))}
        if c is not ours:
            found = ratio(times, ours.samples[work][warm:])
            row |= {"time / ours": found.median, "95 %": f"{found.low:.2f} to {found.high:.2f}"}
            said.append(f"{work}: {gain(found, ours.about['name'], c.about['name'])}")
        rows.append(row)
    return rows, said


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("contenders", nargs="+", help="KIND:METHOD, the first one ours; kinds: " + ", ".join(FILES))
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--gib", type=float, default=3.2, help="of experts in each process")
    p.add_argument("--rounds", type=int, default=35)
    p.add_argument("--calls", type=int, default=8, help="layers in one decode measurement")
    p.add_argument("--prefill", default="", help="tokens a layer, such as 128,512,2048")
    p.add_argument("--prefill-rounds", type=int, default=9)
    p.add_argument("--patience", type=float, default=5.0, help="seconds to wait for a quiet machine before each turn")
    p.add_argument("--python", action="append", default=[], metavar="KIND=PATH", help="the interpreter of a kind, in place of .peers/KIND")
    p.add_argument("--loud", action="store_true", help="show what the contenders print")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    load = os.getloadavg()[0]
    contenders: list[Contender] = []
    started = [Contender(word, a.threads, a.gib, dict(w.split("=", 1) for w in a.python), a.loud) for word in a.contenders]
    for each in started:                                 # they load side by side
        each.about = each.read()
        if why := each.about.get("unable"):
            print(f"{each.word} cannot run here: {why}", flush=True)
            continue
        each.about["error"] = each.error()
        contenders.append(each)
    assert contenders and contenders[0].word.startswith("ours"), "the first contender is ours"
    works = [("decode", {"do": "decode", "calls": a.calls}, a.rounds)]
    works += [(f"prefill {t}", {"do": "prefill", "tokens": int(t)}, a.prefill_rounds) for t in a.prefill.split(",") if t]
    found: dict = {"threads": a.threads, "load average before": load, "works": {}}
    print(f"{a.threads} threads each; load average before: {load:.2f}", flush=True)
    for work, command, rounds in works:
        if not rounds:
            continue
        calm = sum(one_round(contenders, work, command, i, a.patience) for i in range(-1, rounds))
        rows, said = table(contenders, work, command, 1)
        print(f"\n## {work}\n\n{markdown(rows)}\n\n" + "\n".join(said) + f"\nquiet before every turn in {calm} of {rounds + 1} rounds", flush=True)
        found["works"][work] = {"rows": rows, "said": said, "quiet rounds": calm, "rounds": rounds + 1}
        if a.json:
            a.json.write_text(json.dumps(found, indent=1))
    for c in contenders:
        c.end()


if __name__ == "__main__":
    main()
