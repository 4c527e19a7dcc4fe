"""What the kernels reach on this machine, as a share of what it can do at most, taken in the same round. Knows the package's public names only.

Decode: experts rotate through more memory than any cache holds; GB/s of weights, and the share of the read ceiling.
Prefill: whole FFNs, packing of activations included; TOPS, and the share of the peak of products on random data: tiles where the layer uses them,
vectors otherwise. Median of the rounds' shares; `±` is half the distance between their quartiles.
"""
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import ExpertLayer, ExpertStore, Team, ceilings, cpu, plain, tiles
from .formats import expert_nbytes

Row = dict[str, Any]
LEAST_ROUNDS, PIECE_NBYTES = 3, 64 << 20
SMALL = 8                                            # tokens per expert up to which a row is decode


@dataclass(frozen=True)
class Task:
    """One table of rows: an expert's shape, formats by instruction sets by tokens per expert. `rounds` are cut short after `budget_s` of a row."""
    hidden: int = 2048
    inter: int = 768
    top_k: int = 8
    gated: bool = True
    formats: tuple[str, ...] = ("int4_g32", "int8_g32", "bf16")
    isas: tuple[str, ...] = ()                       # none: the strongest one here
    tokens: tuple[int, ...] = (1, 2, 4, 8, 32, 64, 128, 256, 1024)
    gib: float = 3.5
    rounds: int = 15
    budget_s: float = 60.0


def fill(store: ExpertStore) -> None:
    """Random weights: one quantized expert, its bytes in every record (what is read does not depend on what it holds)."""
    rng = np.random.default_rng(0)
    H, I = store.hidden, store.inter
    gate, up, down = (rng.standard_normal(shape).astype(np.float32) * np.float32(shape[1] ** -0.5) for shape in ((I, H), (I, H), (H, I)))
    store.put(0, gate if store.gated else None, up, down)
    records = store.buffer.reshape(store.experts, -1)
    records[1:] = records[0]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    ordered = sorted(samples)
    q = len(ordered) // 4
    return statistics.median(ordered), (ordered[-1 - q] - ordered[q]) / 2


def rounds(task: Task) -> Iterator[int]:
    """One to warm up, then as many as the task wants and its budget allows."""
    begin = time.perf_counter()
    for i in range(task.rounds + 1):
        yield i
        if i >= LEAST_ROUNDS and time.perf_counter() - begin > task.budget_s:
            return


def read_bytes_s(team: Team, memory: np.ndarray[Any, Any]) -> float:
    """The better of the plain and the prefetching reader over whole MiB of memory (uint8, 64 B aligned)."""
    whole = memory.nbytes // ceilings.CHUNK_NBYTES * ceilings.CHUNK_NBYTES
    return max(whole / ceilings.read_s(team, memory, ahead) for ahead in (False, True))


