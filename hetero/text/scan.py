"""A buffer that grows while a coroutine reads it, and what was understood so far as events and their sum; knows no way of writing.

`Scanner` gives text on as soon as it cannot be part of a marker, whatever the chunks it came in.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Waits = Generator[None, None, Any]
Sink = Callable[[str], None]


@dataclass(frozen=True)
class Event:
    """What was understood: `kind` is reasoning | content | call (a call begins: name, id) | arguments (a part of its JSON) | end (it is whole)."""

    kind: str
    text: str = ""
    index: int = 0
    name: str = ""
    id: str = ""


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    whole: bool = False


@dataclass
class Message:
    """The sum of events: a whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for e in events:
            if e.kind == "reasoning":
                self.reasoning += e.text
            elif e.kind == "content":
                self.content += e.text
            elif e.kind == "call":
                self.calls.append(Call(e.id, e.name))
            elif e.kind == "arguments":
                self.calls[e.index].arguments += e.text
            else:
                self.calls[e.index].whole = True

    def finish_reason(self, engine: str) -> str:
        """The engine's reason, or "tool_calls" when it ended by itself with nothing but whole calls behind it."""
        return "tool_calls" if engine == "stop" and self.calls and all(c.whole for c in self.calls) else engine


class Scanner:
    """A growing text and the place read so far."""

    def __init__(self, text: str = "") -> None:
        self._buf, self._ended = text, False

    def _until(self, ends: Sequence[str], sink: Sink) -> Waits:
        """Gives text to `sink` up to the first of `ends`, as soon as it cannot be a part of one; returns that end, "" when the text ended."""
        while True:
            found = min(((at, -len(m), m) for m in ends if (at := self._buf.find(m)) >= 0), default=None)
            if found:
                at, _, marker = found
                text, self._buf = self._buf[:at], self._buf[at + len(marker):]
                sink(text)
                return marker
            keep = 0 if self._ended else max((k for m in ends for k in range(min(len(m) - 1, len(self._buf)), 0, -1)
                                              if self._buf.endswith(m[:k])), default=0)
            cut = len(self._buf) - keep
            text, self._buf = self._buf[:cut], self._buf[cut:]
            sink(text)
            if self._ended:
                return ""
            yield

    def _collect(self, *ends: str) -> Waits:
        """(text, the end that was found or "")."""
        parts: list[str] = []
        marker = yield from self._until(ends, parts.append)
        return "".join(parts), marker

    def _back(self, text: str) -> None:
        self._buf = text + self._buf

    def _value(self, sink: Sink) -> Waits:
        """Gives one JSON object or list to `sink`; True when it was closed."""
        depth, quoted, escaped = 0, False, False
        while True:
            for i, c in enumerate(self._buf):
                if quoted:
                    quoted, escaped = escaped or c != '"', not escaped and c == "\\"
                elif c == '"':
                    quoted = True
                elif c in "{[":
                    depth += 1
                elif c in "}]":
                    depth -= 1
                    if depth <= 0:
                        text, self._buf = self._buf[: i + 1], self._buf[i + 1:]
                        sink(text)
                        return True
            text, self._buf = self._buf, ""
            sink(text)
            if self._ended:
                return False
            yield
