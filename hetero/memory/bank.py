"""The experts of all layers in one arena of packed records, filled from a checkpoint, the packed cache or noise; knows no kernel.

A layer keeps what arrived exactly when its format can: codes are repacked, never requantized. What had to be requantized is measured and said.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

import cpu_kernels
from cpu_kernels import FORMATS, ExpertStore, codes
from cpu_kernels.formats import expert_nbytes
from hetero import weights as weights_floor
from hetero.arch.spec import Model, MoE
from hetero.errors import BadCheckpoint
from hetero.memory import packed
from hetero.memory.arena import Arena, Huge
from hetero.memory.packed import Progress
from hetero.memory.plan import expert_format
from hetero.weights.checkpoint import Checkpoint, ExpertWeights
from hetero.weights.dummy import Dummy
from hetero.weights.reading import Codes, Floats
from hetero.weights.stored import to_f32

ROUNDING = 1e-6                          # what two orders of float32 arithmetic differ by on the same codes
SCRATCH_BYTES = 256 << 20                # of all packing threads together
PACKING = ("formats.py", "codes.py", "pack.py", "plain.py", "store.py", "lanes.py", "jit.py")     # of cpu_kernels: what decides packed bytes
SIGNED = ("int8_g32", "int4_g32")       # formats whose codes a file gives as integers times scales
TAGS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


class Weights(Protocol):
    """What a bank is filled from: a Checkpoint, or a Dummy."""

    model: Model

    def expert_format(self, layer: int) -> str: ...
    def expert_arrives(self, layer: int) -> str: ...
    def expert(self, layer: int, expert: int) -> ExpertWeights: ...
    def expert_biases(self, layer: int) -> dict[str, np.ndarray] | None: ...
    def release_expert(self, layer: int, expert: int) -> None: ...


@dataclass(frozen=True)
class Origin:
    """Where a layer's bytes came from and how faithful they are. `error`: relative RMS difference to what arrived, over the first expert and the
    first that was not kept; 0 is exact."""

    arrived: str
    format: str
    kept: bool                           # True: every expert's codes repacked, never requantized; scales may have been rounded to the format's type
    error: float

    def __str__(self) -> str:
        said = "exact" if self.kept and self.error < ROUNDING else f"{'codes kept, ' if self.kept else ''}error {self.error:.1e}"
        return f"{self.arrived} -> {self.format}, {said}"


@dataclass(frozen=True)
class Filled:
    """How the bank was filled, for the report."""

    by: str                              # "checkpoint" | "packed cache" | "dummy"
    nbytes: int
    seconds: float
    huge: Huge
    cache_note: str                      # why nothing was written to the packed cache; "" when it was, or was read
    origins: dict[int, Origin]


def formats(weights: Weights, asked: str = "auto") -> dict[int, str]:
    """The packed format of each routed layer."""
    return {l: expert_format(asked, weights.expert_arrives(l)) for l in weights.model.moe_layers}


def moe(model: Model, layer: int) -> MoE:
    ffn = model.layers[layer].ffn
    assert isinstance(ffn, MoE)
    return ffn


class Bank:
    """`stores[layer]` and `biases[layer]` of every routed layer. The arena is one range; `starts[layer]` is where a layer begins in it."""

    def __init__(self, model: Model, chosen: dict[int, str]) -> None:
        self.model, self.formats = model, chosen
        self.starts: dict[int, int] = {}
        at = 0
        for l in model.moe_layers:
            part = moe(model, l)
            self.starts[l] = at
            size = part.router.experts * expert_nbytes(chosen[l], part.hidden or model.hidden, part.width, part.gated)
            at += -(-size // packed.PAGE) * packed.PAGE
        self.arena = Arena(at)
        self.stores = {l: self._store(l) for l in model.moe_layers}
        self.biases: dict[int, dict[str, np.ndarray] | None] = {}
        self.filled: Filled | None = None

    def _store(self, l: int) -> ExpertStore:
        part, start = moe(self.model, l), self.starts[l]
        hidden = part.hidden or self.model.hidden
        size = part.router.experts * expert_nbytes(self.formats[l], hidden, part.width, part.gated)
        return ExpertStore(self.formats[l], part.router.experts, hidden, part.width, part.gated, self.arena.view(start, size))


def load(weights: Weights, asked: str = "auto", cache_dir: Path | None = None, threads: int = 1, progress: Progress = lambda *_: None) -> Bank:
    """Fill a bank. `cache_dir` None: no packed cache is read or written. Raises BadCheckpoint, BadOption, DoesNotFit."""
    began = time.perf_counter()
    bank = Bank(weights.model, formats(weights, asked))
    key = cache_key(weights, bank.formats) if cache_dir is not None and isinstance(weights, Checkpoint) else None
    by, note, origins = "checkpoint", "", {}
    header = packed.read(cache_dir, key, bank.arena.memory, threads, progress) if key and cache_dir else None
    if header is not None:
        by, origins = "packed cache", {int(l): Origin(**o) for l, o in header["origins"].items()}
    elif isinstance(weights, Dummy):
        by, origins = "dummy", fill_dummy(bank, weights, threads, progress)
    else:
        origins = fill(bank, weights, threads, progress)
        if key and cache_dir and isinstance(weights, Checkpoint):
            name = weights.source.name
            described = {"model": name, "formats": ", ".join(sorted(set(bank.formats.values()))), "of": weights_key(weights),
                         "origins": {l: vars(o) for l, o in origins.items()}}
            note = packed.write(cache_dir, key, bank.arena.memory, described, progress)
    bank.biases = {l: weights.expert_biases(l) for l in weights.model.moe_layers}
    bank.filled = Filled(by, bank.arena.nbytes, time.perf_counter() - began, bank.arena.ask_for_huge_pages(), note, origins)
    return bank


def fill(bank: Bank, weights: Weights, threads: int, progress: Progress) -> dict[int, Origin]:
    """Pack every expert straight from the file into its record, several at a time."""
    found: dict[int, list[tuple[bool, float]]] = {l: [] for l in bank.stores}
    done = 0

    def one(job: tuple[int, int]) -> int:
        l, e = job
        try:
            kept = put(bank.stores[l], e, weights.expert(l, e))
        except ValueError as damage:
            raise BadCheckpoint(f"layer {l}: {damage}", "the weights are damaged: fetch the model again") from damage
        if e == 0 or (not kept and all(k for k, _ in found[l])):
            found[l].append((kept, difference(bank.stores[l], e, weights.expert(l, e))))
        weights.release_expert(l, e)
        return bank.stores[l].record_nbytes

    jobs = ((l, e) for l in bank.stores for e in range(bank.stores[l].experts))
    for nbytes in in_parallel(one, jobs, packing_threads(bank, weights, threads)):
        done += nbytes
        progress("packing experts", done, bank.arena.nbytes)
    progress("packing experts", bank.arena.nbytes, bank.arena.nbytes)
    return {l: Origin(weights.expert_format(l), bank.formats[l], all(k for k, _ in seen), max(e for _, e in seen)) for l, seen in found.items()}


def in_parallel(work, jobs: Iterator, threads: int) -> Iterator:            # type: ignore[no-untyped-def]
    """Results as they come, with never more than two jobs per thread in flight; an error ends the rest."""
    with ThreadPoolExecutor(threads) as pool:
        flying: set[Future] = set()
        try:
            for job in jobs:
                flying.add(pool.submit(work, job))
                if len(flying) >= 2 * threads:
                    ready, flying = wait(flying, return_when=FIRST_COMPLETED)
                    yield from (f.result() for f in ready)
            yield from (f.result() for f in flying)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def packing_threads(bank: Bank, weights: Weights, threads: int) -> int:
    """As many as asked for, fewer when the scratch of dequantizing large matrices would pass the bound."""
    l = weights.model.moe_layers[0] if weights.model.moe_layers else None
    if l is None:
        return 1
    matrix = (moe(weights.model, l).hidden or weights.model.hidden) * moe(weights.model, l).width
    return max(1, min(threads, SCRATCH_BYTES // (12 * matrix)))


def put(store: ExpertStore, e: int, weights: ExpertWeights) -> bool:
    """One expert into its record. True when every matrix was kept exactly, or with only its scales rounded to the format's type.
    Raises ValueError for NaN or infinity."""
    weights = arranged(weights)
    orders, order = store.orders, order_of(weights.gate) if order_of(weights.up) is None else order_of(weights.up)
    if orders is not None and order is not None:
        orders[e] = order
    kept = True
    for name, w in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
        if w is None:
            continue
        mine, theirs = None if orders is None or name == "down" else order, order_of(w)
        same = mine is theirs or (mine is not None and theirs is not None and np.array_equal(mine, theirs))
        exact = keep(store.format_for(name).name, w) if same else None
        if exact is not None:
            store.put_exact(e, name, exact[0], exact[1], **exact[2])
            continue
        kept = False
        floats = w if isinstance(w, Floats) else Floats("f32", dequantize(w))
        store.put_float(e, name, floats.data if mine is None else floats.data[:, mine], floats.tag)
    return kept


def order_of(w: Floats | Codes | None) -> np.ndarray | None:
    return w.order if isinstance(w, Codes) else None


def arranged(weights: ExpertWeights) -> ExpertWeights:
    """The same expert with its hidden columns in the order in which down has them: rows of gate and up move, which no product notices."""
    down, order = weights.down, order_of(weights.down)
    if not isinstance(down, Codes) or order is None:
        return weights

    def rows(w: Floats | Codes) -> Floats | Codes:
        if isinstance(w, Floats):
            return Floats(w.tag, w.data[order])
        return replace(w, codes=w.codes[order], scales=w.scales[order], more={k: v if v.ndim < 2 else v[order] for k, v in w.more.items()})

    return ExpertWeights(None if weights.gate is None else rows(weights.gate), rows(weights.up), replace(down, order=None))


def keep(format: str, w: Floats | Codes) -> tuple[np.ndarray, np.ndarray | None, Mapping[str, np.ndarray]] | None:
    """Codes, scales and more as `put_exact` wants them, None when this format cannot hold what arrived."""
    if isinstance(w, Floats):
        return (w.data, None, {}) if w.tag == format else None
    if w.format not in SIGNED:
        return (w.codes, w.scales, w.more) if w.format == format else None
    if format == "int8_g32":
        return w.codes, rounded(w.scales, format), {}
    if format == "int4_g32" and int(w.codes.min()) >= -8 and int(w.codes.max()) <= 7 and np.isfinite(scales := rounded(w.scales, format)).all():
        return (w.codes + np.int8(8)).view(np.uint8), scales, {}
    return None


def rounded(scales: np.ndarray, format: str) -> np.ndarray:
    """float32 scales as the nearest value of the format's scale type."""
    if FORMATS[format].scale == "f16":
        with np.errstate(over="ignore"):
            return scales.astype(np.float16).astype(np.float32)
    bits = scales.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def dequantize(w: Floats | Codes) -> np.ndarray:
    """float32 [N, K]"""
    if isinstance(w, Floats):
        return to_f32(w.data, TAGS[w.tag])
    if w.order is not None:
        return dequantize(replace(w, order=None))[:, np.argsort(w.order)]
    if w.format not in SIGNED:
        q = np.stack([w.codes & 15, w.codes >> 4], -1).reshape(len(w.codes), -1) if w.pairs else w.codes
        return codes.values(FORMATS[w.format], q, {"scales": w.scales, **w.more}).astype(np.float32)
    return (w.codes.astype(np.float32).reshape(len(w.codes), -1, 32) * w.scales[:, :, None]).reshape(w.codes.shape)


