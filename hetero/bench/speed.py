"""`hetero bench run`: prefill and decode of a loaded model by prompt length and batch, beside this machine's limits, and where the time went.

Rounds go over all cells in turn. The read ceiling is taken in each round, so that a share compares what was taken together.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from torch import Tensor

from cpu_kernels import ceilings, measure
from hetero.arch.spec import MoE
from hetero.bench.result import Plot, Result, Row, busy_note, machine_facts
from hetero.bench.timer import interval, spread
from hetero.engine.runner import Decoder
from hetero.errors import BadOption, EngineFailed
from hetero.gpu.ops import Step
from hetero.llm import LLM
from hetero.memory.cache import Cache
from hetero.model.replay import Replay
from hetero.request import Request, Sampling

if TYPE_CHECKING:                        # Triton comes only with a torch that has CUDA
    from hetero.engine.graphs import Graphs

PARTS = {"routed": "experts", "prefill": "experts", "linear": "matrices", "attention": "attention", "heads": "attention", "router": "router",
         "small": "norms and sums"}


@dataclass
class Cell:
    """Samples of one prompt length × batch: seconds, one per round unless it says otherwise."""

    prompt: int
    batch: int
    prefill_s: list[float] = field(default_factory=list)         # until the last first token
    ttft_s: list[float] = field(default_factory=list)            # of each request
    step_s: list[float] = field(default_factory=list)            # median decode step of a round
    read_s: list[float] = field(default_factory=list)            # bytes per second that the team reads, in the same round
    peak_s: list[float] = field(default_factory=list)            # operations per second, in the same round
    prefill_parts: dict[str, float] = field(default_factory=dict)
    decode_parts: dict[str, float] = field(default_factory=dict)


class Watched:
    """Stands where a decoder stands and counts the seconds in it; the rest of a step is Python: picking, building, sampling, accepting."""

    def __init__(self, run: Decoder) -> None:
        self.run, self.inside_s = run, 0.0

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        began = time.perf_counter()
        logits = self.run(step, cache)
        self.inside_s += time.perf_counter() - began
        return logits

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return self.run.diagnose(step, cache)


def bench(llm: LLM, prompts: Sequence[int], batches: Sequence[int], tokens: int, rounds: int, tell: Callable[[str], None]) -> Result:
    """Raises BadOption for what does not fit the context or the batch of this model."""
    engine = llm.engine
    for p in prompts:
        if not 0 < p <= engine.context - tokens - 1:
            raise BadOption(f"--prompts {p}: with {tokens} tokens of output it passes the context of {engine.context}",
                            "a larger --ctx, or shorter prompts")
    if max(batches) > llm.plan.max_batch:
        raise BadOption(f"--batches {max(batches)}: this model was loaded for {llm.plan.max_batch}", "--max-batch")
    cells = [Cell(p, b) for p in prompts for b in batches]
    memory = ceilings.aligned(256 << 20)
    memory[:] = 1
    layer = next(iter(llm.layers.values()), None)
    with llm.team.seat():
        for r in range(rounds + 1):
            for i, cell in enumerate(cells if r % 2 else cells[::-1]):
                kept = cell if r else Cell(cell.prompt, cell.batch)          # the first round warms
                run(llm, kept, tokens, 1000 * r + i)
                kept.read_s.append(measure.read_bytes_s(llm.team, memory))
                if layer is not None:
                    kept.peak_s.append(measure.peak_ops_s(layer, llm.team, llm.options.precision))
            tell(f"round {r} of {rounds}")
    return table(llm, cells, tokens, rounds)


def run(llm: LLM, cell: Cell, tokens: int, salt: int) -> None:
    """One round of a cell: `batch` requests at once, prefilled, then decoded together."""
    engine, draw = llm.engine, random.Random(salt)
    sampling = Sampling(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    began, first, waiting, steps = time.perf_counter(), None, set[str](), list[float]()
    with watched(llm) as inside:
        for i in range(cell.batch):
            waiting.add(f"bench{salt}.{i}")
            prompt = tuple(draw.randrange(llm.vocab) for _ in range(cell.prompt))
            engine.add(Request(f"bench{salt}.{i}", prompt, sampling, cache_prompt=False))
        while not engine.idle:
            before = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error:
                    raise EngineFailed(f"a request of the bench failed: {output.error}")
                if output.id in waiting:
                    cell.ttft_s.append(now - began)
                    waiting.discard(output.id)
            if waiting:
                continue
            if first is None:
                first = now
                cell.prefill_s.append(first - began)
                add(cell.prefill_parts, inside(first - began))
            elif len(outputs) == cell.batch:
                steps.append(now - before)
        if steps and first is not None:
            cell.step_s.append(median(steps))
            add(cell.decode_parts, inside(time.perf_counter() - first))


def add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, 0.0) + seconds


@contextmanager
def watched(llm: LLM) -> Iterator[Callable[[float], dict[str, float]]]:
    """inside(wall) gives the seconds by part since it was last asked; what no part claims of the decoder and of the wall has names too."""
    runner = llm.engine.runner
    plain, watch = runner.decoder, Watched(runner.decoder)
    ops = plain.ops if isinstance(plain, Replay) else None
    runner.decoder = watch
    if ops is not None:
        ops.spent = {}

    def inside(wall: float) -> dict[str, float]:
        found, claimed, decoder = dict[str, float](), 0.0, watch.inside_s
        if ops is not None and ops.spent is not None:
            for name, seconds in ops.spent.items():
                part = "waking and embedding" if name == "small.embed" else PARTS.get(name.partition(".")[0], name)
                found[part] = found.get(part, 0.0) + seconds
            ops.spent = {}
        elif (graphs := graphs_of(llm)) is not None and graphs.handoff is not None:
            found["CPU experts"] = graphs.handoff.spent_s
            graphs.handoff.spent_s = 0.0
        claimed, watch.inside_s = sum(found.values()), 0.0
        found["calls" if ops is not None else "GPU, handoff and copies"] = max(0.0, decoder - claimed)
        found["Python"] = max(0.0, wall - decoder)
        return found
    try:
        yield inside
    finally:
        runner.decoder = plain
        if ops is not None:
            ops.spent = None


def graphs_of(llm: LLM) -> "Graphs | None":
    """What replays decode steps on a GPU."""
    if llm.plan.device == "cpu":
        return None
    from hetero.engine.graphs import Graphs

    return llm.placed.run if isinstance(llm.placed.run, Graphs) else None


def bytes_of(llm: LLM, batch: int, length: float) -> dict[str, float]:
    """What one decode step of `batch` sequences at `length` tokens reads from system memory: every dense matrix once, the experts that so many
    independent draws of top-k meet, and the KV cache."""
    rows = [row for _, row in llm.placed.decoder.report() if row.device == "cpu"]
    dense = sum(row.nbytes for row in rows if row.part not in ("experts", "embed"))
    routed = 0.0
    for l in llm.model.moe_layers:
        part = llm.model.layers[l].ffn
        assert isinstance(part, MoE)
        E, k = part.router.experts, part.router.top_k
        routed += llm.bank.stores[l].record_nbytes * E * (1 - (1 - k / E) ** batch)
    kv = batch * sum(group.seen(round(length)) for group in llm.plan.kv) if llm.plan.device == "cpu" else 0.0
    return {"dense": float(dense), "routed": routed, "KV": float(kv)}


def operations(llm: LLM, prompt: int) -> float:
    """Multiply-adds × 2 of a prompt's tokens in matrices; attention over the prompt is left out, the head is for one token."""
    head = llm.model.vocab * llm.model.hidden
    return 2.0 * ((llm.plan.active_params - head) * prompt + head)


