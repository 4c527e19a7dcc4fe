"""OpenAI's chat and text completions over prepared jobs: chunks for streams, the same events summed for whole answers; knows no routes."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from hetero.request import Output, TokenLogprob
from hetero.serve.prepare import Prepared
from hetero.serve.relay import Relay
from hetero.serve.stream import event, merged, openai_error
from hetero.text.parse import Parser
from hetero.text.reply import Chunk, Reply
from hetero.text.scan import Event
from hetero.text.stream import Piece
from hetero.text.tokenizer import Tokenizer


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


def delta_of(e: Event) -> dict[str, Any]:
    """One event as a chat delta; the end of a call says nothing."""
    if e.kind == "reasoning":
        return {"reasoning_content": e.text}
    if e.kind == "content":
        return {"content": e.text}
    if e.kind == "call":
        return {"tool_calls": [{"index": e.index, "id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}


async def chat(relay: Relay, job: Prepared, model: str) -> dict[str, Any]:
    """A whole chat completion."""
    choices = [Choice(job, i) for i in range(job.job.sampling.n)]
    made: list[dict[str, Any]] = [{} for _ in choices]
    entries: list[list[Any]] = [[] for _ in choices]
    created = int(time.time())
    async with aclosing(merged(relay, [job])) as outputs:
        async for _, output in outputs:
            choice = choices[output.index]
            chunk, _ = choice.take(output)
            if lp := choice.logprobs(chunk):
                entries[choice.index] += lp["content"]
            if chunk.finish:
                made[choice.index] = {"index": choice.index, "message": message_of(choice.parser), "finish_reason": choice.finish_reason(chunk),
                                      "logprobs": {"content": entries[choice.index], "refusal": None} if job.logprobs else None}
    return {"id": job.job.id, "object": "chat.completion", "created": created, "model": model, "choices": made,
            "usage": usage(c.reply for c in choices), "timings": choices[0].reply.answer.timings.as_dict(),
            "seed": choices[0].reply.answer.seed, "cache_miss": choices[0].reply.answer.cache_miss}


async def chat_events(relay: Relay, job: Prepared, model: str, with_usage: bool) -> AsyncGenerator[str, None]:
    """The same as server-sent events, up to [DONE]."""
    choices = [Choice(job, i) for i in range(job.job.sampling.n)]
    head = {"id": job.job.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}

    def chunk_of(index: int, delta: dict[str, Any], finish: str | None = None, lp: Any = None, **more: Any) -> str:
        body = {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish, "logprobs": lp}], **more}
        return event({**body, "usage": None} if with_usage else body)
    for choice in choices:
        yield chunk_of(choice.index, {"role": "assistant", "content": ""})
    async with aclosing(merged(relay, [job])) as outputs:
        async for _, output in outputs:
            choice = choices[output.index]
            chunk, events = choice.take(output)
            lp = choice.logprobs(chunk)
            for e in events:
                if e.kind != "end":
                    yield chunk_of(choice.index, delta_of(e), lp=lp)
                    lp = None
            if lp and lp["content"]:               # tokens that show nothing of their own (markers, ends)
                yield chunk_of(choice.index, {}, lp=lp)
            if chunk.finish:
                yield chunk_of(choice.index, {}, choice.finish_reason(chunk), timings=chunk.timings.as_dict())
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(c.reply for c in choices)})
    yield event("[DONE]")


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


def _completions(jobs: list[Prepared], echo: bool, silent: bool) -> list[list[Completion]]:
    n = jobs[0].job.sampling.n
    return [[Completion(job, j * n + i, i, echo, silent) for i in range(n)] for j, job in enumerate(jobs)]


async def complete(relay: Relay, jobs: list[Prepared], model: str, echo: bool, silent: bool) -> dict[str, Any]:
    """Whole text completions. silent: the prompt alone is wanted."""
    made = _completions(jobs, echo, silent)
    flat = [c for group in made for c in group]
    texts, scores, finishes = [""] * len(flat), [list[dict[str, Any]]() for _ in flat], [""] * len(flat)
    async with aclosing(merged(relay, jobs)) as outputs:
        async for j, output in outputs:
            c = made[j][output.index]
            text, lp, chunk = c.take(output)
            texts[c.index] += text
            scores[c.index] += [lp] if lp else []
            finishes[c.index] = chunk.finish or ""
    choices = [{"index": i, "text": texts[i], "finish_reason": finishes[i],
                "logprobs": {k: [x for s in scores[i] for x in s[k]] for k in scores[i][0]} if scores[i] else None} for i in range(len(flat))]
    return {"id": jobs[0].job.id, "object": "text_completion", "created": int(time.time()), "model": model, "choices": choices,
            "usage": usage((c.reply for c in flat), len(jobs)), "timings": flat[0].reply.answer.timings.as_dict()}


async def complete_events(relay: Relay, jobs: list[Prepared], model: str, echo: bool, silent: bool, with_usage: bool) -> AsyncGenerator[str, None]:
    """The same as server-sent events, up to [DONE]."""
    made = _completions(jobs, echo, silent)
    head = {"id": jobs[0].job.id, "object": "text_completion", "created": int(time.time()), "model": model, **({"usage": None} if with_usage else {})}
    async with aclosing(merged(relay, jobs)) as outputs:
        async for j, output in outputs:
            c = made[j][output.index]
            text, lp, chunk = c.take(output)
            if text or chunk.finish or (lp and lp["tokens"]):
                yield event({**head, "choices": [{"index": c.index, "text": text, "finish_reason": chunk.finish, "logprobs": lp}]})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage((c.reply for group in made for c in group), len(jobs))})
    yield event("[DONE]")


def error_events(e: Any) -> str:
    """A fault in the middle of a stream, in OpenAI's way."""
    return event(openai_error(e)) + event("[DONE]")
