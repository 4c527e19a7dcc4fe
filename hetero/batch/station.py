"""The engine of one machine of a cluster, as an actor: blocks of rows in, their lines out; knows no file and no other machine."""

import queue
import socket
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from hetero import __version__
from hetero.batch import manifest
from hetero.batch.desk import desk_of
from hetero.batch.hands import Order
from hetero.batch.mill import Done, Mill, item_of
from hetero.batch.rows import Line
from hetero.errors import BadOption, EngineFailed, HeteroError
from hetero.llm import LLM


@dataclass
class Call:
    """A block at a station."""

    left: int
    found: list[dict[str, Any]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class Station:
    """The engine of one machine. `run` is called from many threads, the engine from one."""

    def __init__(self, order: Order) -> None:
        self.machine = f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()[:8]}"
        if order.version != __version__:
            raise BadOption(f"{self.machine} has hetero {__version__}, the batch was begun by {order.version}", "install the same version everywhere")
        self.model = LLM(order.name, options=order.options)
        if manifest.fingerprint(self.model.source) != order.fingerprint:
            raise BadOption(f"{self.machine}: {order.name} is another model than the one on the machine that reads the input", "copy the same files")
        self.model.generate([[0] * 4], replace(self.model.sampling, max_tokens=2, ignore_eos=True))
        self.desk = desk_of(self.model.info(), order.wanted)
        self.mill = Mill(self.model.engine, self.desk)
        self.calls: dict[int, list[Call]] = {}       # who waits for a turn: two, when Ray asked again while it ran
        self.inbox: queue.SimpleQueue[tuple[Call, dict[str, Any]]] = queue.SimpleQueue()
        self.draining, self.failure = False, ""      # draining: what has not begun comes back unfinished
        threading.Thread(target=self._loop, daemon=True).start()

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows to their lines. Raises EngineFailed."""
        call = Call(len(rows))
        for row in rows:
            self.inbox.put((call, row))
        while not call.ended.wait(1.0):
            if self.failure:
                break
        if self.failure:
            raise EngineFailed(f"{self.machine}: {self.failure}", "the rows that ran there are not finished: --resume")
        return call.found

    def _loop(self) -> None:
        try:
            while True:
                while not self.mill.full and not (self.inbox.empty() and not self.mill.idle):
                    self._take(*self.inbox.get())
                before = self.model.engine.stats().cached_tokens
                finished = self.mill.step()
                cached = self.model.engine.stats().cached_tokens - before
                for i, done in enumerate(finished):
                    for call in self.calls.pop(done.turn):
                        self._give(call, done, cached if i == 0 else 0)
        except HeteroError as e:
            self.failure = e.message
        except Exception as e:  # noqa: BLE001  the thread's outer door: whoever waits must hear of it
            self.failure = f"{type(e).__name__}: {e}"

    def _take(self, call: Call, row: dict[str, Any]) -> None:
        if self.draining:
            self._give(call, None)
            return
        if row["turn"] in self.calls:
            self.calls[row["turn"]].append(call)
            return
        item = item_of(Line(row["turn"], row["number"], row["data"]), row["first"], self.desk)
        if item.ready is not None:
            self.calls[item.turn] = [call]
            self.mill.start(item.ready)
        else:
            self._give(call, Done(item.turn, item.failed or b"", False))

    def _give(self, call: Call, done: Done | None, cached: int = 0) -> None:
        if done is not None:
            call.found.append({"turn": done.turn, "good": done.good, "data": done.data, "prompt": done.prompt_tokens, "cached": cached,
                               "tokens": done.tokens, "machine": self.machine})
        call.left -= 1
        if not call.left:
            call.ended.set()
