"""Starts the server and ends it well: keys, the listening address, draining on SIGTERM, what systemd wants to hear; knows no route.

The port is open while the model is being loaded: /health and /ready are 503 and say so. First SIGTERM or Ctrl-C: no new requests, those in flight
are finished (at most `drain_s`). Second: they are ended. A failed engine ends it too.
"""

import asyncio
import json
import logging
import os
import socket
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from hetero.errors import BadOption, EngineFailed
from hetero.options import Options
from hetero.serve import relay as relays
from hetero.serve.app import make
from hetero.serve.door import Settings
from hetero.serve.seat import Loaded, Seat
from hetero.wire.prepare import read_texts

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Place:
    """Where to listen and how to end."""

    host: str = "127.0.0.1"
    port: int = 8080
    most: int = 64
    json_log: bool = False


def read_keys(file: Path, flag: str = "--api-key-file") -> tuple[str, ...]:
    """Keys, one a line, from a file that only its owner may read. BadOption names what is wrong with it."""
    try:
        with file.open(encoding="utf-8") as f:
            mode, text = os.fstat(f.fileno()).st_mode, f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise BadOption(f"{flag} {file}: {e}", "a text file with one key a line") from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadOption(f"{flag} {file}: others may read it", f"chmod 600 {file}")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not keys or any(not k.isascii() for k in keys):
        raise BadOption(f"{flag} {file}: no keys in it, or keys beyond ASCII", "one key a line, such as from: openssl rand -hex 32")
    return keys


class JsonLines(logging.Formatter):
    """Log records as JSON, one a line; never a prompt."""

    def format(self, record: logging.LogRecord) -> str:
        body = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created)), "level": record.levelname, "logger": record.name,
                "message": record.getMessage()}
        return json.dumps(body | ({"trace": self.formatException(record.exc_info)} if record.exc_info else {}), ensure_ascii=False)


def notify(state: str, address: str) -> None:
    """Tells systemd (sd_notify(3)); `address` is what NOTIFY_SOCKET said, "" when nobody listens."""
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


class Server(uvicorn.Server):
    """uvicorn's server that drains first."""

    def __init__(self, config: uvicorn.Config, settings: Settings, notify_address: str = "") -> None:
        super().__init__(config)
        self._settings, self._notify, self._ends_s = settings, notify_address, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._settings.draining:
            self.force_exit = self.should_exit = True
            return
        self._settings.draining = True
        notify("STOPPING=1", self._notify)
        print(f"hetero-serve: finishing {self._settings.busy} requests (again: end at once)", file=sys.stderr, flush=True)
        self._ends_s = time.monotonic() + self._settings.drain_s

    async def on_tick(self, counter: int) -> bool:
        if self._settings.draining and not self.should_exit and (self._settings.busy == 0 or time.monotonic() > self._ends_s):
            self.force_exit = self._settings.busy > 0
            self.should_exit = True
        return await super().on_tick(counter)


def serve(name: str | None, options: Options, settings: Settings, place: Place, notify_address: str = "") -> int:
    """Loads, serves, drains, ends. 0 when it was asked to end; EngineFailed when the model could not be loaded or the engine failed."""
    if place.host not in LOOPBACK and not settings.keys:
        print(f"warning: listening on {place.host} without --api-key-file: whoever reaches this machine can use it", file=sys.stderr)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if place.json_log else logging.Formatter("%(asctime)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("hetero").setLevel(logging.INFO)
    seat = Seat(lambda source: relays.spawn(source, options, place.most),
                lambda info: read_texts(info, settings.format, settings.chat_template, settings.merge), name, settings.names, settings.drain_s)
    config = uvicorn.Config(make(seat, settings), place.host, place.port, log_level="warning", log_config=None, access_log=False,
                            timeout_graceful_shutdown=5, server_header=False, h11_max_incomplete_event_size=64 << 10)
    server = Server(config, settings, notify_address)
    try:
        trouble = asyncio.run(run(server, seat, settings, place, notify_address))
    except SystemExit:                           # uvicorn's way of saying that it could not start
        return 1
    finally:
        seat.close()
    if trouble and not settings.draining:
        raise EngineFailed(trouble)
    return 0


async def run(server: Server, seat: Seat, settings: Settings, place: Place, notify_address: str) -> str:
    """Serves until it ends; "" or why that was not meant."""
    trouble: list[str] = []

    def end(why: str) -> None:
        trouble.append(why)
        server.should_exit = True

    def told(doing: str, done: int, total: int) -> None:
        text = f"{doing}: {done >> 20} of {total >> 20} MiB"
        print(text, file=sys.stderr, flush=True)
        notify(f"STATUS={text}", notify_address)
    seat.on_failure, seat.on_progress = end, told
    seat.claim()                                 # before the port opens: nobody may hear a healthy server without a model
    serving = asyncio.ensure_future(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.02)
    if not serving.done():
        loading = seat.begin_claimed(None, None)
        await asyncio.wait([serving, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and (failed := loading.exception()) is not None:
            end(str(failed))
        elif loading.done():
            record = await loading.result().relay.report()
            print(record.get("text", ""), file=sys.stderr, flush=True)
            welcome(loading.result(), place)
            notify("READY=1\nSTATUS=ready", notify_address)
        else:
            loading.cancel()
    await serving
    return trouble[0] if trouble else ""


def welcome(here: Loaded, place: Place) -> None:
    """What is served, where, and where each default is from."""
    info = here.texts.info
    lines = [f"hetero-serve: {', '.join(here.names)} at http://{place.host}:{place.port} (process {os.getpid()})",
             f"  context {info.context} tokens, up to {info.limits.max_batch} sequences at once, {place.most} requests running or waiting",
             *(f"  {n} = {v} ({where})" for n, v, where in info.options if where != "default"),
             *(f"  {n} = {getattr(info.sampling, n)} ({where})" for n, where in info.sampling_sources.items() if where != "default")]
    print("\n".join(lines), file=sys.stderr, flush=True)
