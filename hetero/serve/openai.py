"""OpenAI's chat and text completions over prepared jobs, whole or as events of a stream; knows no routes."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from hetero.serve.relay import Relay
from hetero.serve.stream import merged, openai_error
from hetero.text.scan import Event
from hetero.wire.answers import Choice, Growing, completions, event, usage
from hetero.wire.prepare import Prepared


def delta_of(e: Event) -> dict[str, Any]:
    """One event as a chat delta; the end of a call says nothing."""
    if e.kind == "reasoning":
        return {"reasoning_content": e.text}
    if e.kind == "content":
        return {"content": e.text}
    if e.kind == "call":
        return {"tool_calls": [{"index": e.index, "id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}


async def whole(relay: Relay, jobs: list[Prepared], answer: Growing) -> dict[str, Any]:
    """The answer's body, when every job has ended."""
    async with aclosing(merged(relay, jobs)) as outputs:
        async for j, output in outputs:
            answer.add(j, output)
    return answer.body()


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


async def complete_events(relay: Relay, jobs: list[Prepared], model: str, echo: bool, silent: bool, with_usage: bool) -> AsyncGenerator[str, None]:
    """The same as server-sent events, up to [DONE]."""
    made = completions(jobs, echo, silent)
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
