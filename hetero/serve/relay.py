"""The server's side of the engine's process: starts it, gives every request its own queue, and knows whether it lives; knows no HTTP.

Reading and writing the pipe happen in two threads, so that a full pipe or a long step never stops the event loop.
"""

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from typing import Any

from hetero.errors import BadRequest, EngineFailed, HeteroError
from hetero.options import Options
from hetero.request import Output
from hetero.serve import worker
from hetero.serve.metrics import Meter
from hetero.serve.worker import Host, Worker
from hetero.wire.records import Info, Job

SILENT_S = 120.0                         # a step may be a long prompt chunk; a worker that says nothing for longer hangs


class Overloaded(HeteroError):
    """The queue is full."""


class NotReady(HeteroError):
    """No model can answer now; another time one may."""


class Relay:
    """One engine, many readers. Made by `spawn` (a process) or `around` (a thread: tests)."""

    def __init__(self, pipe: Connection, most: int = 64) -> None:
        self._pipe, self.most = pipe, most
        self.info: Info | None = None
        self.stats: dict[str, Any] = {}
        self.speeds: dict[str, float] = {}
        self.meter = Meter()
        self.failure: str | None = None
        self.process: Any = None
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._reports: list[asyncio.Future[dict[str, Any]]] = []
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Event | None = None
        self._heard_s = time.monotonic()
        self.on_failure: Callable[[], None] = lambda: None
        self.on_loading: Callable[[str, int, int], None] = lambda *_: None

    async def start(self) -> Info:
        """Waits until the model is loaded. EngineFailed says why it could not be."""
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._speak, daemon=True).start()
        await self._ready.wait()
        if self.info is None:
            raise EngineFailed(self.failure or "the engine ended while it was loading", "see the lines above")
        return self.info

    @property
    def alive(self) -> bool:
        """Whether the engine's loop turns: it spoke not long ago and did not fail."""
        return self.failure is None and time.monotonic() - self._heard_s < SILENT_S

    @property
    def active(self) -> int:
        return len(self._queues)

    def admit(self, jobs: int) -> None:
        """Raises Overloaded or EngineFailed when so many more jobs would not be taken now."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        if len(self._queues) + jobs > self.most:
            raise Overloaded(f"{self.most} requests are running or waiting", "try again a little later")

    async def run(self, job: Job) -> AsyncGenerator[Output, None]:
        """Outputs of one job until all its sequences ended; closing it early frees its place within one step.

        Raises Overloaded, BadRequest (the engine refused it) or EngineFailed.
        """
        self.admit(1)
        inbox = self._queues[job.id] = asyncio.Queue()
        left, felt = job.sampling.n, self.meter.begin()
        self._outbox.put(("add", job))
        try:
            while left:
                item = await inbox.get()
                if isinstance(item, HeteroError):
                    left = 0
                    raise item
                left -= item.finish is not None
                felt.take(item)
                yield item
        finally:
            felt.end(left > 0)
            del self._queues[job.id]
            if left:
                self._outbox.put(("abort", job.id))

    async def report(self) -> dict[str, Any]:
        """The proof of execution, from the engine's process."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        asked: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reports.append(asked)
        self._outbox.put(("report",))
        return await asked

    def close(self, wait_s: float = 10.0) -> None:
        """Ends the engine's process."""
        self._outbox.put(("end",))
        self._outbox.put(None)
        if self.process is not None:
            self.process.join(wait_s if self.info is not None else 0.0)      # while it loads it does not listen
            if self.process.is_alive():
                self.process.kill()
                self.process.join()

    # -- the two threads --------------------------------------------------------------------------------------------------------------------

    def _speak(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._pipe.send(message)
            except OSError:                      # the listener sees the same end and tells it
                return

    def _listen(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            while True:
                message = self._pipe.recv()
                loop.call_soon_threadsafe(self._take, message)
        except (EOFError, OSError):
            gone = ("failed", "the engine's process ended")
        except TypeError as e:
            gone = ("failed", f"the engine sent something else: {e}")
        except RuntimeError:                     # the event loop is closed: nobody listens any more
            return
        finally:
            self._pipe.close()
        try:
            loop.call_soon_threadsafe(self._take, gone)
        except RuntimeError:
            return

    def _take(self, message: tuple[Any, ...]) -> None:
        """On the event loop: one message of the worker."""
        kind, *rest = message
        self._heard_s = time.monotonic()
        if kind == "outputs":
            for output in rest[0]:
                if output.id in self._queues:
                    self._queues[output.id].put_nowait(output)
        elif kind == "refused":
            id, text, hint, param = rest
            if id in self._queues:
                self._queues[id].put_nowait(BadRequest(text, hint, param))
        elif kind == "stats":
            self.stats, self.speeds = rest
        elif kind == "report":
            for asked in self._reports:
                if not asked.done():
                    asked.set_result(rest[0])
            self._reports.clear()
        elif kind == "ready":
            self.info = rest[0]
            if self._ready:
                self._ready.set()
        elif kind == "loading":
            self.on_loading(*rest)
        else:
            self.fail(rest[0])

    def fail(self, why: str) -> None:
        """Everybody who waits hears why; nobody new is taken."""
        if self.failure is not None:
            return
        self.failure = why
        error = EngineFailed(why)
        for inbox in self._queues.values():
            inbox.put_nowait(error)
        for asked in self._reports:
            if not asked.done():
                asked.set_exception(error)
        if self._ready:
            self._ready.set()
        self.on_failure()


def spawn(name: str | None, options: Options, most: int) -> Relay:
    """A relay to a new process that loads this model."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker.main, args=(there, name, options), name="hetero-engine", daemon=True)
    process.start()
    there.close()
    made = Relay(here, most)
    made.process = process
    return made


def around(host: Host, most: int = 64, load_s: float = 0.0, fault: str | None = None) -> Relay:
    """A relay to a thread of this process around an engine that is already there: for tests and scripted engines.

    load_s: what loading seems to take; fault: why it fails.
    """
    here, there = multiprocessing.Pipe()

    def work() -> None:
        there.send(("loading", "reading", 0, 1))
        time.sleep(load_s)
        there.send(("ready", host.info) if fault is None else ("failed", fault))
        if fault is None:
            Worker(there, host).run()
        there.close()
    threading.Thread(target=work, daemon=True).start()
    return Relay(here, most)
