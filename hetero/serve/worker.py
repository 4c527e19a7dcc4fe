"""The engine's side of the server: takes jobs from a pipe, steps the engine, sends back what it said; knows no HTTP and no event loop.

Runs in a process of its own (`main`), or in a thread around a scripted engine (tests). The parent's end of the pipe closing ends it.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetero.errors import BadRequest, EngineFailed, HeteroError
from hetero.options import Options
from hetero.request import Mask, Output, Request
from hetero.text.grammar import Vocabulary
from hetero.text.tokenizer import Tokenizer
from hetero.wire.prepare import mask_of, request_of
from hetero.wire.records import Info, Job

if TYPE_CHECKING:
    from hetero.llm import LLM

NICER = 3                                # than the server: where every core computes, /health and the readers' bytes come first
BEAT_S = 0.25                            # an idle worker says that it lives so often


class Engine(Protocol):
    """What the loop needs of `hetero.engine.Engine` (or the scripted one)."""

    failure: EngineFailed | None

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Output]: ...
    def abort(self, id: str) -> None: ...
    def stats(self) -> Any: ...


@dataclass
class Host:
    """An engine with what belongs to it."""

    info: Info
    engine: Engine
    tokenizer: Tokenizer
    report: Callable[[], dict[str, Any]]
    speeds: Callable[[], dict[str, float]] = dict      # what the report says of speed, for metrics


class Worker:
    """The loop. `pipe` carries tuples: ("add", Job) | ("abort", id) | ("report",) | ("end",) in, and
    ("outputs", list) | ("refused", id, message, hint, param) | ("stats", dict, dict) | ("report", dict) | ("failed", message) out."""

    def __init__(self, pipe: Connection, host: Host) -> None:
        self._pipe, self._host, self._ended = pipe, host, False
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._compiling: dict[str, tuple[Job, Future[Mask | None]]] = {}
        self._vocabulary = Vocabulary(host.tokenizer, host.info.vocab)
        self._beat_s = 0.0

    def run(self) -> None:
        """Until the parent says so or is gone. EngineFailed ends it with a last message."""
        try:
            while not self._ended:
                self._read(0.0 if not self._host.engine.idle else 0.002 if self._compiling else BEAT_S)
                self._start_compiled()
                if not self._host.engine.idle and (outputs := self._host.engine.step()):
                    self._pipe.send(("outputs", outputs))
                if self._host.engine.failure is not None:
                    raise self._host.engine.failure
                if (now := time.monotonic()) - self._beat_s >= BEAT_S:
                    self._beat_s = now
                    self._pipe.send(("stats", asdict(self._host.engine.stats()), self._host.speeds()))
        except EngineFailed as e:
            self._pipe.send(("failed", e.message))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, wait_s: float) -> None:
        while self._pipe.poll(wait_s):
            kind, *rest = self._pipe.recv()
            wait_s = 0.0
            if kind == "add":
                self._add(rest[0])
            elif kind == "abort":
                self._compiling.pop(rest[0], None)
                self._host.engine.abort(rest[0])
            elif kind == "report":
                self._pipe.send(("report", self._host.report()))
            else:
                self._ended = True

    def _add(self, job: Job) -> None:
        if job.grammar is None:
            self._start(job, None)
        else:
            self._compiling[job.id] = (job, self._pool.submit(self._mask, job))

    def _mask(self, job: Job) -> Mask | None:
        return mask_of(job, self._vocabulary)

    def _start_compiled(self) -> None:
        for id, (job, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[id]
                try:
                    self._start(job, future.result())
                except HeteroError as e:
                    self._refuse(id, e)

    def _start(self, job: Job, mask: Mask | None) -> None:
        try:
            self._host.engine.add(request_of(job, mask, self._host.tokenizer))
        except BadRequest as e:
            self._refuse(job.id, e)

    def _refuse(self, id: str, e: HeteroError) -> None:
        self._pipe.send(("refused", id, e.message, e.hint, e.param if isinstance(e, BadRequest) else None))


def host_of(model: "LLM") -> Host:
    """A loaded model as the loop takes it."""
    def report() -> dict[str, Any]:
        found = model.report()
        return {**found.record(), "text": found.text()}
    return Host(model.info(), model.engine, model.tokenizer, report, model.speeds)


def main(pipe: Connection, name: str | None, options: Options) -> None:
    """The process: loads, says ("ready", Info) or ("failed", message), and works. Signals are the parent's matter."""
    import signal
    from contextlib import closing

    from hetero.llm import LLM
    from hetero.report import announce_compiles

    os.setpgid(0, 0)                             # Ctrl-C on the terminal is for the parent, which drains
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last = [0.0]

    def progress(doing: str, done: int, total: int) -> None:
        if time.monotonic() - last[0] > 1 or done >= total:
            last[0] = time.monotonic()
            pipe.send(("loading", doing, done, total))
    try:
        announce_compiles()
        os.nice(NICER)
        model = LLM(Path(name) if name and Path(name).exists() else name, options=options, progress=progress)
    except HeteroError as e:
        pipe.send(("failed", str(e)))
        return
    with closing(model):
        # kernels are compiled at their first use: before "ready"
        model.generate([[0] * 4], replace(model.sampling, max_tokens=2, ignore_eos=True))
        pipe.send(("ready", host_of(model).info))
        Worker(pipe, host_of(model)).run()
