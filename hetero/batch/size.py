"""How many rows decode at once, and how fast that could be: from the plan's cost model, before anything is loaded; knows no row."""

from collections.abc import Sequence

from hetero.arch.spec import Model
from hetero.memory.cost import Machine, prefill_terms
from hetero.memory.plan import GiB, Plan, plan
from hetero.options import Options

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ENOUGH = 0.97                            # of the best rate: a larger batch would only hold more memory


def second_of(found: Plan, model: Model, machine: Machine, rows: int) -> float:
    """Tokens per second at the machine's ceiling when `rows` tokens are computed together: the terms of a chunk of so many, and the head for each."""
    _, terms = prefill_terms(model, machine, found.pieces, found.device != "cpu", found.cache_slots, rows)
    heads = [p for p in found.pieces if p.kind == "head"]
    if found.device == "cpu":
        head = max(sum(p.nbytes for p in heads) / machine.dram_bytes_s, rows * 2.0 * model.vocab * model.hidden / machine.cpu_flops)
    else:
        head = max(sum(p.nbytes for p in heads) / machine.vram_bytes_s, rows * 2.0 * model.vocab * model.hidden / machine.gpu_flops)
    return rows / (sum(t.seconds for t in terms) + head)


def overflow(found: Plan, options: Options) -> int | None:
    """System memory for KV pages that leave a GPU: half of what is to spare, at most 8 GiB, unless the user said."""
    spare = (found.ram_limit_bytes - max(found.ram_bytes, found.peak_load_ram_bytes)) // 2
    return min(8 * GiB, spare) if found.device != "cpu" and options.source("kv_ram") == "default" and spare > GiB else options.kv_ram


def pick(model: Model, machine: Machine, options: Options, planned: Plan, mean_tokens: float) -> int:
    """The user's `max_batch` when a flag or a variable gave it, else what fits best below it."""
    given = options.source("max_batch")
    if given in ("flag", "argument") or given.startswith("environment"):
        return options.max_batch
    return fitting(model, machine, options, planned.expert_formats or "bf16", mean_tokens)


def fitting(model: Model, machine: Machine, options: Options, arriving: str | Sequence[str], mean_tokens: float) -> int:
    """The smallest batch that comes near the best rate among those whose rows, of `mean_tokens` each, find room in the KV cache; at most
    `options.max_batch`."""
    rates: list[tuple[int, float]] = []
    for size in [s for s in SIZES if s < options.max_batch] + [options.max_batch]:
        found = plan(model, machine, options.with_values("cost model", max_batch=size), arriving)
        if rates and (not found.fits or found.kv_tokens < size * mean_tokens):
            break
        rates.append((size, second_of(found, model, machine, size)))
    best = max(rate for _, rate in rates)
    return next(size for size, rate in rates if rate >= ENOUGH * best)
