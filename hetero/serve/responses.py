"""OpenAI's Responses API, stateless, as a view over `wire.responses`; stores nothing."""

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

from hetero.errors import HeteroError
from hetero.serve import openai
from hetero.serve.relay import Relay
from hetero.serve.stream import View, merged, openai_error
from hetero.wire import prepare
from hetero.wire.answers import event
from hetero.wire.prepare import Prepared
from hetero.wire.responses import ResponseAnswer, ResponsesRequest, chat_request


async def events(relay: Relay, jobs: list[Prepared], model: str, body: ResponsesRequest) -> AsyncGenerator[str, None]:
    """Events as things happen, the whole response last."""
    answer = ResponseAnswer(body, jobs[0], model)
    for told in answer.begin():
        yield told
    async with aclosing(merged(relay, jobs)) as outputs:
        async for _, output in outputs:
            for told in answer.add(0, output):
                yield told
    for told in answer.end():
        yield told


def whole(relay: Relay, jobs: list[Prepared], model: str, body: ResponsesRequest) -> Awaitable[dict[str, Any]]:
    return openai.whole(relay, jobs, ResponseAnswer(body, jobs[0], model))


def fault(e: HeteroError) -> str:
    return event({"type": "error", "sequence_number": 0, **openai_error(e)["error"]}, "error")


VIEW = View(lambda body, texts: [prepare.chat(chat_request(body), texts)], events, whole, fault)
