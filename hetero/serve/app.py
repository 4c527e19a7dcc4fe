"""The routes: which function answers what, and what a fault looks like on each API; computes nothing.

Blocking work runs in threads beside the event loop, so that /health answers whatever is being prepared.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hetero import __version__
from hetero.errors import HeteroError
from hetero.serve import state
from hetero.serve.anthropic import CountRequest, MessagesRequest
from hetero.serve.door import Door, Settings, anthropic_error, error_of
from hetero.serve.reading import LARGE_BYTES, LOOKS, VIEWS, Reader
from hetero.serve.relay import Overloaded
from hetero.serve.seat import Loaded, Seat
from hetero.serve.stream import Gone, View, failed, guarded, limited, openai_error, sse, status_of, unless_gone
from hetero.wire.prepare import Prepared
from hetero.wire.responses import ResponsesRequest
from hetero.wire.schema import ChatRequest, CompletionRequest, DetokenizeRequest, ErrorReply, TemplateRequest, TokenizeRequest, Wire, fault

log = logging.getLogger("hetero.serve")
T = TypeVar("T")
LONG_BYTES, MOST_LARGE = 32 << 10, 8
JSON = re.compile(r"application/([\w.-]+\+)?json\b", re.IGNORECASE)
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorReply} for code in (400, 401, 403, 404, 409, 413, 429, 500, 503)}


def make(seat: Seat, settings: Settings) -> FastAPI:
    """The application over a seat; somebody else loads a model into it."""
    pools = Pools()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        pools.close()

    app = FastAPI(title="hetero", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    app.add_middleware(Door, settings=settings)
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    add_faults(app)
    desk = Desk(seat, settings, pools)
    app.router.route_class = reads_large(desk)
    add_answers(app, desk)
    add_looks(app, desk)
    state.add_routes(app, desk)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI promises a 422 wherever there is a body; here that is a 400."""
        found = plain()
        for methods in found["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        return found
    app.openapi = openapi  # type: ignore[method-assign]
    return app


class Pools:
    """Threads for blocking work: what is short; what may take long (schemas to compile, long texts), which never holds up the short; and one that
    waits for the process that reads large bodies."""

    def __init__(self) -> None:
        self.short, self.long, self.large = ThreadPoolExecutor(2, "prepare"), ThreadPoolExecutor(2, "prepare-long"), ThreadPoolExecutor(1, "read")

    def close(self) -> None:
        for pool in (self.short, self.long, self.large):
            pool.shutdown(wait=False, cancel_futures=True)


class Desk:
    """What routes share: the model that answers, work off the loop, answering whole or as events."""

    def __init__(self, seat: Seat, settings: Settings, pools: Pools) -> None:
        self.seat, self.settings, self._pools = seat, settings, pools
        self._reader: Reader | None = None
        self._reading = 0
        seat.on_leave = self._close_reader

    def here(self) -> Loaded:
        return self.seat.here()

    async def off(self, work: Callable[..., T], *args: Any, pool: ThreadPoolExecutor | None = None) -> T:
        """Runs blocking work beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(pool or self._pools.long, partial(work, *args))

    async def look(self, path: str, body: Wire) -> Response:
        """What needs no engine."""
        t = self.here().texts
        return Response(await self.off(lambda: to_json(LOOKS[path][1](body, t))), media_type="application/json")

    async def answer(self, path: str, body: Wire, request: Request) -> Any:
        """An answer in one API's way: whole, or as events when the body says so."""
        if unknown := body.unknown():
            log.debug("fields that mean nothing here: %s", ", ".join(unknown))
        here, view, asked = self.here(), VIEWS[path][1], body.model_dump(include={"model", "response_format", "text", "tools"})
        if view.named:
            here.check_name(asked["model"])
        here.relay.admit(1)
        form = asked.get("response_format") or (asked.get("text") or {}).get("format") or {}
        long = len(await request.body()) > LONG_BYTES or form.get("type", "text") != "text" or bool(asked.get("tools"))
        jobs = await self.off(view.prepare, body, here.texts, pool=self._pools.long if long else self._pools.short)
        return await self._run(here, view, body, jobs, request)

    async def large(self, path: str, raw: bytes, request: Request) -> Response:
        """The same of a body that is too large to be parsed on the loop."""
        here = self.here()
        here.relay.admit(1)
        if self._reading >= MOST_LARGE:
            raise Overloaded(f"{MOST_LARGE} large bodies are waiting to be read", "try again a little later")
        if self._reader is None or self._reader.info is not here.texts.info:
            s = self.settings
            self._reader = Reader(here.texts.info, s.format, s.chat_template, s.merge)
        self._reading += 1
        try:
            found = await self.off(self._reader.read, path, raw, pool=self._pools.large)
        finally:
            self._reading -= 1
        if isinstance(found, bytes):
            return Response(found, media_type="application/json")
        view = VIEWS[path][1]
        if view.named:
            here.check_name(found.body.model_dump(include={"model"})["model"])
        answered = await self._run(here, view, found.body, await self.off(found.prepared, here.texts), request)
        return answered if isinstance(answered, Response) else Response(to_json(answered), media_type="application/json")

    async def _run(self, here: Loaded, view: View, body: Wire, jobs: list[Prepared], request: Request) -> Any:
        here.relay.admit(len(jobs))
        if body.model_dump(include={"stream"})["stream"]:
            events = view.events(here.relay, jobs, here.name, body)
            return sse(guarded(limited(events, self.settings.time_limit_s), view.fault))
        return await unless_gone(request, asyncio.wait_for(view.whole(here.relay, jobs, here.name, body), self.settings.time_limit_s))

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def reads_large(desk: Desk) -> type[APIRoute]:
    """Routes whose large bodies are not parsed on the event loop, where FastAPI does it."""
    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            plain, path = super().get_route_handler(), self.path.removeprefix("/v1")

            async def handle(request: Request) -> Response:
                try:
                    raw = await request.body()
                except ClientDisconnect:
                    raise Gone from None
                if len(raw) <= LARGE_BYTES or not JSON.match(request.headers.get("content-type", "")):
                    return await plain(request)
                return await desk.large(path, raw, request)
            return handle if path in {**VIEWS, **LOOKS} else plain
    return Route


def add_faults(app: FastAPI) -> None:
    """What goes wrong, as each API says it; never a trace, never a class name."""
    @app.exception_handler(HeteroError)
    async def ours(request: Request, e: HeteroError) -> Response:
        body = openai_error(e)
        if request.url.path.startswith("/v1/messages"):
            return failed(e, anthropic_error(body["error"]["message"], status_of(e)))
        return failed(e, body)

    @app.exception_handler(RequestValidationError)
    async def form(request: Request, e: RequestValidationError) -> Response:
        found = fault(e.errors())
        return error_of(request.url.path, 400, found.message, "invalid_request_error", None, found.param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, e: HTTPException) -> Response:
        return error_of(request.url.path, e.status_code, str(e.detail), "invalid_request_error" if e.status_code < 500 else "server_error", None)

    @app.exception_handler(Gone)
    async def gone(request: Request, e: Gone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(TimeoutError)
    async def late(request: Request, e: TimeoutError) -> Response:
        return error_of(request.url.path, 503, "the answer took too long", "server_error", "timeout")

    @app.exception_handler(Exception)
    async def broken(request: Request, e: Exception) -> Response:
        log.error("a fault while answering %s", request.url.path, exc_info=e)
        return error_of(request.url.path, 500, "an internal fault; the log has more", "server_error", None)


def add_answers(app: FastAPI, desk: Desk) -> None:
    """What a model answers."""
    @app.post("/v1/chat/completions")
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await desk.answer("/chat/completions", body, request)

    @app.post("/v1/completions")
    @app.post("/completions", include_in_schema=False)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await desk.answer("/completions", body, request)

    @app.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Any:
        return await desk.answer("/responses", body, request)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Any:
        return await desk.answer("/messages", body, request)


def add_looks(app: FastAPI, desk: Desk) -> None:
    """Looking at tokens and templates."""
    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> Any:
        return await desk.look("/messages/count_tokens", body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Any:
        return await desk.look("/tokenize", body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Any:
        return await desk.look("/detokenize", body)

    @app.post("/apply-template")
    async def apply(body: TemplateRequest) -> Any:
        return await desk.look("/apply-template", body)
