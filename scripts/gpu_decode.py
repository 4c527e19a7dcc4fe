#!/usr/bin/env python3
"""Decode on a GPU with the routed experts on the CPU, random weights of a published shape: checked first, then timed by batch and context.

    python scripts/gpu_decode.py --shape qwen3-30b-a3b --vram 8 --batches 1,2,4,8 --contexts 128,4096 --json out.json
    python scripts/gpu_decode.py --shape qwen3-30b-a3b --vram 8 --prefill 512,4096,8192

Terms of a step: the CPU's busy time (flag seen to answer given, summed over layers), the GPU's alone (the same graph with all answers already
given, flags and mailbox included), and the rest. The bound is routed bytes per token over the machine's measured read bandwidth. Results are kept
in the JSON file as they come; cells that it holds are not measured again.
"""
import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_shapes import SHAPES

from cpu_kernels import cpu
from cpu_kernels.team import Team
from hetero.arch import families, tensors
from hetero.arch.spec import MoE
from hetero.engine.graphs import Graphs
from hetero.gpu import driver
from hetero.gpu.cuda import Cuda
from hetero.gpu.ops import Step
from hetero.memory import bank as banks
from hetero.memory.cache import Cache
from hetero.memory.stream import Ring, register
from hetero.model.experts import expert_layer
from hetero.model.handoff import HandedOver, Handoff, jobs_of
from hetero.model.load import load_decoder
from hetero.model.probe import Echo, prove
from hetero.model.step import single
from hetero.model.streamed import Streamed, orders_of
from hetero.model.weights import Weights
from hetero.weights.dummy import Dummy

PAGE = 16


def read_ceiling(team_threads: int) -> float:
    """Bytes per second that all threads read of memory far larger than any cache: the best of a few passes."""
    from concurrent.futures import ThreadPoolExecutor

    data = [np.ones(128 << 17, np.int64) for _ in range(team_threads)]
    best = 0.0
    with ThreadPoolExecutor(team_threads) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, data))
            best = max(best, team_threads * data[0].nbytes / (time.perf_counter() - began))
    return best


