"""Starting, draining, failing, and bad company: what is promised to honest clients holds."""
import asyncio
import concurrent.futures
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from hetero import cli
from hetero.engine.scripted import Script
from hetero.errors import BadOption
from hetero.options import config_names
from hetero.serve.door import Settings
from hetero.serve.relay import NotReady
from hetero.serve.run import JsonLines, Place, Server, notify, read_keys, run
from hetero.serve.seat import Seat
from hetero.serve.state import health_of
from hetero.serve.stream import kept_alive
from hetero.serve.worker import NICER

HI = [{"role": "user", "content": "hi"}]
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_a_server_that_is_asked_to_end_finishes_what_it_began(make_stage):
    stage = make_stage(settings=Settings(drain_s=20))
    stage.says = Script((*stage.tok.encode("a b c d e f g h"), 2), delay_s=0.08)
    url = f"{stage.url}/v1/chat/completions"

    def stream(_):
        with httpx.stream("POST", url, json={"messages": HI, "stream": True}, timeout=30) as r:
            return [line for line in r.iter_lines() if line.startswith("data: ")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(stream, i) for i in range(4)]
        while stage.relay.active < 4:
            time.sleep(0.01)
        stage.server.handle_exit(signal.SIGTERM, None)
        assert httpx.post(url, json={"messages": HI}).status_code == 503 and httpx.get(f"{stage.url}/ready").json() == {"status": "draining"}
        found = [j.result() for j in jobs]
    assert all(lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "stop" for lines in found)
    stage.thread.join(10)
    assert not stage.thread.is_alive()


def test_a_second_signal_does_not_wait(make_stage):
    stage = make_stage()
    stage.settings.busy, stage.settings.drain_s = 1, 1000
    server = Server(uvicorn.Config(stage.app), stage.settings)
    server.handle_exit(signal.SIGTERM, None)
    assert stage.settings.draining and not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit
    stage.settings.busy = 0


def test_keys_come_from_a_file_that_only_its_owner_may_read(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\ntwo\n")
    file.chmod(0o600)
    assert read_keys(file) == ("one", "two")
    file.chmod(0o644)
    with pytest.raises(BadOption, match="others may read"):
        read_keys(file)
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(BadOption, match="no keys"):
        read_keys(file)
    with pytest.raises(BadOption, match="No such file"):
        read_keys(tmp_path / "none")


def test_nobody_hears_a_healthy_server_before_its_model_is_begun():
    """The port opens before loading starts; what /health says in between is 503."""
    def start(source):
        raise NotReady("this model cannot be started")
    seat, heard = Seat(start, lambda info: None), []

    class Opening(Server):
        async def serve(self, sockets=None):
            heard.append(health_of(seat)[0])
            self.started = True
            await asyncio.sleep(0.1)
    settings = Settings()
    server = Opening(uvicorn.Config(lambda: None), settings)
    assert asyncio.run(run(server, seat, settings, Place(), "")) == "this model cannot be started"
    assert heard == [503]


def test_systemd_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        notify("READY=1", str(tmp_path / "notify"))
        assert s.recv(100) == b"READY=1"
    notify("READY=1", "")


def test_logs_are_json_lines_without_prompts():
    import logging
    line = JsonLines().format(logging.LogRecord("x", logging.INFO, "f", 1, "said %s", ("hi",), None))
    assert json.loads(line)["message"] == "said hi"


def test_a_silent_stream_is_kept_alive(monkeypatch):
    from hetero.serve import stream
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.05)

    async def slow():
        yield "a"
        await asyncio.sleep(0.2)
        yield "b"

    async def events():
        return [e async for e in kept_alive(slow())]
    found = asyncio.run(events())
    assert found[0] == "a" and found[-1] == "b" and ": keep-alive\n\n" in found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_honest_clients_are_served_among_two_hundred_bad_ones():
    """Thirty seconds of the script that does it for two minutes: every answer word for word, memory and open files flat, gauges zero."""
    done = subprocess.run([sys.executable, str(SCRIPTS / "abuse.py"), "--seconds", "30", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])
    found = json.loads(done.stdout)
    assert found["answers"] > 0 and not found["wrong"] and found["equal afterwards"] and not any(found["gauges"].values())