def difference(store: ExpertStore, e: int, weights: ExpertWeights) -> float:
    """Relative RMS difference between what is stored of expert `e` and what arrived."""
    off = size = 0.0
    weights, orders = arranged(weights), store.orders
    for name, w in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
        if w is not None:
            want = dequantize(w) if orders is None or name == "down" else dequantize(w)[:, orders[e]]
            off += float(np.square(store.dequantize(e, name) - want).sum())
            size += float(np.square(want, dtype=np.float64).sum())
    return (off / size) ** 0.5 if size else 0.0


def fill_dummy(bank: Bank, weights: Dummy, threads: int, progress: Progress) -> dict[int, Origin]:
    """Pack a few random experts per shape, then copy their records: valid bytes at the speed of memory."""
    drawn: dict[tuple, list[np.ndarray]] = {}
    origins, done = {}, 0
    for l, store in bank.stores.items():
        shape = (store.form, store.hidden, store.inter, store.gated)
        if shape not in drawn:
            small = ExpertStore(store.form, min(weights.kinds, store.experts), store.hidden, store.inter, store.gated)
            for e in range(small.experts):
                put(small, e, weights.expert(l, e))
            drawn[shape] = [small.record(e) for e in range(small.experts)]
        kinds = drawn[shape]

        def copy(e: int, store: ExpertStore = store, kinds: list[np.ndarray] = kinds) -> int:
            np.copyto(store.record(e), kinds[e % len(kinds)])
            return store.record_nbytes

        for n in in_parallel(copy, iter(range(store.experts)), threads):
            done += n
            progress("making random experts", done, bank.arena.nbytes)
        origins[l] = Origin("dummy", store.form, False, 0.0)
    return origins


