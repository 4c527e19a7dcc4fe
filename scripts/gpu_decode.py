#!/usr/bin/env python3
"""Decode on a GPU with the routed experts on the CPU, random weights of a published shape: checked first, then timed by batch and context.

    python scripts/gpu_decode.py --shape qwen3-30b-a3b --vram 8 --batches 1,2,4,8 --contexts 128,4096 --json out.json
    python scripts/gpu_decode.py --shape qwen3-30b-a3b --vram 8 --prefill 512,4096,8192
    python scripts/gpu_decode.py --shape qwen3-30b-a3b --vram 12 --cache 0.1,0.25,0.5 --routings uniform,zipf:1.1
    python scripts/gpu_decode.py --shape glm-4.5-air --layers 24 --vram 24 --overlap 40

Terms of a step: the CPU's busy time (flag seen to answer given, summed over layers), the GPU's alone (the same graph with all answers already
given, flags and mailbox included), and the rest. The bound is routed bytes per token over the machine's measured read bandwidth. Results are kept
in the JSON file as they come; cells that it holds are not measured again.
"""
import argparse
import gc
import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_shapes import SHAPES

from cpu_kernels import ceilings, cpu
from cpu_kernels.team import Team
from hetero.arch import families, tensors
from hetero.arch.spec import MoE
from hetero.engine.graphs import Graphs
from hetero.gpu import driver, launch
from hetero.gpu.cuda import Cuda
from hetero.gpu.ops import Step
from hetero.memory import bank as banks
from hetero.memory.cache import Cache
from hetero.memory.slots import SlotMemory
from hetero.memory.stream import Pinned, Ring
from hetero.model.cached import Cached
from hetero.model.drawn import draw_routing
from hetero.model.experts import expert_layer
from hetero.model.handoff import HandedOver, Handoff, jobs_of
from hetero.model.load import load_decoder
from hetero.model.probe import Echo
from hetero.model.step import single
from hetero.model.streamed import Streamed, orders_of, shape_of
from hetero.model.weights import Weights
from hetero.weights.dummy import Dummy

PAGE = 16


def read_ceiling(team: Team) -> float:
    """Bytes per second that the team reads of memory far larger than any cache: the better of the plain and the prefetching reader."""
    memory = np.ones((2 << 30) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64:][:2 << 30]
    return memory.nbytes / min(ceilings.read_s(team, memory, ahead) for ahead in (False, True) for _ in range(4))


