"""OpenAI's chat and text completions over prepared jobs, whole or as events of a stream; knows no routes."""

import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

from hetero.request import Output
from hetero.serve.relay import Relay
from hetero.serve.stream import View, merged, openai_error
from hetero.text.scan import Event
from hetero.wire import prepare
from hetero.wire.answers import ChatAnswer, Choice, CompletionAnswer, Growing, completions, event, usage
from hetero.wire.prepare import Prepared
from hetero.wire.schema import ChatRequest, CompletionRequest


def delta_of(e: Event) -> dict[str, Any]:
    """One event as a chat delta; the end of a call says nothing."""
    if e.kind == "reasoning":
        return {"reasoning_content": e.text}
    if e.kind == "content":
        return {"content": e.text}
    if e.kind == "call":
        return {"tool_calls": [{"index": e.index, "id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}


def wants_usage(body: Any) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def progress(output: Output, began: float) -> dict[str, Any]:
    """How far a prompt is read, in the words of llama.cpp's server."""
    return {"prompt_progress": {"total": output.prompt_tokens, "cache": output.cached_tokens, "processed": output.read_tokens or output.prompt_tokens,
                                "time_ms": round((time.monotonic() - began) * 1e3)}}


async def whole(relay: Relay, jobs: list[Prepared], answer: Growing) -> dict[str, Any]:
    """The answer's body, when every job has ended."""
    async with aclosing(merged(relay, jobs)) as outputs:
        async for j, output in outputs:
            answer.add(j, output)
    return answer.body()


async def chat_events(relay: Relay, jobs: list[Prepared], model: str, body: ChatRequest) -> AsyncGenerator[str, None]:
    """The same as server-sent events, up to [DONE]."""
    job, with_usage, began, reading = jobs[0], wants_usage(body), time.monotonic(), bool(body.return_progress)
    choices = [Choice(job, i) for i in range(job.job.sampling.n)]
    head = {"id": job.job.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}

    def chunk_of(index: int, delta: dict[str, Any], finish: str | None = None, lp: Any = None, **more: Any) -> str:
        said = {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish, "logprobs": lp}], **more}
        return event({**said, "usage": None} if with_usage else said)
    for choice in choices:
        yield chunk_of(choice.index, {"role": "assistant", "content": ""})
    async with aclosing(merged(relay, jobs)) as outputs:
        async for _, output in outputs:
            choice = choices[output.index]
            if reading:                            # the last is told with the first token
                yield chunk_of(choice.index, {}, **progress(output, began))
                reading = output.read_tokens > 0
                if reading:
                    continue
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


async def complete_events(relay: Relay, jobs: list[Prepared], model: str, body: CompletionRequest) -> AsyncGenerator[str, None]:
    """The same as server-sent events, up to [DONE]."""
    made, with_usage, began = completions(jobs, bool(body.echo), body.max_tokens == 0), wants_usage(body), time.monotonic()
    unread = {(j, 0) for j in range(len(jobs))} if body.return_progress else set()
    head = {"id": jobs[0].job.id, "object": "text_completion", "created": int(time.time()), "model": model, **({"usage": None} if with_usage else {})}
    async with aclosing(merged(relay, jobs)) as outputs:
        async for j, output in outputs:
            c = made[j][output.index]
            if (j, output.index) in unread:
                told = {"index": c.index, "text": "", "finish_reason": None, "logprobs": None}
                yield event({**head, "choices": [told], **progress(output, began)})
                if output.read_tokens:
                    continue
                unread.discard((j, output.index))
            text, lp, chunk = c.take(output)
            if text or chunk.finish or (lp and lp["tokens"]):
                yield event({**head, "choices": [{"index": c.index, "text": text, "finish_reason": chunk.finish, "logprobs": lp}]})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage((c.reply for group in made for c in group), len(jobs))})
    yield event("[DONE]")


def error_events(e: Any) -> str:
    """A fault in the middle of a stream, in OpenAI's way."""
    return event(openai_error(e)) + event("[DONE]")


def chat_whole(relay: Relay, jobs: list[Prepared], model: str, body: ChatRequest) -> Awaitable[dict[str, Any]]:
    return whole(relay, jobs, ChatAnswer(jobs[0], model))


def text_whole(relay: Relay, jobs: list[Prepared], model: str, body: CompletionRequest) -> Awaitable[dict[str, Any]]:
    return whole(relay, jobs, CompletionAnswer(jobs, model, bool(body.echo), body.max_tokens == 0))


CHAT = View(lambda body, texts: [prepare.chat(body, texts)], chat_events, chat_whole, error_events)
TEXT = View(prepare.completions, complete_events, text_whole, error_events)