def weights_key(checkpoint: Checkpoint) -> str:
    """Names the weights: these files (sizes, times, headers) read under this quantization block, cut to these layers."""
    h = hashlib.sha256()
    for path in checkpoint.source.weights:
        stat = path.stat()
        h.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for s in checkpoint.stored.values():
        h.update(f"{s.name} {s.dtype} {s.shape} {s.file.name} {s.start}\n".encode())
    h.update(json.dumps([checkpoint.model.moe_layers, sorted(checkpoint.quant.items(), key=str)], default=str).encode())
    return h.hexdigest()[:32]


def cache_key(checkpoint: Checkpoint, chosen: dict[int, str]) -> str:
    """Names the packed bytes: of these weights, in these formats, packed by this code."""
    text = json.dumps([weights_key(checkpoint), sorted(chosen.items()), packing_version()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def packing_version() -> str:
    """A hash of the code that reads, quantizes, lays out and compiles: bytes packed by other code are not these bytes."""
    h = hashlib.sha256()
    kernels, weights = Path(cpu_kernels.__file__).parent, Path(weights_floor.__file__).parent
    for path in sorted([*kernels.glob("rows/*.py"), *weights.glob("*.py"), *(kernels / n for n in PACKING)]):
        h.update(path.read_bytes())
    return h.hexdigest()[:16]
