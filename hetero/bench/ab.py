"""`hetero bench ab NAME`: the same work under two settings in turn, as a paired ratio with its interval; knows settings by name, not what they do.

Both sides are loaded at once, on the same cores, and take turns within each pair; which begins flips from pair to pair.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from hetero.bench.result import Result, Row, busy_note, machine_facts
from hetero.bench.speed import Cell, graphs_of, run
from hetero.bench.timer import Ratio, gain, interval, ratio, spread
from hetero.errors import BadOption
from hetero.llm import LLM
from hetero.options import TABLE, Options, read

LEAST_PAIRS = 35
SETTINGS = {"overlap": ("on", "off"), "expert_cache": ("auto", "off"), "precision": ("fast", "accurate"), "deterministic": ("off", "on"),
            "kv_dtype": ("fp8", "bfloat16"), "expert_format": ("int4_g32", "int8_g32"), "dense_format": ("int8_g32", "bf16")}
NAMES = {"cache": "expert_cache"}


@dataclass(frozen=True)
class Question:
    """`name` of an option with the values of its two sides, or "stream" or "handoff", which are switched on a loaded model."""

    name: str
    values: tuple[str, str]


def question(name: str, values: Sequence[str]) -> Question:
    """What is asked, checked. Raises BadOption."""
    name = NAMES.get(name, name).replace("-", "_")
    if name == "stream":
        if values:
            raise BadOption("ab stream takes no values", "it compares streamed experts with experts on the CPU")
        return Question("stream", ("on", "off"))
    if name == "handoff":
        pair = (values[0], values[1]) if len(values) == 2 else ("flags", "memops")
        if len(values) not in (0, 2) or not set(pair) <= {"flags", "memops", "callback"}:
            raise BadOption(f"ab handoff {' '.join(values)}: two kinds are compared", "flags, memops, callback")
        return Question("handoff", pair)
    if name not in TABLE:
        raise BadOption(f"ab: {name!r} is nothing to compare", f"stream, handoff, {', '.join(SETTINGS)}, or any option with two values")
    if not values and name not in SETTINGS:
        raise BadOption(f"ab {name} needs two values", f"such as: hetero bench ab {name} A B")
    if values and len(values) != 2:
        raise BadOption(f"ab {name}: {len(values)} values given", "two are compared")
    chosen = (values[0], values[1]) if values else SETTINGS[name]
    for value in chosen:
        read(name, value, f"ab {name}")
    return Question(name, chosen)


def bench(asked: Question, open_model: Callable[[Options], LLM], options: Options, prompt: int, batch: int, tokens: int, pairs: int,
          tell: Callable[[str], None]) -> Result:
    """A ratio for prefill and one for decode. Raises BadOption for what cannot be compared here."""
    if pairs < LEAST_PAIRS:
        raise BadOption(f"--pairs {pairs}: fewer than {LEAST_PAIRS} pairs tell little", f"--pairs {LEAST_PAIRS} or more")
    with ExitStack() as stack:
        sides = open_sides(asked, open_model, options, stack)
        labels = [f"{asked.name} {value}" for value in asked.values]
        cells = [Cell(prompt, batch) for _ in sides]
        for i in range(-1, pairs):
            for s in (0, 1) if i % 2 else (1, 0):
                llm, prepare = sides[s]
                prepare()
                with llm.team.seat():
                    run(llm, cells[s] if i >= 0 else Cell(prompt, batch), tokens, 2 * i + s + 100)
                llm.team.park()
            if i >= 0 and (i + 1) % 10 == 0:
                tell(f"pair {i + 1} of {pairs}")
        return told(asked, labels, cells, sides[0][0], pairs, tokens)


def open_sides(asked: Question, open_model: Callable[[Options], LLM], options: Options, stack: ExitStack) -> list[tuple[LLM, Callable[[], None]]]:
    """(model, what to do before its turn) of both sides."""
    if asked.name in ("stream", "handoff"):
        llm = stack.enter_context(open_model(options))
        if llm.plan.device == "cpu":
            raise BadOption(f"ab {asked.name}: there is none without a GPU", "it needs one that hetero can use: hetero doctor")
        return switched_stream(llm) if asked.name == "stream" else switched_handoff(llm, asked.values)
    sides: list[LLM] = []
    for value in asked.values:
        mine = options.with_values("ab", **{asked.name: read(asked.name, value, f"ab {asked.name}")})
        if sides and asked.name not in ("cores", "threads"):
            mine = mine.with_values("ab", cores=sides[0].team.cores)         # both on the same ones, for cores that a team holds are avoided
        sides.append(stack.enter_context(open_model(mine)))
        sides[-1].team.park()
    return [(side, nothing) for side in sides]


def nothing() -> None:
    pass


def switched_stream(llm: LLM) -> list[tuple[LLM, Callable[[], None]]]:
    """Experts of large steps streamed as planned, and never."""
    from hetero.model.decoder import Decoder
    from hetero.model.ffn import Routed
    from hetero.model.streamed import Streamed

    decoder = llm.placed.decoder
    blocks = decoder.blocks if isinstance(decoder, Decoder) else []
    streamed = [f.experts for block in blocks if isinstance(f := block.ffn, Routed) and isinstance(f.experts, Streamed)]
    if not streamed:
        raise BadOption("ab stream: no experts of this model are ever streamed here", "a native model with routed experts")
    least = [e.least for e in streamed]

    def switch(on: bool) -> None:
        for e, n in zip(streamed, least, strict=True):
            e.least = n if on else 1 << 40
    return [(llm, lambda: switch(True)), (llm, lambda: switch(False))]


def switched_handoff(llm: LLM, kinds: tuple[str, str]) -> list[tuple[LLM, Callable[[], None]]]:
    """Decode graphs captured once for each kind of handoff."""
    from hetero.engine.graphs import Graphs

    found = graphs_of(llm)
    if found is None or found.handoff is None or not found.graphs:
        raise BadOption("ab handoff: this model's decode steps are not captured", "one with routed experts, whose parts can be")
    handoff, sides = found.handoff, list[tuple[LLM, Callable[[], None]]]()

    def use(kind: str, graphs: Graphs) -> None:
        handoff.kind, llm.engine.runner.decoder = kind, graphs
    for kind in kinds:
        handoff.kind = kind
        graphs = Graphs(found.decoder, found.cache, handoff, llm.plan.max_batch, found.staged.width, found.slots)
        sides.append((llm, partial(use, kind, graphs)))
    return sides


def told(asked: Question, labels: Sequence[str], cells: Sequence[Cell], llm: LLM, pairs: int, tokens: int) -> Result:
    rows: list[Row] = []
    said: list[str] = []
    for what, samples in (("prefill", [c.prefill_s for c in cells]), ("decode step", [c.step_s for c in cells])):
        if not all(len(s) == pairs for s in samples):
            continue
        found: Ratio = ratio(samples[1], samples[0])
        for label, mine in zip(labels, samples, strict=True):
            middle, low, high = interval(mine)
            rows.append({"what": what, "side": label, "ms": 1e3 * middle, "95 %": f"{1e3 * low:.3g} to {1e3 * high:.3g}",
                         "spread %": round(100 * spread(mine), 1)})
        rows.append({"what": what, "side": f"{labels[1]} / {labels[0]}", "ratio": found.median if found.differs else None,
                     "95 %": f"{found.low:.3f} to {found.high:.3f}", "verdict": "differs" if found.differs else "no difference seen"})
        said.append(f"{what}: {gain(found, labels[0], labels[1])}")
    facts = machine_facts(llm.team.threads) | {"model": llm.name, "device": llm.plan.device, "prompt": cells[0].prompt, "batch": cells[0].batch,
                                               "output tokens": tokens, "pairs": pairs}
    said.append("Ratios are medians over pairs taken one after the other, with the exact binomial interval of that median; over 1 it is no gain.")
    return Result(f"ab {asked.name}", facts, rows, [*said, *busy_note(facts, llm.team.threads)])
