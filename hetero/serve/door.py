"""Who may come in, with how much, and what is noted of it: keys, body limits, draining, request ids, one log line per request; knows no model.

An ASGI middleware that never reads a body as a whole. Keys are compared by their hashes, each one, so that time tells nothing about them.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = logging.getLogger("hetero.serve")
OPEN = ("/", "/health", "/ready", "/favicon.ico")
ADMIN = ("/models/load", "/models/unload")
QUIET = (*OPEN, "/metrics")
OWN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass
class Settings:
    """How the server behaves. Sizes in bytes, times in seconds."""

    names: tuple[str, ...] = ()              # what clients call the model; none: its own name
    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()         # they open everything; without any, loading and unloading are closed
    origins: tuple[str, ...] = ()            # CORS: nobody unless listed
    max_body_bytes: int = 16 << 20
    time_limit_s: float = 3600.0
    drain_s: float = 60.0
    format: str = "auto"                     # how reasoning and calls are written
    chat_template: Path | None = None
    merge: frozenset[str] = frozenset()
    draining: bool = field(default=False)
    busy: int = field(default=0)             # requests between their first and last byte


def error_of(path: str, status: int, message: str, kind: str, code: str | None, param: str | None = None) -> JSONResponse:
    """An error in the shape of the API that was asked."""
    if path.startswith("/v1/messages"):
        return JSONResponse(anthropic_error(message, status), status)
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             429: "rate_limit_error", 503: "overloaded_error"}


def anthropic_error(message: str, status: int) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ANTHROPIC.get(status, "api_error"), "message": message}}


def hashed(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(k.encode()).digest() for k in keys]


class Door:
    """The middleware. `settings.busy` counts what is going on inside."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._admin = hashed(settings.admin_keys)
        self._keys = hashed(settings.keys) + self._admin

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        s, path, headers = self.settings, scope["path"], {k.lower(): v for k, v in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        id = given.decode() if OWN_ID.fullmatch(given) else secrets.token_hex(8)
        seen, status, began = 0, 0, time.monotonic()

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > s.max_body_bytes:
                raise HTTPException(413, f"the body is larger than {s.max_body_bytes} bytes")
            return message

        async def named(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", id.encode())]}
            await send(message)
        if (refusal := self._refuse(path, scope["method"], headers)) is not None:
            await refusal(scope, receive, named)
        else:
            s.busy += path not in OPEN
            try:
                await self.app(scope, counted, named)
            finally:
                s.busy -= path not in OPEN
        log.log(logging.DEBUG if path in QUIET else logging.INFO, "%s %s %d %.3f s id=%s", scope["method"], path[:200], status,
                time.monotonic() - began, id)

    def _refuse(self, path: str, method: str, headers: dict[bytes, bytes]) -> Response | None:
        s = self.settings
        if path in OPEN or method == "OPTIONS":
            return None
        wanted = self._admin if path in ADMIN else self._keys if s.keys else None
        if path in ADMIN and not wanted:
            return error_of(path, 403, "closed: the server was started without --admin-key-file", "permission_error", None)
        if wanted is not None and not self._known(headers, wanted):
            which = "the admin key" if path in ADMIN else "a valid API key"
            return error_of(path, 401, f"{which} is needed: Authorization: Bearer KEY, or x-api-key", "authentication_error", "invalid_api_key")
        if s.draining and method == "POST":
            return error_of(path, 503, "the server is shutting down", "server_error", None)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > s.max_body_bytes:
            return error_of(path, 413, f"the body is larger than {s.max_body_bytes} bytes", "invalid_request_error", None)
        return None

    @staticmethod
    def _known(headers: dict[bytes, bytes], keys: list[bytes]) -> bool:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip() or headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(given).digest()
        return sum(hmac.compare_digest(digest, key) for key in keys) > 0
