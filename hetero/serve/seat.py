"""Which model is served: loads it beside the event loop, gives it up again, and says where that stands; knows no route and no key."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import HeteroError
from hetero.serve.metrics import Meter
from hetero.serve.relay import NotReady, Relay
from hetero.wire.prepare import Texts, serves
from hetero.wire.records import Info


class Conflict(HeteroError):
    """What was asked for cannot be begun now."""


class UnknownModel(HeteroError):
    """A model was named that is not served."""


@dataclass(frozen=True)
class Loaded:
    """A model that answers."""

    relay: Relay
    texts: Texts
    names: tuple[str, ...]               # the first is what answers call it

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """A model that is named must be this one. Raises UnknownModel."""
        if not serves(name, self.names, self.texts.info.name):
            raise UnknownModel(f"the model {str(name)[:200]!r} is not served here; {self.name!r} is")


class Seat:
    """One model at a time. `start` makes the relay of a source, `read` (which may take a while) the text side of what it loaded.

    `state`: loading | ready | leaving | empty; `trouble`: why it is empty, when that was not meant.
    """

    def __init__(self, start: Callable[[str | None], Relay], read: Callable[[Info], Texts], source: str | None = None, names: tuple[str, ...] = (),
                 drain_s: float = 60.0) -> None:
        self._start, self._read, self._source, self._names, self._drain_s = start, read, source, names, drain_s
        self._relay: Relay | None = None
        self._loaded: Loaded | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.meter = Meter()                 # over all models
        self.state, self.trouble, self.shown = "empty", "", names or (Path(source).name if source else "embedded",)
        self.progress: tuple[str, int, int] = ("", 0, 0)
        self.on_failure: Callable[[str], None] = lambda _: None
        self.on_progress: Callable[[str, int, int], None] = lambda *_: None
        self.on_leave: Callable[[], None] = lambda: None       # the model is given up: what others keep of it goes too

    def here(self) -> Loaded:
        """The model that answers. Raises NotReady."""
        if self._loaded is not None:
            return self._loaded
        why = {"loading": "the model is being loaded", "leaving": "the model is being unloaded"}.get(self.state, "no model is loaded")
        raise NotReady(f"{why}: {self.trouble}" if self.trouble else why, "wait until /ready says 200" if self.state == "loading" else "")

    @property
    def loaded(self) -> Loaded | None:
        return self._loaded

    def claim(self) -> None:
        """From here on nobody else changes what is loaded, and /health says so. Raises Conflict."""
        if self.state in ("loading", "leaving"):
            raise Conflict(f"a model is being {'loaded' if self.state == 'loading' else 'unloaded'}", "wait until it is over")
        self.state = "loading" if self._loaded is None else "leaving"

    async def load(self, source: str | None = None, name: str | None = None) -> Loaded:
        """Loads `source` (None: what the server was started with); a model that is there first finishes what it does, and goes.

        Raises Conflict, or what the loading said.
        """
        self.claim()
        return await self._load(source, name)

    async def _load(self, source: str | None, name: str | None) -> Loaded:
        await self._leave(force=False)
        own = source is None or source == self._source
        source = self._source if own else source
        self.shown = (name,) if name else self._names if own and self._names else (Path(source).name if source else "embedded",)
        self.state, self.trouble, self.progress = "loading", "", ("starting", 0, 0)
        relay = self._relay = self._start(source)
        relay.on_loading, relay.meter = self._told, self.meter
        try:
            info = await relay.start()
            texts = await asyncio.to_thread(self._read, info)
        except HeteroError as e:
            self.state, self.trouble = "empty", " ".join(e.message.split())
            await asyncio.to_thread(relay.close)
            raise
        relay.on_failure = lambda: self.on_failure(relay.failure or "")
        self.shown = (name,) if name else self._names if own and self._names else (info.name,)
        self._loaded, self.state = Loaded(relay, texts, self.shown), "ready"
        return self._loaded

    def begin(self, source: str | None, name: str | None) -> "asyncio.Task[Loaded]":
        """`load` in the background; how it goes is told by `state` and `trouble`. Raises Conflict at once."""
        self.claim()
        return self.begin_claimed(source, name)

    def begin_claimed(self, source: str | None, name: str | None) -> "asyncio.Task[Loaded]":
        """`begin` by the one who claimed before."""
        task = asyncio.ensure_future(self._load(source, name))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()             # told by `trouble`

    def _told(self, doing: str, done: int, total: int) -> None:
        self.progress = (doing, done, total)
        self.on_progress(doing, done, total)

    async def unload(self, force: bool = False) -> None:
        """Gives the model up: nobody new is taken, those inside are finished (at most `drain_s`; not with `force`). Raises Conflict."""
        self.claim()
        await self._leave(force)
        self.state = "empty"

    async def _leave(self, force: bool) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        end = time.monotonic() + (0.0 if force else self._drain_s)
        relay = loaded.relay
        relay.on_failure = lambda: None
        while relay.active and relay.failure is None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        relay.fail("the model was unloaded")
        await asyncio.to_thread(relay.close)
        await asyncio.to_thread(self._let_go, loaded)
        self._relay = None

    def _let_go(self, loaded: Loaded) -> None:
        loaded.texts.checker.close()
        self.on_leave()

    def close(self) -> None:
        """Ends whatever is there, at once."""
        if self._loaded is not None:
            self._let_go(self._loaded)
        if self._relay is not None:
            self._relay.close()
