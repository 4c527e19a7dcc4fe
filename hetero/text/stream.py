"""Token ids to safe text, one token at a time: whole characters only, nothing of a stop string; knows no model and no network.

One machine serves streams and whole answers: `see` takes a token, `take` gives what may be shown. What is shown is always whole tokens, so that
text, ids and log-probabilities of a chunk describe the same tokens. How often `take` is called changes nothing in what is given in sum.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """One token's share of the text. `data` are its exact bytes (b"" when hidden); a character belongs to the token that completes it."""

    token: int
    data: bytes
    text: str
    special: bool = False


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(p.text for p in pieces)


class Stream:
    """Ids in, pieces out; a `request.Watcher`.

    stop: strings that end the text and are not part of it. A stop that is the spelling of a special token ends at that token.
    ends: ids hidden from the text (end of sequence). min_tokens: no stop string counts before so many tokens.
    strip: drop the one space that sentencepiece puts before the first word (a fresh answer: True; a continued text: False).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), ends: frozenset[int] = frozenset(), min_tokens: int = 0,
                 strip: bool = True) -> None:
        self._tokenizer, self._ends, self._min = tokenizer, ends, min_tokens
        self._stops = [s.encode() for s in stop if s]
        self._stop_ids = {i for s in stop if (i := tokenizer.id_of(s)) is not None and i in tokenizer.specials}
        self._strip = strip and tokenizer.strips
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[Piece] = []
        self._ready: list[Piece] = []
        self._tail = b""                 # bytes of the held pieces
        self.tokens = 0
        self.stopped: str | None = None  # the stop string that ended the text

    def see(self, token: int) -> bool:
        """Takes one token; True when a stop string is complete: the text ends before it."""
        self.tokens += 1
        special = token in self._tokenizer.specials
        hidden = special or token in self._ends
        data = b"" if hidden else self._tokenizer.bytes_of(token)
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        self._held.append(Piece(token, data, self._decoder.decode(data), special))
        self._tail += data
        if self.tokens > self._min:
            if token in self._stop_ids:
                self.stopped = self._tokenizer.added[token]
                self._held.pop()
                return True
            if (found := self._find()) is not None:
                self._cut(*found)
                return True
        self._release(self._safe())
        return False

    def _find(self) -> tuple[int, bytes] | None:
        """Where the first complete stop string starts in the held bytes; of several at one place the longest."""
        found = [(at, -len(s), s) for s in self._stops if (at := self._tail.find(s)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _cut(self, at: int, stop: bytes) -> None:
        """Ends the text at byte `at` of the held bytes; a token that straddles the cut keeps its first part."""
        kept, left = [], at
        for p in self._held:
            if left < len(p.data) or (left == 0 and not p.special):
                if left:
                    kept.append(replace(p, data=p.data[:left]))
                break
            kept.append(p)
            left -= len(p.data)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = [replace(p, text=decoder.decode(p.data, final=i == len(kept) - 1)) for i, p in enumerate(kept)]
        self.stopped = stop.decode()
        self._decoder.reset()
        self._release(len(self._held))

    def _safe(self) -> int:
        """How many held pieces may go: they end on a whole character, and what stays holds every possible start of a stop string."""
        keep = max((k for s in self._stops for k in range(min(len(s) - 1, len(self._tail)), 0, -1) if self._tail.endswith(s[:k])), default=0)
        limit, offset, count = len(self._tail) - keep, 0, 0
        begun = self._decoder.getstate()[0]
        whole = len(self._tail) - len(begun if isinstance(begun, bytes) else b"")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i, p in enumerate(self._held):
            offset += len(p.data)
            if offset > min(limit, whole):
                break
            decoder.decode(p.data)
            if not decoder.getstate()[0]:
                count = i + 1
        return count

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self._tail = b"".join(p.data for p in self._held)

    def take(self) -> list[Piece]:
        """The pieces that may be shown and were not yet given."""
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[Piece]:
        """All that is left, at the end: a stop string that never completed, bytes of a broken character as U+FFFD."""
        if rest := self._decoder.decode(b"", final=True):
            last = max(i for i, p in enumerate(self._held) if p.data)
            self._held[last] = replace(self._held[last], text=self._held[last].text + rest)
        self._release(len(self._held))
        return self.take()

    def fork(self) -> "Stream":
        """An independent copy."""
        twin = Stream.__new__(Stream)
        twin.__dict__.update(self.__dict__)
        twin._held, twin._ready = list(self._held), list(self._ready)
        twin._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin


def render(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), ends: frozenset[int] = frozenset()) -> str:
    """The whole text of an answer: the same machine, fed at once."""
    stream = Stream(tokenizer, stop, ends)
    for i in ids:
        if stream.see(i):
            break
    return text_of(stream.take() + stream.finish())