class Loaded:
    """Packed experts of a shape in pinned memory, and the team that computes them."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, began = a, time.perf_counter()
        self.model = families.read(dict(SHAPES[a.shape])).first(a.layers or None)
        torch.cuda.set_per_process_memory_fraction(min(1.0, a.vram * 2**30 / torch.cuda.get_device_properties(0).total_memory))
        torch.zeros(1, device="cuda")                                     # memory is registered with a context
        torch.set_num_threads(1)
        cores = sorted(cpu.read().allowed)
        self.team = Team(cores[:a.threads or max(1, len(cores) - 1)])
        self.weights = Dummy(self.model)
        self.bank = banks.load(self.weights, a.expert_format, None, self.team.threads)
        self.pinned = Pinned(self.bank.arena, torch.device("cuda")).nbytes
        self.base = int(self.bank.arena.memory.ctypes.data)
        self.layers = [expert_layer(banks.moe(self.model, l), self.bank.stores[l], self.bank.biases[l]) for l in self.model.moe_layers]
        self.packed_s = time.perf_counter() - began


class Bench:
    """A decoder over what was loaded: to decode (`most` sequences, `share` of the experts in slots), or to prefill (`chunks`)."""

    def __init__(self, loaded: Loaded, most: int, context: int, pages: int, share: float = 0.0, routing: str = "model", prefill: bool = False,
                 overlap: bool = True) -> None:
        self.loaded, a, model, self.model = loaded, loaded.a, loaded.model, loaded.model
        self.team, self.bank, self.most, self.context = loaded.team, loaded.bank, most, context
        ops = Cuda(context, "cuda", torch.bfloat16)
        router = banks.moe(model, model.moe_layers[0]).router
        layers = loaded.layers
        self.handoff = Handoff(jobs_of(layers, self.team), len(layers), self.team, model.hidden, router.top_k, most, ops.device, ops.dtype, a.kind)
        index = {l: i for i, l in enumerate(model.moe_layers)}
        self.ring = Ring([order for layer in layers for order in orders_of(layer)], loaded.base, ops.device) if prefill else None
        n = round(share * router.experts)
        self.slots = SlotMemory([layer.store for layer in layers], n, most, router.top_k, loaded.base, ops.device) if n else None
        self.streamed: list[Streamed] = []
        self.checked = routing == "model"                                 # a drawn route draws anew for every run

        def experts(l: int, part: MoE) -> HandedOver | Streamed:
            layer = layers[index[l]]
            cached = None if self.slots is None else Cached(self.slots, index[l], shape_of(part, layer, ops.device))
            small = HandedOver(self.handoff, index[l], layer, cpu.isa(), cached)
            if self.ring is None:
                return small
            self.streamed.append(Streamed(small, part, self.ring, 1))
            return self.streamed[-1]
        self.decoder = load_decoder(ops, model, Weights(tensors.of(model), loaded.weights.dense), experts, a.dense_format, a.dense_format, overlap)
        if routing != "model":
            draw_routing(self.decoder, routing, most)
        self.cache = Cache(model, pages, PAGE, a.kv_dtype, "cuda")
        for stack in self.cache.stacks:
            stack.values.view(torch.uint8).random_(0, 60)                 # small finite numbers in bf16 and in float8
        self.width = -(-context // PAGE)
        self.graphs = Graphs(self.decoder, self.cache, self.handoff, 0 if prefill else most, self.width, self.slots)

    def step(self, batch: int, context: int) -> Step:
        """One token for each of `batch` sequences that hold `context` tokens."""
        each = -(-(context + 64) // PAGE)
        table = torch.full((batch, self.width), -1, dtype=torch.int32)     # as wide as the graphs': attention splits alike
        table[:, :each] = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
        tokens = torch.randint(0, self.model.vocab, (batch,))
        slots = table[:, context // PAGE].long() * PAGE + context % PAGE
        at = torch.full((batch,), context, dtype=torch.int32)
        starts, rows = torch.arange(batch + 1, dtype=torch.int32), torch.arange(batch)
        return Step(*(t.pin_memory() for t in (tokens, at, starts, at + 1, table, slots, torch.zeros_like(at), rows)), 1)

    def check(self, batch: int, context: int) -> dict:
        """The replayed graph against the eager decoder on the same step: same kernels, experts through the mailbox or through staging memory."""
        step = self.step(batch, context)
        replayed = self.graphs(step, self.cache).clone()
        with torch.no_grad():
            eager = self.decoder(step.to("cuda"), self.cache)
        difference = ((replayed - eager).norm() / eager.norm()).item()
        assert torch.isfinite(replayed).all() and difference < (0.1 if self.slots else 5e-3), difference
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
                        "pinned": self.loaded.pinned / self.bank.arena.nbytes}

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

    def chunk_kernels(self, tokens: int) -> list[tuple[str, float, float]]:
        """As `kernels`, of a prefill chunk."""
        step = self.chunk(tokens)
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.decoder(step, self.cache)
            torch.cuda.synchronize()
        n = len(self.model.layers)
        rows = [(e.key[:60], e.count / n, e.device_time_total / n) for e in profile.key_averages()]
        return sorted(rows, key=lambda r: -r[2])[:16]

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
        return sorted(rows, key=lambda r: -r[2])[:12]

    def measure(self, batch: int, context: int, steps: int, warm: int = 3) -> dict:
        checked = self.check(batch, context) if self.checked else {}
        step = self.step(batch, context)
        wall, busy, head, tail = [], [], [], []
        size = next(s for s in sorted(self.graphs.graphs) if s >= batch)
        program = self.handoff.program(size)
        for i in range(steps + warm):
            step.tokens.random_(0, self.model.vocab)
            torch.cuda.synchronize()
            if self.slots is not None and i == warm:
                self.slots.residents.hits = self.slots.residents.asked = self.slots.residents.swapped = 0
            began = time.perf_counter()
            logits = self.graphs(step, self.cache)
            logits.argmax(-1).tolist()
            if i >= warm:
                wall.append((time.perf_counter() - began) * 1e3)
                busy.append((program.times[:, 1] - program.times[:, 0]).sum() / 1e6)
                head.append((program.times[0, 0] - began * 1e9) / 1e3)
                tail.append((time.perf_counter() * 1e9 - program.times[-1, 1]) / 1e3)
        alone = self.gpu_alone(batch)
        layers = len(self.model.moe_layers)
        routed = sum(self.bank.stores[l].record_nbytes * banks.moe(self.model, l).router.top_k for l in self.model.moe_layers)
        gaps = (program.times[1:, 0] - program.times[:-1, 1]) / 1e3        # of the last step
        checked |= {"to_first_flag_us": float(median(head)), "from_last_answer_us": float(median(tail)), "gap_us": float(np.median(gaps))}
        if self.slots is not None:
            r = self.slots.residents
            checked |= {"slots": r.slots, "hit_rate": r.hit_rate, "swaps_per_step": r.swapped / steps, "cache_bytes": self.slots.nbytes}
        return checked | {"step_ms": median(wall), "worst_ms": max(wall), "tok_s": batch * 1e3 / median(wall), "cpu_ms": float(median(busy)),
                          "gpu_ms": alone, "rest_us_per_layer": float(median(wall) - median(busy) - alone) * 1e3 / layers,
                          "gpu_us_per_layer": alone * 1e3 / layers,
                          "cpu_gb_s": float(routed / median(busy)) / 1e6 if batch == 1 else None, "routed_bytes": routed}


def numbers(kind):                      # type: ignore[no-untyped-def]
    return lambda s: [kind(n) for n in s.split(",")]


def arguments() -> argparse.Namespace:
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
    p.add_argument("--batches", type=numbers(int), default=[])
    p.add_argument("--contexts", type=numbers(int), default=[128])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--prefill", type=numbers(int), default=[], help="chunks to measure")
    p.add_argument("--cache", type=numbers(float), default=[], help="shares of the experts to keep on the GPU, by --routings, at batch 1")
    p.add_argument("--routings", type=lambda s: s.split(","), default=["uniform", "zipf:1.1"])
    p.add_argument("--early", type=int, default=launch.FEW, help="tokens up to which kernels are brought onto the card early")
    p.add_argument("--overlap", type=int, default=0, help="pairs of steps with and without the shared expert beside the routed ones")
    p.add_argument("--profile", action="store_true", help="kernels by time, and what each kind of handoff costs")
    p.add_argument("--json", type=Path)
    return p.parse_args()


class Kept:
    """Cells by name in a JSON file; what is there is not measured again."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.cells = json.loads(file.read_text()) if file and file.exists() else {}

    def cell(self, key: str, make) -> dict:      # type: ignore[no-untyped-def]
        if key not in self.cells:
            self.cells[key] = make()
            if self.file:
                self.file.write_text(json.dumps(self.cells, indent=1))
        print(key, {k: round(v, 4) if isinstance(v, float) else v for k, v in self.cells[key].items()}, flush=True)
        return self.cells[key]