class Bench:
    def __init__(self, a: argparse.Namespace) -> None:
        config = dict(SHAPES[a.shape])
        self.model = families.read(config).first(a.layers) if a.layers else families.read(config)
        model, began = self.model, time.perf_counter()
        torch.cuda.set_per_process_memory_fraction(min(1.0, a.vram * 2**30 / torch.cuda.get_device_properties(0).total_memory))
        torch.cuda.init()
        torch.set_num_threads(1)
        cores = sorted(cpu.read().allowed)
        self.ceiling = read_ceiling(a.threads or max(1, len(cores) - 1))
        self.team = Team(cores[:a.threads or max(1, len(cores) - 1)])
        weights = Dummy(model)
        self.bank = banks.load(weights, a.expert_format, None, self.team.threads)
        self.packed_s = time.perf_counter() - began
        self.most, self.context = max(a.batches), max(*a.contexts, *a.prefill, 0) + 64
        ops = Cuda(self.context, "cuda", torch.bfloat16)
        layers = [expert_layer(banks.moe(model, l), self.bank.stores[l], self.bank.biases[l]) for l in model.moe_layers]
        top_k = banks.moe(model, model.moe_layers[0]).router.top_k
        self.handoff = Handoff(jobs_of(layers, self.team), len(layers), self.team, model.hidden, top_k, self.most, ops.device, ops.dtype, a.kind)
        index = {l: i for i, l in enumerate(model.moe_layers)}
        self.pinned = register(self.bank.arena)[0] if a.prefill else 0
        base = int(self.bank.arena.memory.ctypes.data)
        self.ring = Ring([order for layer in layers for order in orders_of(layer)], base, ops.device) if a.prefill else None
        self.streamed: list[Streamed] = []

        def experts(l: int, part: MoE) -> HandedOver | Streamed:
            small = HandedOver(self.handoff, index[l], layers[index[l]], cpu.isa())
            if self.ring is None:
                return small
            self.streamed.append(Streamed(small, part, self.ring, 1))
            return self.streamed[-1]
        self.decoder = load_decoder(ops, model, Weights(tensors.of(model), weights.dense), experts, a.dense_format, a.dense_format)
        width = -(-self.context // PAGE)
        needs = [b * (-(-(c + 64) // PAGE)) for b in a.batches for c in a.contexts if b * c <= a.kv_tokens]
        pages = max(needs + [-(-t // PAGE) for t in a.prefill]) + 1
        self.cache = Cache(model, pages, PAGE, a.kv_dtype, "cuda")
        for stack in self.cache.stacks:
            stack.values.view(torch.uint8).random_(0, 60)                 # small finite numbers in bf16 and in float8
        self.loaded_s = time.perf_counter() - began
        self.width = width
        self.graphs = Graphs(self.decoder, self.cache, self.handoff, 0 if a.prefill else self.most, width)

    def step(self, batch: int, context: int) -> Step:
        """One token for each of `batch` sequences that hold `context` tokens."""
        each = -(-(context + 64) // PAGE)
        table = torch.full((batch, self.graphs.width), -1, dtype=torch.int32)     # as wide as the graphs': attention splits alike
        table[:, :each] = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
        tokens = torch.randint(0, self.model.vocab, (batch,))
        slots = table[:, context // PAGE].long() * PAGE + context % PAGE
        at = torch.full((batch,), context, dtype=torch.int32)
        starts, rows = torch.arange(batch + 1, dtype=torch.int32), torch.arange(batch)
        return Step(*(t.cuda() for t in (tokens, at, starts, at + 1, table, slots, torch.zeros_like(at), rows)), 1)

    def check(self, batch: int, context: int) -> dict:
        """The replayed graph against the eager decoder on the same step: same kernels, experts through the mailbox or through staging memory."""
        step = self.step(batch, context)
        replayed = self.graphs(step, self.cache).clone()
        with torch.no_grad():
            eager = self.decoder(step, self.cache)
        difference = ((replayed - eager).norm() / eager.norm()).item()
        assert torch.isfinite(replayed).all() and difference < 1e-3, difference
        return {"graph_against_eager": difference, "same_top": (replayed.argmax(-1) == eager.argmax(-1)).float().mean().item()}

    def chunk(self, tokens: int) -> Step:
        """The first `tokens` tokens of one sequence; logits of the last."""
        ids = torch.randint(0, self.model.vocab, (tokens,), generator=torch.Generator().manual_seed(tokens))
        return single(ids, 0, PAGE, torch.tensor([tokens - 1]), "cuda")

    def prefill(self, tokens: int) -> dict:
        """Streamed against the CPU's experts on the same chunk where that is quick, then timed against the measured PCIe bandwidth."""
        step, found = self.chunk(tokens), {}
        with torch.no_grad():
            streamed = self.decoder(step, self.cache).float().log_softmax(-1)
            if tokens <= 512:
                for executor in self.streamed:
                    executor.least = 1 << 30
                began = time.perf_counter()
                by_cpu = self.decoder(step, self.cache).float().log_softmax(-1)
                torch.cuda.synchronize()
                found = {"cpu_ms": (time.perf_counter() - began) * 1e3, "kl": (by_cpu.exp() * (by_cpu - streamed)).sum(-1).mean().item(),
                         "same_top": (by_cpu.argmax(-1) == streamed.argmax(-1)).float().mean().item()}
                for executor in self.streamed:
                    executor.least = 1
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.decoder(step, self.cache)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        nbytes = sum(order.nbytes for order in self.ring.orders)
        pcie = self.pcie()
        return found | {"ms": min(times) * 1e3, "tok_s": tokens / min(times), "pcie_gb_s": pcie / 1e9, "expert_bytes": nbytes,
                        "of_bound": nbytes / pcie / min(times), "groups": len(self.ring.orders), "slot_mb": self.ring.nbytes / 3e6,
                        "pinned": self.pinned / self.bank.arena.nbytes}

    def pcie(self) -> float:
        """Bytes per second from the arena to the ring's slots, nothing else running."""
        slot = self.ring.slots[0]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for order, parts in zip(self.ring.orders[:64], self.ring.parts, strict=False):
            for at, nbytes in parts:
                driver.copy_in(slot.data_ptr() + at, order.address + at, nbytes, self.ring.stream.cuda_stream)
        torch.cuda.synchronize()
        return sum(o.nbytes for o in self.ring.orders[:64]) / (time.perf_counter() - began)

    def gpu_alone(self, batch: int) -> float:
        """Milliseconds of the graph when every answer is already there."""
        graph = self.graphs.graphs[next(s for s in sorted(self.graphs.graphs) if s >= batch)][0]
        self.handoff.flags.release()
        times = []
        for _ in range(12):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
        self.handoff.recover()
        return median(times)

    def kernels(self, batch: int) -> list[tuple[str, float, float]]:
        """(kernel, launches per layer, microseconds per layer) of the graph with every answer there, the most expensive first."""
        graph = self.graphs.graphs[next(s for s in sorted(self.graphs.graphs) if s >= batch)][0]
        self.handoff.flags.release()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
        self.handoff.recover()
        n = 5 * len(self.model.layers)
        rows = [(e.key[:60], e.count / n, e.device_time_total / n) for e in profile.key_averages()]
        return sorted(rows, key=lambda r: -r[2])[:24]

    def measure(self, batch: int, context: int, steps: int) -> dict:
        checked = self.check(batch, context)
        step = self.step(batch, context)
        wall, busy = [], []
        size = next(s for s in sorted(self.graphs.graphs) if s >= batch)
        program = self.handoff.program(size)
        for i in range(steps + 3):
            step = Step(torch.randint(0, self.model.vocab, (batch,), device="cuda"), *list(vars(step).values())[1:])
            torch.cuda.synchronize()
            began = time.perf_counter()
            logits = self.graphs(step, self.cache)
            logits.argmax(-1).tolist()
            if i >= 3:
                wall.append((time.perf_counter() - began) * 1e3)
                busy.append((program.times[:, 1] - program.times[:, 0]).sum() / 1e6)
        alone = self.gpu_alone(batch)
        layers = len(self.model.moe_layers)
        routed = sum(self.bank.stores[l].record_nbytes * banks.moe(self.model, l).router.top_k for l in self.model.moe_layers)
        return checked | {"step_ms": median(wall), "worst_ms": max(wall), "tok_s": batch * 1e3 / median(wall), "cpu_ms": median(busy),
                          "gpu_ms": alone, "rest_us_per_layer": (median(wall) - median(busy) - alone) * 1e3 / layers,
                          "gpu_us_per_layer": alone * 1e3 / layers,
                          "cpu_gb_s": routed / median(busy) / 1e6 if batch == 1 else None, "routed_bytes": routed}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    p.add_argument("--layers", type=int, default=0)
    p.add_argument("--vram", type=float, default=8.0, help="GiB")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--expert-format", default="int4_g32")
    p.add_argument("--dense-format", default="int8")
    p.add_argument("--kv-dtype", default="bf16")
    p.add_argument("--kv-tokens", type=int, default=40000)
    p.add_argument("--kind", default="flags")
    p.add_argument("--batches", type=lambda s: [int(n) for n in s.split(",")], default=[1])
    p.add_argument("--contexts", type=lambda s: [int(n) for n in s.split(",")], default=[128])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--prefill", type=lambda s: [int(n) for n in s.split(",")], default=[], help="chunks to measure instead of decoding")
    p.add_argument("--check-only", action="store_true")
    p.add_argument("--profile", action="store_true", help="kernels of the graph by time, and what each kind of handoff costs")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    kept = json.loads(a.json.read_text()) if a.json and a.json.exists() else {}
    bench = Bench(a)
    with bench.team.seat():
        if a.prefill:
            for tokens in a.prefill:
                key = f"{a.shape} {a.layers or 'all'} prefill {tokens}"
                if key not in kept:
                    kept[key] = bench.prefill(tokens)
                    if a.json:
                        a.json.write_text(json.dumps(kept, indent=1))
                print(key, {k: round(v, 4) for k, v in kept[key].items()})
        elif a.profile:
            for kind in ("flags", "memops", "callback"):
                echo = Echo(kind, bench.team, torch.device("cuda"), torch.bfloat16, bench.model.hidden, 8)
                print(f"handoff by {kind}: {echo.run() * 1e6:.1f} us per layer, echo right in every round")
            print(prove(bench.team, torch.device("cuda"), torch.bfloat16, bench.model.hidden, 8))
            for batch in a.batches:
                print(f"batch {batch}")
                for name, count, us in bench.kernels(batch):
                    print(f"  {us:7.2f} us/layer {count:5.2f}/layer  {name}")
        if a.prefill:
            pass
        elif a.check_only:
            print({f"batch {b}": bench.check(b, a.contexts[0]) for b in a.batches})
        else:
            kept.setdefault("machine", {"gpu": torch.cuda.get_device_name(0), "isa": cpu.isa(), "threads": bench.team.threads})
            for b in a.batches:
                for c in a.contexts:
                    key = f"{a.shape} {a.layers or 'all'} {a.kind} {a.dense_format} batch {b} context {c}"
                    if key in kept or b * c > a.kv_tokens:
                        continue
                    ceiling = bench.ceiling
                    cell = bench.measure(b, c, a.steps)
                    bound = ceiling / cell["routed_bytes"]
                    kept[key] = cell | {"read_gb_s": ceiling / 1e9, "of_bound": cell["tok_s"] / bound if b == 1 else None}
                    if a.json:
                        a.json.write_text(json.dumps(kept, indent=1))
            print(f"{'cell':<60} step ms  tok/s  CPU ms  GPU ms  rest us/layer  of bound")
            for key, cell in kept.items():
                if key != "machine":
                    share = f"{cell['of_bound']:.0%}" if cell["of_bound"] else ""
                    print(f"{key:<60} {cell['step_ms']:7.2f} {cell['tok_s']:6.1f} {cell['cpu_ms']:7.2f} {cell['gpu_ms']:7.2f} "
                          f"{cell['rest_us_per_layer']:14.1f}  {share}")
        print(f"packed in {bench.packed_s:.1f} s, loaded in {bench.loaded_s:.1f} s, captured in {bench.graphs.capture_s:.1f} s; "
              f"peak VRAM {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB of {a.vram:g}")
    bench.team.close()


if __name__ == "__main__":
    main()
