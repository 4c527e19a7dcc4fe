"""The routes: which function answers what, and what a fault looks like on each API; computes nothing.

Blocking work runs in threads beside the event loop, so that /health answers whatever is being prepared.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from hetero import __version__
from hetero.errors import BadRequest, HeteroError
from hetero.serve import anthropic, openai, responses, state
from hetero.serve.door import Door, Settings, anthropic_error, error_of
from hetero.serve.seat import Loaded, Seat
from hetero.serve.stream import Gone, View, failed, guarded, limited, openai_error, sse, status_of, unless_gone
from hetero.wire import prepare
from hetero.wire.responses import ResponsesRequest
from hetero.wire.schema import ChatRequest, CompletionRequest, DetokenizeRequest, ErrorReply, TemplateRequest, TokenizeRequest, Wire, fault

log = logging.getLogger("hetero.serve")
T = TypeVar("T")
LONG_BYTES = 32 << 10
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
    add_answers(app, desk)
    add_tools(app, desk)
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
    """Threads for blocking work: what is short, and what may take long (schemas to compile, long texts), which never holds up the short."""

    def __init__(self) -> None:
        self.short, self.long = ThreadPoolExecutor(2, "prepare"), ThreadPoolExecutor(2, "prepare-long")

    def close(self) -> None:
        for pool in (self.short, self.long):
            pool.shutdown(wait=False, cancel_futures=True)


def takes_long(request: Request, body: dict[str, Any]) -> bool:
    """Whether preparing this may take long: it is large, or asks for a constraint."""
    size = int(request.headers.get("content-length", "0"))
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    return size > LONG_BYTES or form.get("type", "text") != "text" or bool(body.get("tools"))


class Desk:
    """What routes share: the model that answers, work off the loop, answering whole or as events."""

    def __init__(self, seat: Seat, settings: Settings, pools: Pools) -> None:
        self.seat, self.settings, self._pools = seat, settings, pools

    def here(self) -> Loaded:
        return self.seat.here()

    async def off(self, work: Callable[..., T], *args: Any, long: bool = True) -> T:
        """Runs blocking work beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pools.long if long else self._pools.short, partial(work, *args))

    async def answer(self, body: Wire, request: Request, view: View) -> Any:
        """An answer in one API's way: whole, or as events when the body says so."""
        if unknown := body.unknown():
            log.debug("fields that mean nothing here: %s", ", ".join(unknown))
        here, asked = self.here(), body.model_dump(include={"model", "stream", "response_format", "text", "tools"})
        if view.named:
            here.check_name(asked["model"])
        here.relay.admit(1)
        jobs = await self.off(view.prepare, body, here.texts, long=takes_long(request, asked))
        here.relay.admit(len(jobs))
        if asked["stream"]:
            events = view.events(here.relay, jobs, here.name, body)
            return sse(guarded(limited(events, self.settings.time_limit_s), view.fault))
        return await unless_gone(request, asyncio.wait_for(view.whole(here.relay, jobs, here.name, body), self.settings.time_limit_s))


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
        return await desk.answer(body, request, openai.CHAT)

    @app.post("/v1/completions")
    @app.post("/completions", include_in_schema=False)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await desk.answer(body, request, openai.TEXT)

    @app.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Any:
        return await desk.answer(body, request, responses.VIEW)

    @app.post("/v1/messages")
    async def messages(body: anthropic.MessagesRequest, request: Request) -> Any:
        return await desk.answer(body, request, anthropic.VIEW)

    @app.post("/v1/messages/count_tokens")
    async def count(body: anthropic.CountRequest) -> Any:
        return {"input_tokens": await desk.off(anthropic.count, body, desk.here().texts)}


def add_tools(app: FastAPI, desk: Desk) -> None:
    """Looking at tokens and templates."""
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Any:
        t = desk.here().texts

        def work() -> list[int]:
            if body.messages is not None:
                return list(prepare.render(t, body.messages).ids)
            text = body.content if body.content is not None else body.prompt
            if text is None:
                raise BadRequest("content is missing", "send content, or messages", "content")
            return t.tokenizer.encode_prompt(text) if body.add_special else t.tokenizer.encode(text)
        tokens = await desk.off(work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": t.info.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Any:
        t = desk.here().texts
        if wrong := next((i for i in body.tokens if not 0 <= i < t.info.vocab), None):
            raise BadRequest(f"tokens has {wrong}, but ids go from 0 to {t.info.vocab - 1}", param="tokens")
        text = await desk.off(t.tokenizer.decode, body.tokens, True)
        return {"content": text, "prompt": text}

    @app.post("/apply-template")
    async def apply(body: TemplateRequest) -> Any:
        made = await desk.off(prepare.render, desk.here().texts, body.messages, prepare.tools_of(body.tools), body.chat_template_kwargs,
                              body.add_generation_prompt, body.continue_final_message)
        return {"prompt": made.text, "tokens": list(made.ids)}
