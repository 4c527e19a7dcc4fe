"""Answers on the wire: server-sent events with keep-alive, whole answers that end with their client, errors in each API's shape; knows no model."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from hetero.errors import BadRequest, EngineFailed, HeteroError
from hetero.request import Output
from hetero.serve.relay import NotReady, Overloaded, Relay
from hetero.serve.seat import Conflict, UnknownModel
from hetero.wire.answers import error_body
from hetero.wire.prepare import Prepared, Texts

KEEP_ALIVE_S = 10.0
T = TypeVar("T")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Gone(Exception):
    """The client closed the connection."""


STATUS = {BadRequest: 400, UnknownModel: 404, Conflict: 409, Overloaded: 429, NotReady: 503, EngineFailed: 503}
CODES = {UnknownModel: "model_not_found", NotReady: "model_not_ready"}


@dataclass(frozen=True)
class View:
    """One API's way to ask and to answer: its body to jobs, jobs to events and to a whole answer, a fault in the middle of a stream to an event."""

    prepare: Callable[[Any, Texts], list[Prepared]]
    events: Callable[[Relay, list[Prepared], str, Any], AsyncGenerator[str, None]]
    whole: Callable[[Relay, list[Prepared], str, Any], Awaitable[dict[str, Any]]]
    fault: Callable[[HeteroError], str]
    named: bool = True                   # a model that the body names must be the one that is served


def status_of(e: HeteroError) -> int:
    return next((status for kind, status in STATUS.items() if isinstance(e, kind)), 500)


def openai_error(e: HeteroError) -> dict[str, Any]:
    """The error object of OpenAI's API."""
    found = error_body(e, status_of(e))
    found["error"]["code"] = next((code for of, code in CODES.items() if isinstance(e, of)), found["error"]["code"])
    return found


def sse(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """Events as a response. The client's leaving closes the generator, and with it the request."""
    return StreamingResponse(kept_alive(events), media_type="text/event-stream", headers=HEADERS)


async def kept_alive(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The same events, with a comment when nothing came for a while, so that proxies keep the connection."""
    try:
        while True:
            waiting = asyncio.ensure_future(anext(events))
            try:
                while not (await asyncio.wait([waiting], timeout=KEEP_ALIVE_S))[0]:
                    yield ": keep-alive\n\n"
            except BaseException:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                raise
            try:
                yield waiting.result()
            except StopAsyncIteration:
                return
    finally:
        await events.aclose()


async def merged(relay: Relay, jobs: list[Prepared]) -> AsyncGenerator[tuple[int, Output], None]:
    """(which job, output) of several jobs as they come."""
    if len(jobs) == 1:
        async for output in each(relay, jobs[0]):
            yield 0, output
        return
    inbox: asyncio.Queue[tuple[int, Output] | BaseException | None] = asyncio.Queue()

    async def pump(i: int, job: Prepared) -> None:
        try:
            async for output in each(relay, job):
                inbox.put_nowait((i, output))
            inbox.put_nowait(None)
        except HeteroError as e:
            inbox.put_nowait(e)
    tasks = [asyncio.ensure_future(pump(i, job)) for i, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            item = await inbox.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def each(relay: Relay, job: Prepared) -> AsyncIterator[Output]:
    """Outputs of a job; a failed sequence raises what it failed of."""
    outputs = relay.run(job.job)
    try:
        async for output in outputs:
            if output.finish == "error":
                raise EngineFailed(output.error or "the engine could not go on with this request")
            yield output
    finally:
        await outputs.aclose()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (Gone)."""
    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for t in (task, left):
            t.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def guarded(events: AsyncGenerator[str, None], shape: Callable[[HeteroError], str]) -> AsyncGenerator[str, None]:
    """A fault in the middle of a stream becomes an event; the stream then ends."""
    try:
        async for e in events:
            yield e
    except HeteroError as fault:
        yield shape(fault)
    finally:
        await events.aclose()


async def limited(events: AsyncGenerator[str, None], limit_s: float) -> AsyncGenerator[str, None]:
    """The same events until the time limit; then EngineFailed, also when nothing came at all."""
    end = asyncio.get_running_loop().time() + limit_s
    try:
        while True:
            try:
                async with asyncio.timeout_at(end):
                    e = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise EngineFailed(f"the answer took more than {limit_s:g} s", "ask for fewer tokens") from None
            yield e
    finally:
        await events.aclose()


def failed(e: HeteroError, body: dict[str, Any]) -> JSONResponse:
    """An error as a response."""
    status = status_of(e)
    return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 429 or isinstance(e, NotReady) else None)
