"""Outputs of the engine to what a reader gets: chunks of safe text, the whole answer, its timings; knows no model and no network.

`Reply` is the one place where tokens become an answer; a stream renders its chunks, a whole answer is their sum.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetero.errors import BadCheckpoint
from hetero.request import Output, Sampling, TokenLogprob
from hetero.text.stream import Piece, Stream, text_of
from hetero.text.tokenizer import Tokenizer

# generation_config.json's word -> (Sampling field, type, lowest, highest)
DEFAULTS = {"temperature": ("temperature", float, 0.0, 100.0), "top_k": ("top_k", int, 0, 2**31), "top_p": ("top_p", float, 0.0, 1.0),
            "min_p": ("min_p", float, 0.0, 1.0), "repetition_penalty": ("repetition_penalty", float, 0.001, 1000.0)}


def sampling_defaults(generation: Mapping[str, Any], place: str = "generation_config.json") -> tuple[Sampling, dict[str, str]]:
    """What the model's authors recommend, and where each value is from. Absent, null and unknown keys are neutral; `do_sample: false` is greedy.

    Raises BadCheckpoint for a value that cannot be meant.
    """
    found: dict[str, Any] = {}
    for key, (name, kind, low, high) in DEFAULTS.items():
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadCheckpoint(f"{place}: {key} is {value!r}, but must be a number from {low:g} to {high:g}", f"correct {key} or remove it")
        found[name] = kind(value)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    sources = {f.name: place if f.name in found else "default" for f in fields(Sampling)}
    return replace(Sampling(), **found), sources


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens of one answer. Rates are 0 where nothing was measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    ttft_s: float = 0.0                  # from the request to its first token
    total_s: float = 0.0

    @property
    def decode_tok_s(self) -> float:
        return (self.tokens - 1) / (self.total_s - self.ttft_s) if self.tokens > 1 and self.total_s > self.ttft_s else 0.0

    @property
    def prefill_tok_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.ttft_s if self.ttft_s > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        values: dict[str, float] = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"decode_tok_s": self.decode_tok_s, "prefill_tok_s": self.prefill_tok_s}


@dataclass(frozen=True)
class Chunk:
    """What one step shows of one answer: whole tokens, their text and log-probabilities (as many as pieces, when they were asked for)."""

    index: int
    pieces: tuple[Piece, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None            # stop | length | abort | error
    error: str | None = None
    timings: Timings = Timings()         # so far; the last chunk's are the answer's

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass
class Answer:
    """One whole answer. `token_ids` are all tokens that were made, the ending ones included; `pieces` are those that are shown."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cache_miss: str | None = None
    seed: int = 0
    timings: Timings = field(default_factory=Timings)


class Reply:
    """One sequence's answer as it grows. `strip`: the answer begins a message (see `Stream`)."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, index: int = 0, strip: bool = True) -> None:
        ends = frozenset() if sampling.ignore_eos else tokenizer.ends() | frozenset(sampling.stop_ids)
        self.answer, self._logprobs = Answer(index), deque[TokenLogprob]()
        self._stream = Stream(tokenizer, sampling.stop, ends, sampling.min_tokens, strip)
        self._asked, self._began, self._first = sampling.logprobs is not None, time.monotonic(), 0.0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stream.stopped

    def add(self, output: Output) -> Chunk:
        """Takes one output of the engine; gives what may be shown now, at its `finish` all that is left."""
        answer, now = self.answer, time.monotonic()
        if output.tokens and not answer.token_ids:
            self._first = now
        for token in output.tokens:
            answer.token_ids.append(token)
            if self._stream.see(token):
                break
        self._logprobs.extend(output.logprobs)
        pieces = self._stream.take()
        if output.finish is not None:
            pieces += self._stream.finish()
            answer.finish_reason, answer.error = output.finish, output.error
        logprobs = tuple(self._logprobs.popleft() for _ in pieces) if self._asked else ()
        answer.pieces += pieces
        answer.logprobs += logprobs
        answer.text += text_of(pieces)
        answer.seed, answer.cache_miss = output.seed, output.cache_miss or answer.cache_miss
        answer.timings = Timings(output.prompt_tokens, output.cached_tokens, len(answer.token_ids),
                                 self._first - self._began if self._first else 0.0, now - self._began)
        return Chunk(answer.index, tuple(pieces), logprobs, output.finish, output.error, answer.timings)


def watcher(tokenizer: Tokenizer, sampling: Sampling) -> Stream | None:
    """What the engine needs to see stop strings; None when there are none (ids that end a text are the engine's own matter)."""
    return Stream(tokenizer, sampling.stop, frozenset(), sampling.min_tokens) if sampling.stop else None


def collect(replies: Iterable[Reply]) -> list[Answer]:
    """The answers so far, by index."""
    return sorted((r.answer for r in replies), key=lambda a: a.index)
