"""A server around a scripted engine in this process, driven over loopback by real clients."""
import asyncio
import json
import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from hetero.engine.scheduler import Limits
from hetero.engine.scripted import Script, ScriptedEngine
from hetero.request import Sampling
from hetero.serve import relay
from hetero.serve.app import make
from hetero.serve.door import Settings
from hetero.serve.run import Server
from hetero.serve.seat import Seat
from hetero.serve.worker import Host
from hetero.text import tokenizer
from hetero.weights.source import EMBEDDED
from hetero.wire.prepare import read_texts
from hetero.wire.records import Info

HERMES = ("{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} as <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call><|im_end|>\n{% endif %}"
          "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must come first.') }}{% endif %}<|im_start|>{{ m.role }}\n"
          "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}")


SMALL = Limits(max_batch=8)


class Stage:
    """The server, what the engine is told to say, and what it was asked."""

    def __init__(self, folder: Path, limits: Limits, context: int, most: int, settings: Settings) -> None:
        self.tok = tokenizer.read(folder)
        self.says: str | Script = "Hello there."
        self.asked = []
        self.engine = ScriptedEngine(self.script, self.tok.size, context, self.tok.ends(), limits)
        self.info = Info("demo", str(folder), self.tok.size, context, Sampling(temperature=0.7), {"temperature": "generation_config.json"}, (("ctx", "64", "flag"),), limits)
        self.settings, self.sources = settings, []
        self.load_s, self.loads_with = 0.0, None             # what loading takes, and what goes wrong

        def start(source):
            self.sources.append(source)
            return relay.around(Host(self.info, self.engine, self.tok, lambda: {"model": "demo", "layers": [], "text": "demo: no layers"}, lambda: {"decode tok/s": 5.0, "PCIe GB/s": 40.0, "PCIe share of ceiling": 0.8}), most,
                                self.load_s, self.loads_with)
        self.seat = Seat(start, lambda info: read_texts(info, settings.format, settings.chat_template, settings.merge), "models/demo", settings.names, settings.drain_s)
        self.app = make(self.seat, settings)
        self.server = Server(uvicorn.Config(self.app, "127.0.0.1", 0, log_level="warning", access_log=False), settings)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)
        self.thread.start()
        while not self.server.started or self.seat.state == "loading":
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    async def run(self):
        serving = asyncio.ensure_future(self.server.serve())
        await self.seat.load()
        await serving

    @property
    def relay(self):
        return self.seat.loaded.relay

    def script(self, request):
        self.asked.append(request)
        if isinstance(self.says, str):
            return Script((*self.tok.encode(self.says), 2))
        return self.says if isinstance(self.says, Script) else self.says(request)

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def chat(self, **body):
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.post("/v1/chat/completions", **body)

    def events(self, path="/v1/chat/completions", **body):
        """The events of a stream, parsed."""
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        found = []
        with self.http.stream("POST", path, json={**body, "stream": True}) as r:
            assert r.status_code == 200, r.read()
            for line in r.iter_lines():
                if line.startswith("data: "):
                    found.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        return found

    def until_idle(self, seconds=5.0):
        end = time.monotonic() + seconds
        while self.seat.loaded is None or self.relay.active or not self.engine.idle or self.settings.busy:
            assert time.monotonic() < end, (self.seat.state, self.engine.idle, self.settings.busy)
            time.sleep(0.01)

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join(10)
        self.seat.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, place)
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": HERMES}))
    return place


@pytest.fixture(scope="session")
def make_stage(folder):
    made = []

    def build(limits=SMALL, context=512, most=16, settings=None):
        made.append(Stage(folder, limits, context, most, settings or Settings(time_limit_s=60)))
        return made[-1]
    yield build
    for stage in made:
        stage.close()


@pytest.fixture(scope="session")
def shared_stage(make_stage):
    return make_stage()


@pytest.fixture
def stage(shared_stage):
    shared_stage.says = "Hello there."
    shared_stage.asked.clear()
    yield shared_stage
    shared_stage.until_idle()