def somewhere(store: ExpertStore, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """64 MiB of the store's memory that were not read for a while."""
    at = int(rng.integers(0, max(1, store.buffer.nbytes - PIECE_NBYTES))) // 64 * 64
    return store.buffer[at:at + PIECE_NBYTES]


def decode(layer: ExpertLayer, team: Team, tokens: int, task: Task) -> Row:
    """`tokens` tokens that share top_k experts, other experts each time."""
    store, top_k = layer.store, task.top_k
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, store.hidden)).astype(np.float32)
    weights, out = np.full((tokens, top_k), 1 / top_k, np.float32), np.empty_like(x)
    order, at, nbytes = rng.permutation(store.experts).astype(np.int32), 0, top_k * store.record_nbytes
    calls = max(1, PIECE_NBYTES // nbytes)
    speeds, shares = [], []
    for _ in rounds(task):
        begin = time.perf_counter()
        for _ in range(calls):
            ids = np.ascontiguousarray(np.broadcast_to(order[np.arange(at, at + top_k) % store.experts], (tokens, top_k)))
            at += top_k
            layer.run(x, ids, weights, out, team)
        speeds.append(calls * nbytes / (time.perf_counter() - begin))
        shares.append(speeds[-1] / read_bytes_s(team, somewhere(store, rng)))
    share, noise = quartiles(shares[1:])
    speeds = [s / 1e9 for s in speeds[1:]]
    return {"what": "decode", "tokens": tokens, "GB/s": statistics.median(speeds), "best": max(speeds), "share": share, "±": noise,
            "rounds": len(speeds)}


def prefill(layer: ExpertLayer, team: Team, per_expert: int, precision: str, task: Task) -> Row:
    """Every token to one expert; enough experts that each thread has several."""
    store = layer.store
    experts = min(store.experts, max(2 * team.threads, 4, -(-1024 // per_expert)))
    rng = np.random.default_rng(2)
    T = per_expert * experts
    x = rng.standard_normal((T, store.hidden)).astype(np.float32)
    ids = (np.arange(T, dtype=np.int32) % experts)[:, None].copy()
    weights, out = np.ones((T, 1), np.float32), np.empty_like(x)
    ops = 2.0 * T * store.hidden * store.inter * (2 + store.gated)
    speeds, shares = [], []
    for _ in rounds(task):
        begin = time.perf_counter()
        layer.run(x, ids, weights, out, team, precision)
        speeds.append(ops / (time.perf_counter() - begin))
        shares.append(speeds[-1] / peak_ops_s(layer, team, precision))
    share, noise = quartiles(shares[1:])
    speeds = [s / 1e12 for s in speeds[1:]]
    return {"what": f"prefill {precision}", "tokens": per_expert, "TOPS": statistics.median(speeds), "best": max(speeds), "share": share, "±": noise,
            "rounds": len(speeds)}


def peak_ops_s(layer: ExpertLayer, team: Team, precision: str) -> float:
    """Of the products that the layer uses for many tokens."""
    if layer.amx:
        return ceilings.tile_ops_s(team, precision != "fast" or not layer.rounds, 50_000)
    return ceilings.vector_ops_s(team, layer.body, layer.store.format.partner == "int8", 100_000)


def error(layer: ExpertLayer, team: Team, tokens: int, precision: str) -> float:
    """Relative error of the whole FFN against float64 on the dequantized weights and the unrounded activations."""
    store = layer.store
    x = np.random.default_rng(3).standard_normal((tokens, store.hidden)).astype(np.float32)
    ids, weights, out = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32), np.empty_like(x)
    layer.run(x, ids, weights, out, team, precision)
    w = [store.dequantize(0, n) for n in ("gate", "up", "down") if n != "gate" or store.gated]
    parts = (w[0], w[1], w[2]) if store.gated else (None, w[0], w[1])
    act = (layer.act.kind, layer.act.alpha, layer.act.limit, layer.act.up_shift)
    ref = plain.moe(store.form, x, ids, weights, lambda _: parts, act, None, "output", rounded=False)
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def machine(team: Team) -> Row:
    """The machine's ceilings: GB/s read and TOPS of products, all threads of the team."""
    memory = ceilings.aligned(256 << 20)
    memory[:] = 1
    found: Row = {"cpu": cpu.read().name, "isa": cpu.isa(), "threads": team.threads,
                  "read GB/s": round(max(read_bytes_s(team, memory) for _ in range(5)) / 1e9, 2)}
    found |= {f"{kind} vectors TOPS": round(ceilings.vector_ops_s(team, cpu.isa(), kind == "int8") / 1e12, 3) for kind in ("int8", "f32")}
    if cpu.isa() == "amx" and tiles.permitted():
        found |= {f"{kind} tiles TOPS": round(ceilings.tile_ops_s(team, kind == "bf16") / 1e12, 3) for kind in ("bf16", "int8")}
    return found


def measure(task: Task, team: Team, tell: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """All rows of a task; each is told when it is there. Raises ValueError for a format or an instruction set that is not."""
    made: list[Row] = []
    for format in task.formats:
        record = expert_nbytes(format, task.hidden, task.inter, task.gated)
        store = ExpertStore(format, max(task.top_k, int(task.gib * 2**30) // record), task.hidden, task.inter, task.gated)
        fill(store)
        for isa in task.isas or (cpu.isa(),):
            layer = ExpertLayer(store, isa=isa)
            told = {"format": format, "isa": isa, "threads": team.threads, "switch": layer.tune(team)}
            for tokens in task.tokens:
                for precision in ("accurate", "fast") if tokens > SMALL and layer.amx and layer.rounds else ("accurate",):
                    row = decode(layer, team, tokens, task) if tokens <= SMALL else prefill(layer, team, tokens, precision, task)
                    made.append(told | row | {"error": error(layer, team, min(tokens, 256), precision)})
                    tell(made[-1])
    return made


def line(row: Row) -> str:
    unit = "GB/s" if "GB/s" in row else "TOPS"
    return (f"{row['format']:9s} {row['isa']:12s} {row['threads']:3d} threads  {row['what']:17s} {row['tokens']:5d} tokens per expert  "
            f"{row[unit]:8.3f} {unit} (best {row['best']:.3f})  share {row['share']:.3f} ± {row['±']:.3f}  error {row['error']:.1e}")