def test_the_unit_and_the_container_say_what_the_program_takes(tmp_path):
    unit = (SCRIPTS / "hetero-serve.service").read_text()
    command = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart="))
    args = cli.parser().parse_args(["serve", *command[1:]])
    assert Path(command[0]).name == "hetero-serve" and args.model == "/srv/models/MODEL" and args.config in config_names() and args.api_key_file and args.log_json
    docker = (SCRIPTS / "Dockerfile").read_text()
    entry = json.loads(docker.splitlines()[-1].removeprefix("ENTRYPOINT "))
    shown = next(line for line in docker.splitlines() if line.startswith("# docker run")).partition(" hetero /")
    args = cli.parser().parse_args(["serve", *entry[1:], *shlex.split("/" + shown[2])])
    assert entry[0] == "hetero-serve" and (args.host, args.model, args.api_key_file) == ("0.0.0.0", "/models/NAME", "/keys")
    verify = shutil.which("systemd-analyze")
    if verify:
        for old, new in ((command[0], sys.executable), ("User=hetero", "User=root")):
            unit = unit.replace(old, new)
        (tmp_path / "hetero-serve.service").write_text(unit)
        done = subprocess.run([verify, "verify", "--man=no", str(tmp_path / "hetero-serve.service")], capture_output=True, text=True)
        assert done.returncode == 0 and "hetero-serve.service" not in done.stderr, done.stderr


class Program:
    """`hetero serve` as a process of its own, with a systemd that listens."""

    def __init__(self, folder, *flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / f"notify{len(list(folder.iterdir()))}"
        self.systemd.bind(str(address))
        self.systemd.setblocking(False)
        env = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": str(address)}
        self.process = subprocess.Popen([sys.executable, "-m", "hetero", "serve", "--port", self.url.rpartition(":")[2], *flags], env=env, stderr=subprocess.PIPE, text=True)
        self.states, end = set(), time.monotonic() + 300
        while True:
            assert self.process.poll() is None and time.monotonic() < end
            try:
                r = httpx.get(f"{self.url}/health", timeout=30)
                self.states.add((r.status_code, r.json()["status"]))
                if r.status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.05)
        while httpx.get(f"{self.url}/ready").status_code != 200:
            time.sleep(0.05)

    def heard(self):
        """What systemd was told so far."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.systemd.recv(1000).decode())
        return found

    def end(self, seconds=120):
        code = self.process.wait(seconds)
        self.systemd.close()
        with self.process.stderr:
            return code, self.process.stderr.read()


@pytest.mark.slow
def test_the_program_serves_the_embedded_model_and_a_killed_engine_ends_it(tmp_path):
    """The whole program: loading, ready, an answer, the report; a killed engine is an exit code that is not 0."""
    program = Program(tmp_path)
    assert program.states == {(503, "loading"), (200, "ok")}
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "max_tokens": 8}
    assert "light" in httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=200).json()["choices"][0]["message"]["content"]
    report = httpx.get(f"{program.url}/v1/report", timeout=200).json()
    assert report["layers"] and report["checks"]
    child = max(psutil.Process(program.process.pid).children(recursive=True), key=lambda c: c.memory_info().rss)
    assert child.nice() == min(19, psutil.Process(program.process.pid).nice() + NICER)
    child.kill()
    code, said = program.end()
    assert code == 1 and "engine's process ended" in said and "self-test" in said and "generation_config.json" in said


@pytest.mark.slow
def test_kill_term_with_four_streams_lets_them_end_and_refuses_a_fifth(tmp_path):
    program = Program(tmp_path)
    end = time.monotonic() + 60
    told = program.heard()
    while not any(t.startswith("READY=1") for t in told):
        assert time.monotonic() < end
        told += program.heard()
    assert any(t.startswith("STATUS=") for t in told)
    going = threading.Semaphore(0)

    def stream(i):
        body = {"messages": [{"role": "user", "content": f"Tell me {i} stories."}], "stream": True, "max_tokens": 300, "ignore_eos": True}
        with httpx.stream("POST", f"{program.url}/v1/chat/completions", json=body, timeout=300) as r:
            lines = []
            for line in r.iter_lines():
                if line.startswith("data: "):
                    lines.append(line[6:])
                if len(lines) == 2:
                    going.release()
            return lines
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(stream, i) for i in range(4)]
        for _ in jobs:
            assert going.acquire(timeout=120)
        program.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{program.url}/ready").json() != {"status": "draining"}:
            time.sleep(0.01)
        r = httpx.post(f"{program.url}/v1/chat/completions", json={"messages": HI})
        assert r.status_code == 503 and "shutting down" in r.json()["error"]["message"]
        found = [j.result() for j in jobs]
    assert all(lines[-1] == "[DONE]" and json.loads(lines[-2])["timings"]["tokens"] == 300 for lines in found)
    assert "STOPPING=1" in program.heard() and program.end()[0] == 0


@pytest.mark.slow
def test_a_signal_while_it_loads_and_a_model_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "hetero", "serve", "--port", "0"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path / "nowhere")], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "nowhere" in done.stderr and "hint:" in done.stderr and "Traceback" not in done.stderr
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    with process.stderr:
        while "MiB" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
