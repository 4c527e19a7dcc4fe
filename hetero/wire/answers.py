"""Whole answers of OpenAI's chat and text completions, grown from the engine's outputs one by one; knows no network and no engine.

Sources of the formats: platform.openai.com/docs/api-reference, /chat/object and /completions/object.
"""

import json
import time
from collections.abc import Iterable
from typing import Any, Protocol

from hetero.errors import BadRequest, ContextExceeded, HeteroError
from hetero.request import Output, TokenLogprob
from hetero.text.parse import Parser
from hetero.text.reply import Chunk, Reply
from hetero.text.scan import Event
from hetero.text.stream import Piece
from hetero.text.tokenizer import Tokenizer
from hetero.wire.prepare import Prepared


class Growing(Protocol):
    """An answer to one body: outputs in (`job`: of which of its jobs), the whole body out when all have ended."""

    def add(self, job: int, output: Output) -> object: ...
    def body(self) -> dict[str, Any]: ...


def event(data: Any, name: str = "") -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def error_body(e: HeteroError, status: int) -> dict[str, Any]:
    """The error object of OpenAI's API; the hint is part of the message."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if isinstance(e, ContextExceeded) else None
    message = f"{e.message} ({e.hint})" if e.hint else e.message
    return {"error": {"message": message, "type": kind, "param": e.param if isinstance(e, BadRequest) else None, "code": code}}


def usage(replies: Iterable[Reply], prompts: int = 1) -> dict[str, Any]:
    """Tokens of one request: each prompt once, all answers."""
    all_replies = list(replies)
    each = max(1, len(all_replies) // max(1, prompts))
    timings = [r.answer.timings for r in all_replies]
    prompt, cached = sum(t.prompt_tokens for t in timings[::each]), sum(t.cached_tokens for t in timings[::each])
    made = sum(t.tokens for t in timings)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, "prompt_tokens_details": {"cached_tokens": cached}}


def logprob(tok: Tokenizer, piece: Piece, found: TokenLogprob) -> dict[str, Any]:
    def one(data: bytes, value: float) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}
    return {**one(piece.data, found.logprob), "top_logprobs": [one(tok.bytes_of(i), v) for i, v in found.top]}


class Choice:
    """One answer of a chat request as it grows."""

    def __init__(self, job: Prepared, index: int) -> None:
        self.job, self.index = job, index
        self.reply, self.parser = job.reply(index), job.parser()

    def take(self, output: Output) -> tuple[Chunk, list[Event]]:
        chunk = self.reply.add(output)
        events = self.parser.feed(chunk.pieces)
        return chunk, events + self.parser.finish() if chunk.finish else events

    def logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if not self.job.logprobs:
            return None
        tok = self.job.texts.tokenizer
        return {"content": [logprob(tok, p, l) for p, l in zip(chunk.pieces, chunk.logprobs, strict=True)], "refusal": None}

    def finish_reason(self, chunk: Chunk) -> str:
        return self.parser.message.finish_reason(chunk.finish or "stop")


def message_of(parser: Parser) -> dict[str, Any]:
    """A whole chat message; content is null when there is none beside reasoning or calls."""
    m = parser.message
    found: dict[str, Any] = {"role": "assistant", "content": m.content or (None if m.calls or m.reasoning else "")}
    if m.reasoning:
        found["reasoning_content"] = m.reasoning
    if m.calls:
        found["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in m.calls]
    return found


class ChatAnswer:
    """A whole chat completion."""

    def __init__(self, job: Prepared, model: str) -> None:
        self.job, self.model, self.created = job, model, int(time.time())
        self.choices = [Choice(job, i) for i in range(job.job.sampling.n)]
        self._made: list[dict[str, Any]] = [{} for _ in self.choices]
        self._entries: list[list[Any]] = [[] for _ in self.choices]

    def add(self, job: int, output: Output) -> None:
        choice = self.choices[output.index]
        chunk, _ = choice.take(output)
        if lp := choice.logprobs(chunk):
            self._entries[choice.index] += lp["content"]
        if chunk.finish:
            scores = {"content": self._entries[choice.index], "refusal": None} if self.job.logprobs else None
            self._made[choice.index] = {"index": choice.index, "message": message_of(choice.parser), "finish_reason": choice.finish_reason(chunk),
                                        "logprobs": scores}

    def body(self) -> dict[str, Any]:
        first = self.choices[0].reply.answer
        return {"id": self.job.job.id, "object": "chat.completion", "created": self.created, "model": self.model, "choices": self._made,
                "usage": usage(c.reply for c in self.choices), "timings": first.timings.as_dict(), "seed": first.seed,
                "cache_miss": first.cache_miss}


class Completion:
    """One text completion as it grows, with the prompt in front when it is to be echoed."""

    def __init__(self, job: Prepared, index: int, n: int, echo: bool, silent: bool) -> None:
        self.job, self.index, self.reply, self.silent = job, index, job.reply(n), silent
        self.echo, self.offset = echo, 0

    def take(self, output: Output) -> tuple[str, dict[str, Any] | None, Chunk]:
        chunk = self.reply.add(output)
        pieces: list[tuple[str, TokenLogprob | None]] = []
        text, tok = "", self.job.texts.tokenizer
        if self.echo:
            self.echo, text = False, self.job.prompt.text
            scores = output.prompt_logprobs or (None,) * len(self.job.prompt.ids)
            pieces += [(tok.bytes_of(i).decode("utf-8", "replace"), s) for i, s in zip(self.job.prompt.ids, scores, strict=True)]
        if not self.silent:
            text += chunk.text
            pieces += [(p.data.decode("utf-8", "replace"), l) for p, l in zip(chunk.pieces, chunk.logprobs, strict=False)]
        return text, self._logprobs(pieces) if self.job.logprobs else None, chunk

    def _logprobs(self, pieces: list[tuple[str, TokenLogprob | None]]) -> dict[str, Any]:
        tok = self.job.texts.tokenizer
        offsets = []
        for text, _ in pieces:
            offsets.append(self.offset)
            self.offset += len(text)
        return {"tokens": [t for t, _ in pieces], "token_logprobs": [s.logprob if s else None for _, s in pieces], "text_offset": offsets,
                "top_logprobs": [{tok.bytes_of(i).decode("utf-8", "replace"): v for i, v in s.top} if s else None for _, s in pieces]}


def completions(jobs: list[Prepared], echo: bool, silent: bool) -> list[list[Completion]]:
    n = jobs[0].job.sampling.n
    return [[Completion(job, j * n + i, i, echo, silent) for i in range(n)] for j, job in enumerate(jobs)]


class CompletionAnswer:
    """Whole text completions, of one prompt or several. silent: the prompt alone is wanted."""

    def __init__(self, jobs: list[Prepared], model: str, echo: bool, silent: bool) -> None:
        self.jobs, self.model, self.created = jobs, model, int(time.time())
        self.made = completions(jobs, echo, silent)
        self.flat = [c for group in self.made for c in group]
        self._texts, self._finishes = [""] * len(self.flat), [""] * len(self.flat)
        self._scores = [list[dict[str, Any]]() for _ in self.flat]

    def add(self, job: int, output: Output) -> None:
        c = self.made[job][output.index]
        text, lp, chunk = c.take(output)
        self._texts[c.index] += text
        self._scores[c.index] += [lp] if lp else []
        self._finishes[c.index] = chunk.finish or ""

    def body(self) -> dict[str, Any]:
        choices = [{"index": i, "text": text, "finish_reason": finish,
                    "logprobs": {k: [x for s in scores for x in s[k]] for k in scores[0]} if scores else None}
                   for i, (text, finish, scores) in enumerate(zip(self._texts, self._finishes, self._scores, strict=True))]
        return {"id": self.jobs[0].job.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices,
                "usage": usage((c.reply for c in self.flat), len(self.jobs)), "timings": self.flat[0].reply.answer.timings.as_dict()}
