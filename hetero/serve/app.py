"""The routes: who may ask, what is asked of which function, and what a fault looks like on each API; computes nothing.

Blocking work runs in two threads beside the event loop, so that /health answers whatever is being prepared.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from hetero import __version__
from hetero.errors import BadRequest, EngineFailed, HeteroError
from hetero.serve import anthropic, metrics, openai, responses
from hetero.serve.relay import Relay
from hetero.serve.stream import Gone, failed, guarded, openai_error, sse, unless_gone
from hetero.wire import prepare
from hetero.wire.answers import ChatAnswer, CompletionAnswer
from hetero.wire.schema import ChatRequest, CompletionRequest, DetokenizeRequest, ErrorReply, TemplateRequest, TokenizeRequest, Wire

log = logging.getLogger("hetero.serve")
T = TypeVar("T")
OPEN = ("/", "/health", "/ready", "/favicon.ico")
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorReply} for code in (400, 401, 404, 413, 429, 500, 503)}


@dataclass
class Settings:
    """How the server behaves. Sizes in bytes, times in seconds."""

    model_name: str | None = None            # what clients call the model
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()            # CORS: nobody unless listed
    max_body_bytes: int = 16 << 20
    time_limit_s: float = 3600.0
    format: str = "auto"                     # how reasoning and calls are written
    chat_template: Path | None = None
    merge: frozenset[str] = frozenset()
    draining: bool = field(default=False)
    busy: int = field(default=0)             # requests between their first and last byte


class Limits:
    """ASGI middleware: bodies that are too large, keys, draining, and a count of what is going on; never reads a body as a whole."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        s, headers = self.settings, {k.lower(): v for k, v in scope["headers"]}
        if (refusal := self._refuse(scope["path"], scope["method"], headers)) is not None:
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > s.max_body_bytes:
                raise HTTPException(413, f"the body is larger than {s.max_body_bytes} bytes")
            return message
        s.busy += scope["path"] not in OPEN
        try:
            await self.app(scope, counted, send)
        finally:
            s.busy -= scope["path"] not in OPEN

    def _refuse(self, path: str, method: str, headers: dict[bytes, bytes]) -> Response | None:
        s = self.settings
        if path in OPEN or method == "OPTIONS":
            return None
        if s.keys and not self._known(headers):
            return shaped(path, 401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key", "authentication_error", "invalid_api_key")
        if s.draining and method == "POST":
            return shaped(path, 503, "the server is shutting down", "server_error", None)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > s.max_body_bytes:
            return shaped(path, 413, f"the body is larger than {s.max_body_bytes} bytes", "invalid_request_error", None)
        return None

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip() or headers.get(b"x-api-key", b"")
        same = [hmac.compare_digest(given, key.encode()) for key in self.settings.keys]      # each one, so that time tells nothing
        return any(same)


def shaped(path: str, status: int, message: str, kind: str, code: str | None, param: str | None = None) -> JSONResponse:
    """An error in the shape of the API that was asked."""
    if path.startswith("/v1/messages"):
        return JSONResponse(anthropic.error_body(message, status), status)
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def make(relay: Relay, settings: Settings) -> FastAPI:
    """The application over a relay that is started with it."""
    pool = ThreadPoolExecutor(2, "prepare")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        info = relay.info or await relay.start()
        app.state.texts = await asyncio.get_running_loop().run_in_executor(
            pool, prepare.read_texts, info, settings.format, settings.chat_template, settings.merge)
        settings.model_name = settings.model_name or info.name
        yield
        app.state.texts.checker.close()
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="hetero", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    app.state.relay, app.state.settings = relay, settings
    app.add_middleware(Limits, settings=settings)
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    add_faults(app)
    desk = Desk(app, relay, settings, pool)
    add_openai(app, desk)
    add_tools(app, desk)
    add_state(app, desk)
    anthropic.add_routes(app, desk)
    responses.add_routes(app, desk)
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


class Desk:
    """What routes share: preparing off the loop, answering whole or as events."""

    def __init__(self, app: FastAPI, relay: Relay, settings: Settings, pool: ThreadPoolExecutor) -> None:
        self._app, self.relay, self.settings, self._pool = app, relay, settings, pool
        self.meter = metrics.Meter()

    @property
    def texts(self) -> prepare.Texts:
        return self._app.state.texts

    @property
    def name(self) -> str:
        return self.settings.model_name or "model"

    def check_model(self, name: str | None) -> None:
        """A model that is named must be the one that is served."""
        if name and name != self.name and name != self.texts.info.name and Path(name).name != Path(self.name).name:
            raise HTTPException(404, f"the model {name!r} is not served here; {self.name!r} is")

    async def off(self, work: Callable[..., T], *args: Any) -> T:
        """Runs blocking work beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def note(self, body: Wire) -> None:
        if unknown := body.unknown():
            log.debug("fields that mean nothing here: %s", ", ".join(unknown))

    async def whole(self, request: Request, work: Awaitable[T]) -> T:
        """A whole answer, within the time limit, ended when its client leaves."""
        return await unless_gone(request, asyncio.wait_for(work, self.settings.time_limit_s))

    def limited(self, events: Any) -> Any:
        """The same events until the time limit; then an error event."""
        limit_s = self.settings.time_limit_s

        async def run() -> Any:
            end = time.monotonic() + limit_s
            try:
                async for e in events:
                    yield e
                    if time.monotonic() > end:
                        raise EngineFailed(f"the answer took more than {limit_s:g} s", "ask for fewer tokens")
            finally:
                await events.aclose()
        return run()


def add_faults(app: FastAPI) -> None:
    """What goes wrong, as each API says it; never a trace, never a class name."""
    @app.exception_handler(HeteroError)
    async def ours(request: Request, e: HeteroError) -> Response:
        body = openai_error(e)
        if request.url.path.startswith("/v1/messages"):
            return failed(e, anthropic.error_body(body["error"]["message"], anthropic.status_of(e)))
        return failed(e, body)

    @app.exception_handler(RequestValidationError)
    async def form(request: Request, e: RequestValidationError) -> Response:
        first = e.errors()[0]
        place = ".".join(str(p) for p in first.get("loc", ()) if p not in ("body",) and not str(p).startswith("function-"))
        return shaped(request.url.path, 400, f"{place or 'body'}: {first.get('msg', 'cannot be read')}"[:500], "invalid_request_error", None,
                      str(place).split(".")[0] or None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, e: HTTPException) -> Response:
        kind = "invalid_request_error" if e.status_code < 500 else "server_error"
        code = "model_not_found" if e.status_code == 404 and "model" in str(e.detail) else None
        return shaped(request.url.path, e.status_code, str(e.detail), kind, code)

    @app.exception_handler(Gone)
    async def gone(request: Request, e: Gone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(TimeoutError)
    async def late(request: Request, e: TimeoutError) -> Response:
        return shaped(request.url.path, 503, "the answer took too long", "server_error", "timeout")

    @app.exception_handler(Exception)
    async def fault(request: Request, e: Exception) -> Response:
        log.error("a fault while answering %s", request.url.path, exc_info=e)
        return shaped(request.url.path, 500, "an internal fault; the log has more", "server_error", None)


def add_openai(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatRequest, request: Request) -> Any:
        desk.note(body)
        desk.check_model(body.model)
        desk.relay.admit(1)
        with_usage = stream_options(body)
        job = await desk.off(prepare.chat, body, desk.texts)
        desk.relay.admit(1)
        if body.stream:
            return sse(guarded(desk.limited(desk.meter.watch(openai.chat_events(desk.relay, job, desk.name, with_usage))), openai.error_events))
        return await desk.whole(request, desk.meter.one(openai.whole(desk.relay, [job], ChatAnswer(job, desk.name))))

    @app.post("/v1/completions")
    @app.post("/completions", include_in_schema=False)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        desk.note(body)
        desk.check_model(body.model)
        desk.relay.admit(1)
        with_usage = stream_options(body)
        jobs = await desk.off(prepare.completions, body, desk.texts)
        desk.relay.admit(len(jobs))
        echo, silent = bool(body.echo), body.max_tokens == 0
        if body.stream:
            events = openai.complete_events(desk.relay, jobs, desk.name, echo, silent, with_usage)
            return sse(guarded(desk.limited(desk.meter.watch(events)), openai.error_events))
        return await desk.whole(request, desk.meter.one(openai.whole(desk.relay, jobs, CompletionAnswer(jobs, desk.name, echo, silent))))

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> Any:
        return {"object": "list", "data": [card(desk)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        desk.check_model(name)
        return card(desk)


def stream_options(body: Any) -> bool:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


def card(desk: Desk) -> dict[str, Any]:
    return {"id": desk.name, "object": "model", "created": 0, "owned_by": "hetero", "max_model_len": desk.texts.info.context}


def add_tools(app: FastAPI, desk: Desk) -> None:
    """Looking at tokens and templates."""
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Any:
        def work() -> list[int]:
            t = desk.texts
            if body.messages is not None:
                return list(prepare.render(t, body.messages).ids)
            text = body.content if body.content is not None else body.prompt
            if text is None:
                raise BadRequest("content is missing", "send content, or messages", "content")
            return t.tokenizer.encode_prompt(text) if body.add_special else t.tokenizer.encode(text)
        tokens = await desk.off(work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": desk.texts.info.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Any:
        if wrong := next((t for t in body.tokens if not 0 <= t < desk.texts.info.vocab), None):
            raise BadRequest(f"tokens has {wrong}, but ids go from 0 to {desk.texts.info.vocab - 1}", param="tokens")
        text = await desk.off(desk.texts.tokenizer.decode, body.tokens, True)
        return {"content": text, "prompt": text}

    @app.post("/apply-template")
    async def apply(body: TemplateRequest) -> Any:
        def work() -> Any:
            return prepare.render(desk.texts, body.messages, prepare.tools_of(body.tools), body.chat_template_kwargs, body.add_generation_prompt,
                                  body.continue_final_message)
        made = await desk.off(work)
        return {"prompt": made.text, "tokens": list(made.ids)}


def add_state(app: FastAPI, desk: Desk) -> None:
    """What the server is and how it does."""
    @app.get("/health")
    async def health() -> Any:
        relay = desk.relay
        if relay.alive:
            return {"status": "ok"}
        return JSONResponse({"status": "failed", "error": relay.failure or "the engine has not spoken for a while"}, 503)

    @app.get("/ready")
    async def ready() -> Any:
        if desk.relay.alive and desk.relay.info is not None and not desk.settings.draining:
            return {"status": "ready"}
        return JSONResponse({"status": "draining" if desk.settings.draining else "not ready"}, 503)

    @app.get("/props")
    async def props() -> Any:
        info, t, s = desk.texts.info, desk.texts, desk.settings
        shown = {f.name: getattr(info.sampling, f.name) for f in fields(info.sampling)}
        return {"model": desk.name, "version": __version__, "context": info.context, "vocab": info.vocab,
                "sampling": {k: {"value": v, "source": info.sampling_sources.get(k, "default")} for k, v in shown.items()},
                "ends": {t.tokenizer.bytes_of(i).decode("utf-8", "replace"): places for i, places in t.tokenizer.eos.items()},
                "chat_template": t.template.source if t.template else None, "format": t.format.name,
                "options": {n: {"value": v, "source": w} for n, v, w in info.options},
                "limits": {"requests": desk.relay.most, "body_bytes": s.max_body_bytes, "time_s": s.time_limit_s, "n": info.limits.max_n,
                           "batch": info.limits.max_batch}}

    @app.get("/v1/report")
    async def report() -> Any:
        return await asyncio.wait_for(desk.relay.report(), 120)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(metrics.text(desk.relay, desk.meter), media_type="text/plain; version=0.0.4")

    page = Path(__file__).with_name("page.html")

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return HTMLResponse(page.read_text(encoding="utf-8"))

