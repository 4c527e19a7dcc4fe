"""Work in a process of its own: it holds no interpreter's lock of ours, and what takes too long is ended; knows nothing of the work.

The process ends with its parent, for its pipe does; Ctrl-C on the terminal is the parent's matter.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hetero.errors import HeteroError

START_S = 120.0                          # the time limit of a call is not for the start of a process


class Late(Exception):
    """A call took too long, or its process died of it."""


def _serve(pipe: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    work = make(*args)
    pipe.send(None)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(work(asked))
        except HeteroError as e:
            pipe.send(e)


class Apart:
    """`make(*args())` in another process is a function that `ask` calls there; all of it must pickle. Started at the first call, which ends it
    when it takes longer than `seconds`; the next starts another."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], args: Callable[[], tuple[Any, ...]], seconds: float) -> None:
        self.seconds = seconds
        self._make, self._args = make, args
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, what: Any) -> Any:
        """The answer. Raises the HeteroError that the work raised, or Late. May be called from any thread; one call at a time is worked at."""
        with self._lock:
            try:
                pipe = self._start()
                pipe.send(what)
                if not pipe.poll(self.seconds):
                    raise EOFError
                found = pipe.recv()
            except (EOFError, OSError):
                self.close()
                raise Late from None
        if isinstance(found, HeteroError):
            raise found
        return found

    def _start(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(there, self._make, self._args()), daemon=True)
            self._process.start()
            there.close()
            if not self._pipe.poll(START_S):
                raise EOFError
            self._pipe.recv()
        return self._pipe

    def close(self) -> None:
        """Ends the process."""
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None
