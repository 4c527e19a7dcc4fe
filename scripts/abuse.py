#!/usr/bin/env python3
"""Bad company: 200 clients connect, stall, leave in the middle, send broken bodies and huge schemas, while 4 honest ones must get, word for word, the
answers that they get alone (the server runs --deterministic). Afterwards memory and open files are as before, every gauge is zero.

    python scripts/abuse.py [--seconds 120] [--bad 200] [--json]

/health is asked all the time and its 99th percentile printed, not judged: on a busy machine it is the machine's. Only loopback is spoken to.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from endpoint import server

PROMPTS = ("Why is the sky blue?", "Tell me a story about a fox.", "List 3 healthy snacks.", "What is the moon?")
SCHEMAS: tuple[Any, ...] = ({"enum": [str(i) for i in range(3000)]}, {"type": "array", "minItems": 10**6, "items": {"type": "object"}},
                            {"type": "string", "pattern": "(a*)*b" * 500}, {"$ref": "http://127.0.0.1:1/x"},
                            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}})
BODIES: tuple[bytes, ...] = (b"", b"{", b"[" * 100_000, b'{"messages": 3}', b"\xff\xfe" * 500,
                             b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
                             b'{"messages": [{"role": "user", "content": "' + b"word " * 60_000 + b'"}]}', b'{"messages": [{"role": "god"}]}')


def asked(i: int, **more: Any) -> dict[str, Any]:
    """What an honest client asks: greedy, and by a seed."""
    return {"messages": [{"role": "user", "content": PROMPTS[i % 4]}], "max_tokens": 24, "temperature": 0.8 * (i % 2), "seed": i, **more}


async def answer(http: httpx.AsyncClient, i: int) -> str:
    """Whole or streamed, tried again while the house is full."""
    while True:
        if i % 3:
            r = await http.post("/v1/chat/completions", json=asked(i))
            if r.status_code == 200:
                return str(r.json()["choices"][0]["message"]["content"])
            status, text = r.status_code, r.text
        else:
            text = ""
            async with http.stream("POST", "/v1/chat/completions", json=asked(i, stream=True)) as s:
                status = s.status_code
                async for line in s.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return f"error: {event['error']['message']}"
                        text += event["choices"][0]["delta"].get("content") or ""
            if status == 200:
                return text
        if status != 429:
            return f"{status}: {text}"
        await asyncio.sleep(1.0)


async def honest(http: httpx.AsyncClient, me: int, want: list[str], until: float, told: dict[str, Any]) -> None:
    i = me
    while time.monotonic() < until:
        got = await answer(http, i % len(want))
        told["answers"] += 1
        if got != want[i % len(want)]:
            told["wrong"].append((i % len(want), got))
        i += 5


async def bad(port: int, rng: random.Random, until: float) -> None:
    """One misdeed after the other, each on a connection of its own."""
    while time.monotonic() < until:
        kind = rng.randrange(7)
        body = json.dumps(asked(rng.randrange(99), stream=kind == 2, ignore_eos=True)).encode()
        if kind == 4:
            body = json.dumps(asked(1, response_format={"type": "json_schema", "json_schema": {"schema": rng.choice(SCHEMAS)}})).encode()
        elif kind == 5:
            body = rng.choice(BODIES)
        elif kind == 6:
            body = json.dumps({"prompt": [rng.randrange(-5, 10**9)] * 50}).encode()
        path = rng.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize")) if kind >= 4 else "/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        data = head + body
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data if kind else data[: rng.randrange(len(data))])            # kind 0: stalls in the middle
                await asyncio.wait_for(writer.drain(), 5)
                if kind >= 3:
                    await asyncio.wait_for(reader.read(300), 20)
                await asyncio.sleep(rng.random() * 1.5)
            finally:
                writer.close()
        except (OSError, TimeoutError):
            await asyncio.sleep(0.2)


async def watch(url: str, until: float, times: list[float]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while time.monotonic() < until:
            began = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)


def held(process: psutil.Process) -> dict[str, float]:
    """MiB and open files of the server and of what it started."""
    family = [process, *process.children(recursive=True)]
    return {"mib": sum(p.memory_full_info().uss for p in family) / 2**20, "files": sum(p.num_fds() for p in family)}


async def idle(http: httpx.AsyncClient, seconds: float = 60) -> dict[str, float]:
    """The gauges once they are zero, or as they are at the end."""
    end = time.monotonic() + seconds
    while True:
        lines = (await http.get("/metrics")).text.splitlines()
        found = {k: float(v) for k, v in (line.split() for line in lines if not line.startswith("#") and "{" not in line)}
        gauges = {k: found[f"hetero_{k}"] for k in ("requests_active", "running", "waiting", "pages_held")}
        if not any(gauges.values()) or time.monotonic() > end:
            return gauges
        await asyncio.sleep(0.5)


async def run(url: str, pid: int, seconds: float, count: int) -> dict[str, Any]:
    port, process, told = int(url.rpartition(":")[2]), psutil.Process(pid), dict[str, Any](answers=0, wrong=[])
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        want = [await answer(http, i) for i in range(20)]
        times: list[float] = []
        warm = time.monotonic() + min(15.0, seconds / 3)                                      # allocators and caches fill
        await asyncio.gather(*(bad(port, random.Random(10_000 + i), warm) for i in range(count)))
        await idle(http)
        before = held(process)
        until = time.monotonic() + seconds
        await asyncio.gather(watch(url, until, times), *(honest(http, i, want, until, told) for i in range(4)),
                             *(bad(port, random.Random(i), until) for i in range(count)))
        gauges = await idle(http)
        await asyncio.sleep(6)                                                                # connections that are kept open end
        after = held(process)
        again = [await answer(http, i) for i in range(8)] == want[:8]
    ms = statistics.quantiles(times, n=100)
    return {**told, "seconds": seconds, "bad clients": count, "equal afterwards": again, "health asked": len(times), "health p50 ms": ms[49] * 1e3,
            "health p99 ms": ms[98] * 1e3, "gauges": gauges, "MiB before": before["mib"], "MiB after": after["mib"], "files before": before["files"],
            "files after": after["files"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--bad", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with server(None, "--deterministic", "--max-requests", "300", log=log) as (url, process):
            found = asyncio.run(run(url, process.pid, args.seconds, args.bad))
        trace = "Traceback" in log.read_text()
    found["traces in the log"] = trace
    print(json.dumps(found) if args.json else "\n".join(f"{k:20}{v}" for k, v in found.items()))
    flat = found["MiB after"] < found["MiB before"] * 1.05 + 32 and found["files after"] <= found["files before"] + 8
    return int(bool(found["wrong"]) or not found["answers"] or any(found["gauges"].values()) or not flat or not found["equal afterwards"] or trace)


if __name__ == "__main__":
    sys.exit(main())
