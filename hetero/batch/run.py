"""A batch from its input to its exit code: look, compare with what was begun, load, run, write; `Task` is what a user asks.

Exit codes: 0 every row has its answer, 3 finished and some rows failed, 130 stopped and resumable.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np

from hetero.batch import manifest as manifests
from hetero.batch import size
from hetero.batch.desk import Desk, open_desk
from hetero.batch.journal import Journal, Sink, sync_folder
from hetero.batch.keys import Keys
from hetero.batch.mill import WINDOW_ROWS, Done, Engine, Feed, Item, Mill
from hetero.batch.progress import EVERY_S, Meter, Progress, clock
from hetero.batch.rows import Wanted
from hetero.batch.survey import Count, Fault, Survey, look
from hetero.errors import BadOption, BadRequest, DoesNotFit, NotWritable
from hetero.forecast import forecast
from hetero.llm import LLM
from hetero.memory.cost import Machine
from hetero.memory.plan import Plan
from hetero.options import Options
from hetero.wire.records import Info

SHOWN = 20                               # bad lines named on the terminal


@dataclass(frozen=True)
class Task:
    """What is asked. `input` "-" is stdin. `errors` None: beside the output."""

    input: str
    output: Path
    errors: Path | None = None
    order: str = "completion"            # or input
    on_error: str = "row"                # or abort
    resume: bool = False
    retry_errors: bool = False
    progress: str = "auto"
    wanted: Wanted = field(default_factory=Wanted)
    seed: int | None = None
    window: int = WINDOW_ROWS
    ray: str | None = None               # a cluster's address, "" for one that is found or started here

    @property
    def bad(self) -> Path:
        return self.errors or self.output.with_name(f"{self.output.name.removesuffix('.jsonl')}.errors.jsonl")


class Stop:
    """Signals, counted: the first asks to finish what runs, the second to stop at once, the third interrupts whatever is going on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self._say = 0, say

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self.asked > 2:
            raise KeyboardInterrupt
        self._say("finishing what runs (again: stop at once)" if self.asked == 1 else "stopping")

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = [(s, signal.signal(s, self)) for s in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield
        finally:
            for s, handler in before:
                signal.signal(s, handler)


class Crew(Protocol):
    """Whoever computes rows: this process's engine, or a cluster."""

    def run(self, batch: "Batch") -> None: ...


@dataclass
class Batch:
    """A batch that is ready to run. done[turn]: finished before."""

    task: Task
    input: Path
    desk: Desk
    survey: Survey
    done: np.ndarray
    sink: Sink
    meter: Meter
    progress: Progress
    stop: Stop

    def put(self, done: Done) -> None:
        """A finished row to its file."""
        self.sink.put(done.turn, self.survey.keys.at(done.turn), done.data, done.good)
        self.meter.good += done.good
        self.meter.bad += not done.good

    def ahead(self, turn: int) -> bool:
        """Whether this turn is too far ahead of what was written."""
        return self.sink.in_order and turn >= self.sink.next + 2 * self.task.window


class Alone:
    """This process's engine as a crew. ceiling(rows): tokens per second that the machine could reach at best with so many together."""

    def __init__(self, engine: Engine, info: Info, ceiling: Callable[[int], float] = lambda rows: 0.0) -> None:
        self.engine, self.info, self.ceiling = engine, info, ceiling

    def run(self, batch: Batch) -> None:
        desk = Desk(replace(batch.desk.texts, info=replace(self.info, sampling=batch.desk.texts.info.sampling)), batch.desk.wanted)
        feed, mill = Feed(batch.input, desk, batch.survey, batch.done, batch.task.window), Mill(self.engine, desk)
        items, waiting, before = iter(feed), None, replace(self.engine.stats())
        try:
            while not batch.stop.asked > 1:
                while not batch.stop.asked and not mill.full:
                    waiting = waiting or next(items, None)
                    if waiting is None or batch.ahead(waiting.turn):
                        break
                    self._start(batch, mill, waiting)
                    waiting = None
                if mill.idle and (batch.stop.asked or waiting is None):
                    break
                for done in mill.step():
                    batch.put(done)
                self._measure(batch, mill, before)
                batch.sink.tick()
                batch.progress.tick()
        finally:
            feed.close()
            mill.stop()

    def _start(self, batch: Batch, mill: Mill, item: Item) -> None:
        if item.ready is not None:
            mill.start(item.ready)
        elif item.failed is not None:
            batch.put(Done(item.turn, item.failed, False))
        else:
            batch.sink.skip(item.turn)

    def _measure(self, batch: Batch, mill: Mill, before: Any) -> None:
        now, meter = self.engine.stats(), batch.meter
        meter.running, meter.tokens = now.running, mill.tokens
        meter.prompt_tokens, meter.cached_tokens = now.prompt_tokens - before.prompt_tokens, now.cached_tokens - before.cached_tokens
        decoded, chunks, steps = now.decode_tokens - before.decode_tokens, now.prefill_tokens - before.prefill_tokens, now.steps - before.steps
        if rate := self.ceiling(max(1, round(decoded / max(1, steps)))):
            meter.ideal_s = decoded / rate + chunks / self.ceiling(self.engine.limits.chunk_tokens)


@dataclass(frozen=True)
class Opening:
    """What a crew needs to start: the model, its options with the batch that was picked, and how fast this machine could be with so many rows."""

    name: str | None
    options: Options
    desk: Desk
    ceiling: Callable[[int], float]
    fingerprint: str


@contextmanager
def alone(opening: Opening, load: Callable[[str | None, Options], LLM] = lambda name, options: LLM(name, options=options)) -> Iterator[Crew]:
    """The model in this process."""
    with closing(load(opening.name, opening.options)) as model:
        model.generate([[0] * 4], replace(model.sampling, max_tokens=2, ignore_eos=True))      # kernels are compiled at their first use
        yield Alone(model.engine, model.info(), opening.ceiling)


def plan_of(name: str | None, options: Options) -> tuple[Plan, Machine]:
    """Raises DoesNotFit before anything is read or loaded."""
    plan, machine = forecast(name, options)
    if not plan.fits:
        raise DoesNotFit(f"{name or 'the embedded model'} {plan.shortfall}", "; or ".join(plan.changes))
    return plan, machine


def run(task: Task, name: str | None, options: Options, open_crew: Callable[[Opening], AbstractContextManager[Crew]] = alone) -> int:
    """The whole of `hetero batch run`. Raises BadOption, BadRequest (with on_error "abort"), NotWritable, and what loading and running raise."""
    check_paths(task)
    before = manifests.read(manifests.place(task.output)) if task.resume else None
    if before is not None:
        options = options if options.ctx is not None else options.with_values("manifest", ctx=before["context"])
    seed = task.seed if task.seed is not None else before["seed"] if before else 0
    wanted = replace(task.wanted, seed=seed, created=before["created"] if before else int(time.time()))
    plan, machine = plan_of(name, options)
    options = options.with_values("plan", ctx=plan.ctx, kv_ram=size.overflow(plan, options))
    desk, source, model, meant = open_desk(name, options, plan, wanted)
    progress = Progress(Meter(), task.progress)
    with ExitStack() as stack:
        stack.callback(desk.texts.checker.close)
        good, bad = Journal(task.output), Journal(task.bad)
        sink = Sink(good, bad, task.order == "input")
        stack.callback(sink.close)
        if before is None and (good.size or bad.size):
            raise BadOption(f"{(task.output if good.size else task.bad)} has rows, but there is no manifest beside it", "give another -o")
        input = spooled(task, before is not None)
        survey = examine(task, input, None if before else desk, progress)
        formats = {"experts": sorted(set(plan.expert_formats)), "dense": plan.dense_format, "kv": plan.kv_dtype, "dtype": options.dtype,
                   "precision": options.precision, "layers": options.layers}
        means = {"mean_tokens": before["input"]["mean_tokens"] if before else survey.mean_tokens}
        sampling = {**asdict(desk.texts.info.sampling), **(wanted.sampling or {})}
        manifest = manifests.of(task.input, survey.sha256, survey.rows, source, formats, sampling, seed, plan.ctx, desk.served,
                                options.deterministic, wanted.created, means)
        if before is not None:
            manifests.check_same(manifests.place(task.output), before, manifest)
        else:
            manifests.write(manifests.place(task.output), manifest)
        if task.retry_errors and bad.size:
            sink.bad = bad = retried(bad)
        done = survey.keys.within(Keys.union(good.keys, bad.keys))
        progress.meter = meter = Meter(survey.rows, int(done.sum()))
        stop = Stop(progress.say)
        if not done.all():
            options = options.with_values("cost model", max_batch=size.pick(model, machine, meant, plan, means["mean_tokens"]))
            opening = Opening(name, options, desk, partial(size.second_of, plan, model, machine), manifest["model"]["fingerprint"])
            with open_crew(opening) as crew, stop.listening():
                meter.began_s = time.monotonic()
                crew.run(Batch(task, input, desk, survey, done, sink, meter, progress, stop))
                sink.flush()
            progress.tick(last=True)
        return finish(task, survey, good, bad, progress)


def check_paths(task: Task) -> None:
    """Raises BadOption for files that cannot be meant."""
    if task.input != "-" and not Path(task.input).is_file():
        raise BadOption(f"{task.input}: no such file", "a JSONL file, plain or gzip, or - for stdin")
    if not task.output.parent.is_dir():
        raise BadOption(f"{task.output.parent}: no such folder", "make it, or give another -o")
    places = [p.resolve() for p in (task.output, task.bad, *([Path(task.input)] if task.input != "-" else []))]
    if len(set(places)) < len(places):
        raise BadOption("input, output and errors must be different files", "give another -o or --errors")
    try:
        used = [p for p in (task.output, task.bad) if p.exists() and p.stat().st_size]
    except OSError as e:
        raise NotWritable(f"{task.output}: {e.strerror}", "give another -o") from e
    if used and not task.resume:
        raise BadOption(f"{used[0]} has rows already", "--resume goes on with it; or give another -o")


def spooled(task: Task, resumed: bool) -> Path:
    """The input as a file: stdin is kept beside the output until the batch is finished."""
    if task.input != "-":
        return Path(task.input)
    kept = task.output.with_name(task.output.name + ".stdin")
    if resumed and kept.exists():
        return kept
    try:
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise NotWritable(f"{kept}: {e.strerror}", "stdin is kept there until the batch is finished: make room, or give another -o") from e
    return kept


def examine(task: Task, input: Path, desk: Desk | None, progress: Progress) -> Survey:
    """All rows, with the bad ones told. Raises BadRequest when nothing is to run."""
    shown, told_s = 0, time.monotonic()

    def on_fault(fault: Fault) -> None:
        nonlocal shown
        shown += 1
        if desk is not None and shown <= SHOWN:
            progress.say(fault.text(task.input))

    def tell(count: Count) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > EVERY_S and task.progress != "off":
            told_s = time.monotonic()
            progress.say(f"looked at {count.rows:,} rows, {count.bad:,} bad")
    try:
        survey = look(input, desk, on_fault, Count(tell=tell))
        if desk is not None and shown > SHOWN:
            progress.say(f"… and {shown - SHOWN:,} more bad lines")
        if task.on_error == "abort" and survey.bad > 0:
            raise BadRequest(f"{survey.bad:,} of {survey.rows:,} rows are bad, so nothing was run", "correct them, or --on-error row runs the others")
    except BadRequest:
        for path in (task.output, task.bad):
            if path.exists() and not path.stat().st_size:
                path.unlink()
        raise
    return survey


def retried(bad: Journal) -> Journal:
    """A new file for errors; the old one is kept under a number."""
    bad.close()
    n = next(i for i in count(1) if not bad.path.with_name(f"{bad.path.name}.{i}").exists())
    bad.path.rename(bad.path.with_name(f"{bad.path.name}.{n}"))
    sync_folder(bad.path.parent)
    return Journal(bad.path)


def finish(task: Task, survey: Survey, good: Journal, bad: Journal, progress: Progress) -> int:
    """Says what became of the batch; its exit code."""
    meter, left = progress.meter, survey.rows - len(good.keys) - len(bad.keys)
    said = f"{len(good.keys):,} of {survey.rows:,} rows have answers in {task.output}"
    said += f", {len(bad.keys):,} failed: {task.bad}" if len(bad.keys) else ""
    if meter.good:
        said += (f"; {meter.prompt_tokens:,} prompt and {meter.tokens:,} generated tokens in {clock(meter.took_s)}"
                 f" ({meter.tokens / meter.took_s:,.0f} tok/s generated)")
    if left:
        said += f"; {left:,} to do: run again with --resume"
    if task.progress != "off":
        progress.say(said)
    if left:
        return 130
    if task.input == "-":
        spooled(task, True).unlink(missing_ok=True)
    return 3 if len(bad.keys) else 0


def check(input: str, name: str | None, options: Options, wanted: Wanted, on_fault: Callable[[Fault], None]) -> Survey:
    """`hetero batch check`: what is wrong with an input, without loading the model."""
    if input != "-" and not Path(input).is_file():
        raise BadOption(f"{input}: no such file", "a JSONL file, plain or gzip, or - for stdin")
    desk = open_desk(name, options, forecast(name, options)[0], wanted)[0]
    try:
        if input != "-":
            return look(Path(input), desk, on_fault)
        with tempfile.NamedTemporaryFile() as kept:        # a pipe cannot be read again, and gzip is known by looking
            shutil.copyfileobj(sys.stdin.buffer, kept, 1 << 20)
            kept.flush()
            return look(Path(kept.name), desk, on_fault)
    finally:
        desk.texts.checker.close()