def table(llm: LLM, cells: Sequence[Cell], tokens: int, rounds: int) -> Result:
    rows: list[Row] = []
    for c in cells:
        step, low, high = interval(c.step_s) if c.step_s else (float("nan"),) * 3
        sizes = bytes_of(llm, c.batch, c.prompt + tokens / 2)
        bounds = [sum(sizes.values()) / r for r in c.read_s]
        share = median(b / s for b, s in zip(bounds, c.step_s, strict=True)) if c.step_s else None
        work = c.batch * operations(llm, c.prompt)
        rows.append({"prompt": c.prompt, "batch": c.batch, "prefill tok/s": c.batch * c.prompt / median(c.prefill_s),
                     "TTFT ms": 1e3 * median(c.ttft_s),
                     "of peak": median(work / s / p for s, p in zip(c.prefill_s, c.peak_s, strict=True)) if c.peak_s else None,
                     "decode tok/s": c.batch / step, "TPOT ms": 1e3 * step,
                     "TPOT 95 %": f"{1e3 * low:.3g} to {1e3 * high:.3g}" if rounds >= 6 else None,
                     "spread %": round(100 * spread(c.step_s), 1) if len(c.step_s) > 3 else None, "of read bound": share,
                     "read GB/s": median(c.read_s) / 1e9, "MB a step": sum(sizes.values()) / 1e6})
    facts = machine_facts(llm.team.threads) | {"model": llm.name, "team": f"{llm.team.threads} threads on cores {llm.team.cores}",
                                               "device": llm.plan.device, "experts": ", ".join(sorted(set(llm.bank.formats.values()))),
                                               "dense": llm.plan.dense_format, "KV": llm.plan.kv_dtype, "output tokens": tokens, "rounds": rounds,
                                               "load s": round(llm.load_s, 1)}
    for c in cells:
        for what, parts in (("prefill", c.prefill_parts), ("decode", c.decode_parts)):
            if total := sum(parts.values()):
                facts[f"{what} time at prompt {c.prompt}, batch {c.batch}"] = ", ".join(
                    f"{name} {seconds / total:.1%}" for name, seconds in sorted(parts.items(), key=lambda p: -p[1]))
    return Result("run", facts, rows, notes(llm, facts, cells), (Plot("prompt", "prefill tok/s", "batch"), Plot("batch", "decode tok/s", "prompt")))


def notes(llm: LLM, facts: Row, cells: Sequence[Cell]) -> list[str]:
    first = bytes_of(llm, 1, cells[0].prompt)
    sizes = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in first.items())
    told = ["Of read bound: bytes that a decode step reads from system memory (dense matrices, the experts that independent draws meet, KV; at batch "
            f"1 {sizes}) over what the same threads read in the same round, over the step's time. Of peak: products of the prompt's tokens over the "
            "peak of the same products. Spread is half the distance between the quartiles of the rounds."]
    if sum(first.values()) < 64e6:
        told.append("This model's bytes fit a CPU's cache, so that reading memory is no bound: its share may pass 1.")
    return [*told, *busy_note(facts, llm.team.threads)]
