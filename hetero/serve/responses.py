"""OpenAI's Responses API as routes over `wire.responses`; stores nothing."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request

from hetero.errors import HeteroError
from hetero.serve.openai import whole
from hetero.serve.relay import Relay
from hetero.serve.stream import guarded, merged, openai_error, sse
from hetero.wire import prepare
from hetero.wire.answers import event
from hetero.wire.prepare import Prepared
from hetero.wire.responses import ResponseAnswer, ResponsesRequest, chat_request


async def run(relay: Relay, answer: ResponseAnswer, job: Prepared) -> AsyncGenerator[str, None]:
    """Events as things happen, the whole response last."""
    for told in answer.begin():
        yield told
    async with aclosing(merged(relay, [job])) as outputs:
        async for _, output in outputs:
            for told in answer.add(0, output):
                yield told
    for told in answer.end():
        yield told


def add_routes(app: FastAPI, desk: Any) -> None:
    @app.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Any:
        desk.note(body)
        desk.check_model(body.model)
        desk.relay.admit(1)
        job = await desk.off(lambda: prepare.chat(chat_request(body), desk.texts))
        desk.relay.admit(1)

        answer = ResponseAnswer(body, job, desk.name)

        def shape(e: HeteroError) -> str:
            return event({"type": "error", "sequence_number": 0, **openai_error(e)["error"]}, "error")
        if body.stream:
            return sse(guarded(desk.limited(desk.meter.watch(run(desk.relay, answer, job))), shape))
        return await desk.whole(request, desk.meter.one(whole(desk.relay, [job], answer)))
