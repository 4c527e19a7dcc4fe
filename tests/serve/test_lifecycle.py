"""Starting, draining, failing, and bad company: what is promised to honest clients holds."""
import asyncio
import concurrent.futures
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import uvicorn

from hetero.engine.scheduler import Limits
from hetero.engine.scripted import Script
from hetero.errors import BadOption
from hetero.serve.door import Settings
from hetero.serve.run import JsonLines, Server, notify, read_keys
from hetero.serve.stream import kept_alive

HI = [{"role": "user", "content": "hi"}]


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

    async def run():
        return [e async for e in kept_alive(slow())]
    found = asyncio.run(run())
    assert found[0] == "a" and found[-1] == "b" and ": keep-alive\n\n" in found


def misbehave(stage, rng, until):
    """One client after the other: connects and stalls, breaks its body, leaves in the middle, sends what is wrong."""
    http = httpx.Client(base_url=stage.url, verify=False)
    while time.monotonic() < until:
        kind = rng.randrange(6)
        try:
            if kind < 3:
                with socket.create_connection(("127.0.0.1", stage.port), timeout=5) as s:
                    body = json.dumps({"messages": HI, "stream": kind == 2, "ignore_eos": True, "max_tokens": 30}).encode()
                    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                    s.sendall((head + body)[: len(head) + (len(body) if kind else rng.randrange(len(body)))])
                    time.sleep(rng.random() * 0.3)
            elif kind == 3:
                http.post("/v1/chat/completions", content=os.urandom(rng.randrange(2000)), timeout=10)
            elif kind == 4:
                http.post("/v1/chat/completions", json={"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [str(i) for i in range(3000)]}}}, "max_tokens": 2}, timeout=30)
            else:
                http.post("/v1/completions", json={"prompt": [rng.randrange(-5, 10**9)] * 50}, timeout=10)
        except (httpx.HTTPError, OSError):
            continue
    http.close()


@pytest.mark.slow
def test_honest_clients_are_served_among_two_hundred_bad_ones(make_stage):
    """Thirty seconds of it. No request, page or open file is left behind (memory is not asked: the clients live in the same process)."""
    stage = make_stage(limits=Limits(max_batch=8), most=512)
    want = "The quick brown fox 😀 jumps."
    stage.says = lambda request: Script((*stage.tok.encode(want), 2), delay_s=0.001)
    process = psutil.Process()
    stage.chat()
    gc.collect()
    files = process.num_fds()
    wrong, right, until = [], 0, time.monotonic() + 30
    with concurrent.futures.ThreadPoolExecutor(204) as pool:
        bad = [pool.submit(misbehave, stage, random.Random(i), until) for i in range(200)]
        with httpx.Client(base_url=stage.url, timeout=60) as honest:
            while time.monotonic() < until:
                r = honest.post("/v1/chat/completions", json={"messages": HI, "seed": 1})
                if r.status_code == 200:
                    right += 1
                    if r.json()["choices"][0]["message"]["content"] != want:
                        wrong.append(r.text)
                else:
                    wrong.append(r.text)
        for b in bad:
            b.result()
    stage.until_idle(20)
    assert not wrong and right > 0, (wrong[:3], right)
    assert stage.engine.stats().pages_held == 0 and stage.http.get("/health").status_code == 200
    end = time.monotonic() + 20
    while process.num_fds() > files + 10:
        assert time.monotonic() < end, process.num_fds()
        time.sleep(0.1)


@pytest.mark.slow
def test_the_program_serves_the_embedded_model_and_ends_well(tmp_path):
    """The whole program: ready, an answer, a killed engine is a 503 and an exit code; and SIGTERM is exit code 0."""
    def start(port):
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-m", "hetero", "serve", "--port", str(port)], env=env, stderr=subprocess.PIPE, text=True)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < end
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    return process, url
            except httpx.HTTPError:
                time.sleep(0.3)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process, url = start(port)
    r = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "max_tokens": 8}, timeout=200)
    assert "light" in r.json()["choices"][0]["message"]["content"]
    report = httpx.get(f"{url}/v1/report", timeout=200).json()
    assert report["layers"] and report["checks"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stderr.close()
    process, url = start(port)
    child = max(psutil.Process(process.pid).children(recursive=True), key=lambda c: c.memory_info().rss)
    child.kill()
    assert process.wait(60) == 1
    with process.stderr:
        assert "engine's process ended" in process.stderr.read()
