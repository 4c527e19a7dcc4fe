"""`hetero bench kernels`: every format × instruction set × tokens per expert at a model's expert shape; `cpu_kernels.measure` measures."""

from collections.abc import Callable
from functools import partial

from cpu_kernels import FORMATS, Team, cpu, measure
from hetero.arch.spec import Model, MoE
from hetero.bench.result import Plot, Result, Row, busy_note, machine_facts
from hetero.errors import BadOption
from hetero.llm import fetch
from hetero.options import Options
from hetero.weights.source import open_source

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)


def shape_of(model: Model) -> tuple[int, int, int, bool]:
    """(hidden, inter, top_k, gated) of the first routed layer."""
    parts = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoE)]
    if not parts:
        raise BadOption(f"{model.family} has no routed experts", "give a mixture-of-experts model, or --shape 2048x768")
    return model.hidden, parts[0].width, parts[0].router.top_k, parts[0].gated


def task(model: Model | None, formats: str, isas: str, tokens: str, seconds: float, gib: float) -> measure.Task:
    """What to measure, checked. Raises BadOption."""
    hidden, inter, top_k, gated = shape_of(model) if model else (2048, 768, 8, True)
    wanted = tuple(FORMATS) if formats == "all" else tuple(formats.split(","))
    for name in wanted:
        if not set(name.split("+")) <= set(FORMATS):
            raise BadOption(f"--formats: {name!r} is no format of the kernels", f"known: {', '.join(FORMATS)}")
    here = cpu.isas()
    chosen = here if isas == "all" else tuple(isas.split(",")) if isas else (cpu.isa(),)
    for name in chosen:
        if name not in here:
            raise BadOption(f"--isas: {name!r} cannot run here", f"usable: {', '.join(here)}")
    try:
        counts = tuple(int(t) for t in tokens.split(",")) if tokens else TOKENS
    except ValueError:
        raise BadOption(f"--tokens {tokens!r} cannot be meant", "numbers like 1,2,64,1024") from None
    if min(counts) < 1:
        raise BadOption(f"--tokens {tokens!r} cannot be meant", "numbers like 1,2,64,1024")
    return measure.Task(hidden, inter, top_k, gated, wanted, chosen, counts, gib, budget_s=seconds)


def bench(wanted: measure.Task, options: Options, tell: Callable[[str], None]) -> Result:
    facts = machine_facts() | {"expert": f"{wanted.hidden} x {wanted.inter}, top-{wanted.top_k}, {'gated' if wanted.gated else 'ungated'}"}
    with Team(options.cores, options.threads) as team, team.seat():
        threads = team.threads
        facts["team"] = f"{threads} threads on cores {team.cores}"
        facts |= {f"ceiling: {k}": v for k, v in measure.machine(team).items() if k not in ("cpu", "isa", "threads")}
        rows: list[Row] = measure.measure(wanted, team, lambda row: tell(measure.line(row)))
    order = ("threads", "tokens", "GB/s", "TOPS", "best", "share", "±", "error", "switch", "rounds")
    rows = [{"kernel": kernel(row)} | {key: row.get(key) for key in order} for row in rows]
    notes = ["Up to 8 tokens per expert: bytes of weights per second, experts cold; share of what the same threads read of that memory in the same "
             "round. More: operations per second of the whole FFN, share of the peak of the same products from L1 in the same round. ± is half the "
             "distance between the quartiles of the rounds' shares; error is relative to float64 on the dequantized weights.",
             *busy_note(facts, threads)]
    return Result("kernels", facts, rows, notes, tuple(Plot("tokens", y, "kernel") for y in ("share", "TOPS", "GB/s")))


def kernel(row: Row) -> str:
    """Format, instruction set and arithmetic in one word each."""
    return f"{row['format']} {row['isa']}{' fast' if 'fast' in row['what'] else ''}"


def model_of(name: str | None, options: Options) -> Model | None:
    """The spec behind a folder, a config.json or a hub name."""
    if name is None:
        return None
    return open_source(name, partial(fetch, offline=options.offline, progress=lambda *_: None, weights=False), False).spec()