def show(rows: list[tuple[str, float, float]]) -> None:
    for name, count, us in rows:
        print(f"  {us:8.2f} us/layer {count:5.2f}/layer  {name}", flush=True)


def decode(loaded: Loaded, a: argparse.Namespace, kept: Kept, tag: str) -> None:
    pages = max(b * (-(-(c + 64) // PAGE)) for b in a.batches for c in a.contexts if b * c <= a.kv_tokens) + 1
    bench = Bench(loaded, max(a.batches), max(a.contexts) + 64, pages)
    for b in a.batches:
        for c in a.contexts:
            if b * c > a.kv_tokens:
                continue

            def make(b: int = b, c: int = c) -> dict:
                ceiling = read_ceiling(loaded.team)
                cell = bench.measure(b, c, a.steps)
                return cell | {"read_gb_s": ceiling / 1e9, "of_bound": cell["tok_s"] / (ceiling / cell["routed_bytes"]) if b == 1 else None}
            kept.cell(f"{tag} {a.kind} {a.dense_format}{'' if a.early == 64 else f' early {a.early}'} batch {b} context {c}", make)
        if a.profile:
            show(bench.kernels(b))
    print(f"captured in {bench.graphs.capture_s:.1f} s")


def prefill(loaded: Loaded, a: argparse.Namespace, kept: Kept, tag: str) -> None:
    most = max(a.prefill)
    bench = Bench(loaded, 1, most + 64, -(-most // PAGE) + 1, prefill=True)
    for tokens in a.prefill:
        kept.cell(f"{tag} prefill {tokens}", lambda tokens=tokens: bench.prefill(tokens))
        if a.profile:
            show(bench.chunk_kernels(tokens))


def cached(loaded: Loaded, a: argparse.Namespace, kept: Kept, tag: str) -> None:
    """Each share beside no cache under the same routing; the speed-up's bound is 1 / (1 - hit rate)."""
    for share in [0.0, *a.cache]:
        keys = {law: f"{tag} cache {share:g} {law}" for law in a.routings}
        if all(key in kept.cells for key in keys.values()):
            continue
        bench = Bench(loaded, 1, 256, 17, share, a.routings[0])
        for law, key in keys.items():
            draw_routing(bench.decoder, law, 1)
            kept.cell(key, lambda bench=bench, share=share: bench.measure(1, 128, 60, 300 if share else 5))
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    for law in a.routings:
        plain = kept.cells[f"{tag} cache 0 {law}"]["step_ms"]
        for share in a.cache:
            cell = kept.cells[f"{tag} cache {share:g} {law}"]
            print(f"{law} {share:.0%}: hit rate {cell['hit_rate']:.0%}, {plain / cell['step_ms']:.2f} times, bound {1 / (1 - cell['hit_rate']):.2f}, "
                  f"{cell['swaps_per_step']:.1f} swaps a step")


def overlapped(loaded: Loaded, a: argparse.Namespace, kept: Kept, tag: str) -> None:
    """Milliseconds that a step without overlap takes longer, of pairs in alternating order: mean and half of its 95 % interval."""
    both = [Bench(loaded, 1, 256, 17, overlap=on) for on in (True, False)]

    def one(bench: Bench) -> float:
        step = bench.step(1, 128)
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.graphs(step, bench.cache).argmax(-1).tolist()
        return (time.perf_counter() - began) * 1e3

    def make() -> dict:
        for bench in both * 3:
            one(bench)
        pairs = []
        for i in range(a.overlap):
            first = one(both[i % 2])
            second = one(both[1 - i % 2])
            pairs.append((first, second) if i % 2 == 0 else (second, first))
        gains = np.array([off - on for on, off in pairs])
        return {"pairs": len(pairs), "on_ms": float(np.median([p[0] for p in pairs])), "off_ms": float(np.median([p[1] for p in pairs])),
                "gain_ms": float(gains.mean()), "gain_95": float(1.96 * gains.std(ddof=1) / len(pairs) ** 0.5)}
    kept.cell(f"{tag} overlap", make)


def main() -> None:
    a = arguments()
    kept, tag = Kept(a.json), f"{a.shape} {a.layers or 'all'}"
    launch.FEW = a.early
    loaded = Loaded(a)
    machine = {"gpu": torch.cuda.get_device_name(0), "isa": cpu.isa(), "threads": loaded.team.threads, "packed_s": loaded.packed_s}
    with loaded.team.seat():
        kept.cell("machine", lambda: machine)
        if a.profile:
            for kind in ("flags", "memops", "callback"):
                echo = Echo(kind, loaded.team, torch.device("cuda"), torch.bfloat16, loaded.model.hidden, 8)
                print(f"handoff by {kind}: {echo.run() * 1e6:.1f} us per layer, echo right in every round")
        for wanted, part in ((a.batches, decode), (a.prefill, prefill), (a.cache, cached), (a.overlap, overlapped)):
            if wanted:
                part(loaded, a, kept, tag)
                gc.collect()
                torch.cuda.empty_cache()
    print(f"peak VRAM {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB of {a.vram:g}")
    loaded.team.close()


if __name__ == "__main__":
    main()
