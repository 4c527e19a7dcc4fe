"""Rows through an engine: windows of rows ordered by shared prefix, an engine kept full, finished lines; knows no file but the input.

A row's line does not depend on which rows ran beside it, or on who ran before: seeds follow from ids.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero.batch.desk import Desk, Ready
from hetero.batch.journal import encode
from hetero.batch.rows import Line, Misread, parse, read_lines
from hetero.batch.survey import Survey
from hetero.engine.scheduler import LOOK, Limits
from hetero.errors import BadRequest, EngineFailed
from hetero.request import Output, Request
from hetero.wire.prepare import mask_of, request_of

WINDOW_ROWS, WINDOW_TOKENS = 1024, 1 << 18      # rows that are ordered together, and prompt tokens held for it


class Engine(Protocol):
    """What is needed of `hetero.engine.Engine` (or the scripted one)."""

    failure: EngineFailed | None
    limits: Limits

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Output]: ...
    def abort(self, id: str) -> None: ...
    def stats(self) -> Any: ...


@dataclass(frozen=True)
class Item:
    """A row on its way in: ready to run, or with the line of its failure; neither: it was finished before."""

    turn: int
    ready: Ready | None = None
    failed: bytes | None = None


@dataclass(frozen=True)
class Done:
    """A finished row."""

    turn: int
    data: bytes                          # its output line
    good: bool
    prompt_tokens: int = 0
    tokens: int = 0


class Feed:
    """Items in windows: a window's rows come ordered by their prompts, so that rows that share a beginning run together. The next window is
    prepared in a thread while the engine works. done[turn]: finished before."""

    def __init__(self, path: Path, desk: Desk, survey: Survey, done: np.ndarray, rows: int = WINDOW_ROWS) -> None:
        self.path, self.desk, self.survey, self.done, self.rows = path, desk, survey, done, rows
        self._pool = ThreadPoolExecutor(1, "feed")

    def __iter__(self) -> Iterator[Item]:
        windows = self._windows()
        coming = self._pool.submit(next, windows, None)
        while (window := coming.result()) is not None:
            coming = self._pool.submit(next, windows, None)
            yield from window

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _windows(self) -> Iterator[list[Item]]:
        window: list[Item] = []
        tokens = 0
        for line in read_lines(self.path):
            item = Item(line.turn) if self.done[line.turn] else self._item(line)
            window.append(item)
            tokens += item.ready.prompt_tokens if item.ready else 0
            if len(window) >= self.rows or tokens >= WINDOW_TOKENS:
                yield ordered(window)
                window, tokens = [], 0
        yield ordered(window)

    def _item(self, line: Line) -> Item:
        return item_of(line, int(self.survey.first[line.turn]), self.desk)


def item_of(line: Line, first: int, desk: Desk) -> Item:
    """first: the line that had this row's id first, or 0."""
    id = None
    try:
        row = parse(line)
        id = row.id
        if first:
            return Item(line.turn, None, encode(desk.duplicate(id, line.number, first)))
        return Item(line.turn, desk.take(row))
    except BadRequest as e:
        return Item(line.turn, None, encode(desk.failed(e.id if isinstance(e, Misread) else id, line.number, e)))


def ordered(window: list[Item]) -> list[Item]:
    """Failures first, then by prompt: equal beginnings stand together."""
    ready = [i for i in window if i.ready is not None]
    return [i for i in window if i.ready is None] + sorted(ready, key=lambda i: i.ready.jobs[0].job.prompt if i.ready else ())


class Mill:
    """Rows between their start and their last output, over one engine."""

    def __init__(self, engine: Engine, desk: Desk) -> None:
        self.engine, self.desk = engine, desk
        self._live: dict[str, tuple[Ready, int]] = {}
        self._open: dict[int, int] = {}                    # sequences of a turn that have not ended
        self._ended: list[Done] = []
        self.sequences = self.tokens = 0

    @property
    def full(self) -> bool:
        """Whether the engine has all it can look at."""
        return self.sequences >= self.engine.limits.max_batch + LOOK

    @property
    def idle(self) -> bool:
        return not self._open and not self._ended

    def start(self, ready: Ready) -> None:
        """A row into the engine."""
        vocabulary, tokenizer, added = self.desk.texts.vocabulary, self.desk.texts.tokenizer, 0
        try:
            for i, prepared in enumerate(ready.jobs):
                self.engine.add(request_of(prepared.job, mask_of(prepared.job, vocabulary), tokenizer))
                self._live[prepared.job.id] = ready, i
                added += 1
        except BadRequest as e:
            self._drop(ready)
            self._ended.append(Done(ready.row.turn, encode(self.desk.failed(ready.row.id, ready.row.number, e)), False))
            return
        self._open[ready.row.turn] = ready.sequences
        self.sequences += ready.sequences

    def step(self) -> list[Done]:
        """One step of the engine; the rows that ended with it. Raises EngineFailed when it cannot go on: rows that ran then are not finished."""
        done, self._ended = self._ended, []
        outputs = self.engine.step() if self._open else []
        if self.engine.failure is not None:
            raise self.engine.failure
        for output in outputs:
            if output.id in self._live:
                ready, job = self._live[output.id]
                done += self._take(ready, job, output)
        return done

    def _take(self, ready: Ready, job: int, output: Output) -> list[Done]:
        row = ready.row
        self.tokens += len(output.tokens)
        ready.answer.add(job, output)
        if output.finish is None:
            return []
        self._open[row.turn] -= 1
        self.sequences -= 1
        if output.finish == "error":
            self.sequences -= self._open.pop(row.turn)
            self._drop(ready)
            failed = self.desk.failed(row.id, row.number, EngineFailed(output.error or "failed"), 500, "server_error")
            return [Done(row.turn, encode(failed), False)]
        if self._open[row.turn]:
            return []
        del self._open[row.turn]
        self._drop(ready)
        return [Done(row.turn, encode(self.desk.line(ready)), True, ready.prompt_tokens, sum(len(r.answer.token_ids) for r in ready.replies()))]

    def _drop(self, ready: Ready) -> None:
        for prepared in ready.jobs:
            if self._live.pop(prepared.job.id, None) is not None:
                self.engine.abort(prepared.job.id)

    def stop(self) -> None:
        """Ends what runs, unfinished."""
        for id in list(self._live):
            self.engine.abort(id)
        self._live.clear()
        self._open.clear()
        self.sequences = 0
        if self.engine.failure is None and not self.engine.idle:
            self.engine.step()
