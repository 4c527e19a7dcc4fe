"""What the server is and how it does: health, models, properties, report, metrics, the page; loading and unloading by admin key."""

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from hetero import __version__
from hetero.serve import metrics
from hetero.serve.seat import Conflict, Loaded, Seat, UnknownModel
from hetero.wire.schema import LoadRequest, UnloadRequest

WORDS = {"ready": "loaded", "loading": "loading", "leaving": "unloading", "empty": "unloaded"}


def health_of(seat: Seat) -> tuple[int, dict[str, Any]]:
    """Status and body. 503 while a model is being loaded, as llama.cpp's server says it and as a closed port would, and when the engine failed;
    200 when none is loaded because the admin wants it so."""
    loaded = seat.loaded
    if loaded is not None and loaded.relay.alive:
        return 200, {"status": "ok"}
    if loaded is not None:
        why = loaded.relay.failure or "the engine has not spoken for a while"
        return 503, {"status": "failed", "error": {"code": 503, "message": why, "type": "server_error"}}
    if seat.state == "loading":
        doing, done, total = seat.progress
        return 503, {"status": "loading", "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"},
                     "progress": {"doing": doing, "done_bytes": done, "total_bytes": total}}
    return 200, {"status": "no model", **({"trouble": seat.trouble} if seat.trouble else {})}


def cards(seat: Seat) -> list[dict[str, Any]]:
    """Each name of the model as OpenAI lists it, with where it stands as llama.cpp's router does."""
    context = {"max_model_len": seat.loaded.texts.info.context} if seat.loaded else {}
    status = {"value": WORDS[seat.state], **({"failed": True, "error": seat.trouble} if seat.trouble else {})}
    return [{"id": name, "object": "model", "created": 0, "owned_by": "hetero", **context, "status": status} for name in seat.shown]


def props_of(here: Loaded, settings: Any) -> dict[str, Any]:
    """Effective defaults, each with its source, and limits."""
    info, t, s = here.texts.info, here.texts, settings
    shown = {f.name: getattr(info.sampling, f.name) for f in fields(info.sampling)}
    return {"model": here.name, "names": list(here.names), "version": __version__, "context": info.context, "vocab": info.vocab,
            "sampling": {k: {"value": v, "source": info.sampling_sources.get(k, "default")} for k, v in shown.items()},
            "ends": {t.tokenizer.bytes_of(i).decode("utf-8", "replace"): places for i, places in t.tokenizer.eos.items()},
            "chat_template": t.template.source if t.template else None, "format": t.format.name,
            "options": {n: {"value": v, "source": w} for n, v, w in info.options},
            "limits": {"requests": here.relay.most, "body_bytes": s.max_body_bytes, "time_s": s.time_limit_s, "n": info.limits.max_n,
                       "batch": info.limits.max_batch}}


def add_routes(app: FastAPI, desk: Any) -> None:
    """Looking at all of it."""
    seat: Seat = desk.seat
    page = Path(__file__).with_name("page.html")

    @app.get("/health")
    async def health() -> Any:
        status, body = health_of(seat)
        return JSONResponse(body, status)

    @app.get("/ready")
    async def ready() -> Any:
        if seat.loaded is not None and seat.loaded.relay.alive and not desk.settings.draining:
            return {"status": "ready"}
        return JSONResponse({"status": "draining" if desk.settings.draining else f"not ready: {WORDS[seat.state]}"}, 503)

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> Any:
        return {"object": "list", "data": cards(seat)}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if seat.loaded is not None:
            seat.loaded.check_name(name)
        elif name not in seat.shown:
            raise UnknownModel(f"the model {name[:200]!r} is not served here")
        return next((c for c in cards(seat) if c["id"] == name), cards(seat)[0])

    @app.get("/props")
    async def props() -> Any:
        return props_of(desk.here(), desk.settings)

    @app.get("/v1/report")
    async def report(request: Request) -> Any:
        found = await asyncio.wait_for(desk.here().relay.report(), 120)
        text = found.pop("text", "")
        return PlainTextResponse(text) if "text/html" in request.headers.get("accept", "") else found

    @app.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(metrics.text(seat, seat.meter), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return HTMLResponse(page.read_text(encoding="utf-8"))

    add_admin(app, seat)


def add_admin(app: FastAPI, seat: Seat) -> None:
    """Loading and unloading (the door asks for the admin key)."""
    @app.post("/models/load")
    async def load(body: LoadRequest) -> Any:
        """Loads a model in place of the one that is there. Where it stands: /health, /v1/models."""
        task = seat.begin(body.model, body.served_model_name)
        if body.wait:
            await asyncio.shield(task)
        return {"success": True, "status": WORDS[seat.state] if body.wait else "loading"}

    @app.post("/models/unload")
    async def unload(body: UnloadRequest) -> Any:
        """Finishes what runs (`force`: ends it) and gives the model's memory back."""
        if seat.loaded is None:
            raise Conflict("no model is loaded")
        seat.loaded.check_name(body.model)
        await asyncio.shield(asyncio.ensure_future(seat.unload(bool(body.force))))
        return {"success": True, "status": WORDS[seat.state]}
