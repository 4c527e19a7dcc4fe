"""`hetero bench serve URL`: drives any OpenAI-compatible server with a load and tells what its clients met; knows no server's inside.

A client's clock: TTFT ends with the first piece that holds text, TPOT is the rest of the answer's time over its other tokens. Tokens are the server's
own count (`usage`), pieces where it sends none. Goodput counts answers that kept every limit.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hetero.bench.arrivals import Load
from hetero.bench.result import Plot, Result, Row
from hetero.errors import BadOption

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Target:
    """`url`: up to and including /v1. `extra`: fields that are added to each request's body."""

    url: str
    model: str
    key: str = ""
    chat: bool = True
    extra: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 600.0


@dataclass
class Seen:
    """One answer as its client met it. Times in seconds after the load began."""

    began: float
    turn: int = 0
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    pieces: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return (self.first or self.ended) - self.began

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.ended - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to count as good; None: no limit. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None

    def kept(self, seen: Seen) -> bool:
        return not seen.error and all(limit is None or (value or 0.0) <= limit for limit, value in (
            (self.ttft_s, seen.ttft), (self.tpot_s, seen.tpot), (self.total_s, seen.ended - seen.began)))


def address(url: str) -> str:
    """http://host:port, with or without /v1 -> ending in /v1. Raises BadOption."""
    if not url.startswith(("http://", "https://")):
        raise BadOption(f"{url!r} is no address of a server", "hetero bench serve http://127.0.0.1:8080")
    stem = url.rstrip("/")
    return stem if stem.endswith("/v1") else f"{stem}/v1"


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The server's first model. Raises BadOption where it has none or does not answer."""
    try:
        answer = await client.get(f"{url}/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as why:
        raise BadOption(f"{url}/models: {why or type(why).__name__}", "is the server up? --model names the model where it lists none") from why


async def ask(client: httpx.AsyncClient, target: Target, messages: Messages, most: int, seen: Seen, clock: Callable[[], float]) -> None:
    """One streamed answer, into `seen`; what goes wrong is its `error`."""
    body: dict[str, Any] = {"model": target.model, "max_tokens": most, "stream": True, "stream_options": {"include_usage": True}}
    body |= dict(target.extra)
    body |= {"messages": messages} if target.chat else {"prompt": "\n".join(m["content"] for m in messages)}
    try:
        async with client.stream("POST", f"{target.url}/{'chat/completions' if target.chat else 'completions'}", json=body) as answer:
            if answer.status_code != 200:
                seen.error = f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')[:200]}"
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        take(json.loads(line[5:]), seen, clock)
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as why:
        seen.error = f"{type(why).__name__}: {why}"
    seen.ended = clock()
    if not seen.error and seen.first is None and not seen.tokens:
        seen.error = "an answer without text"
    seen.tokens = seen.tokens or seen.pieces


def take(event: dict[str, Any], seen: Seen, clock: Callable[[], float]) -> None:
    """One event of a stream."""
    if event.get("error"):
        seen.error = str(event["error"])[:200]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text:
            seen.first = clock() if seen.first is None else seen.first
            seen.pieces += 1
            seen.text += text if choice.get("text") or delta.get("content") else ""
    if usage := event.get("usage"):
        seen.prompt_tokens, seen.tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


async def converse(client: httpx.AsyncClient, target: Target, said: Sequence[tuple[str, int]], clock: Callable[[], float]) -> list[Seen]:
    """The turns of one conversation, each with what was said before; it ends with the first error."""
    messages: Messages = []
    answers: list[Seen] = []
    for turn, (text, most) in enumerate(said):
        messages.append({"role": "user", "content": text})
        answers.append(Seen(clock(), turn))
        await ask(client, target, messages, most, answers[-1], clock)
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def drive(target: Target, load: Load, tell: Callable[[str], None],
                transport: httpx.AsyncBaseTransport | None = None) -> tuple[Target, list[Seen], float]:
    """The target as it was found, every answer, and the seconds from the first request to the last answer."""
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=target.timeout_s, limits=pool, transport=transport) as client:
        if not target.model:
            target = Target(target.url, await first_model(client, target.url), target.key, target.chat, target.extra, target.timeout_s)
        begin = time.perf_counter()
        room = asyncio.Semaphore(load.concurrency if load.rate is None else max(1, load.conversations))
        done: list[Seen] = []

        def clock() -> float:
            return time.perf_counter() - begin

        async def one(at: float, said: list[tuple[str, int]]) -> None:
            if load.rate is not None:
                await asyncio.sleep(max(0.0, at - clock()))
            async with room:
                done.extend(await converse(client, target, said, clock))
            if len(done) % 50 == 0:
                tell(f"{len(done)} answers")
        await asyncio.gather(*(one(at, said) for at, said in load.plans()))
        return target, done, clock()


def percentile(samples: Sequence[float], share: float) -> float:
    """By linear interpolation between order statistics."""
    ordered = sorted(samples)
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def spans(name: str, samples: Sequence[float], scale: float = 1e3) -> Row:
    row: Row = {"what": name, "count": len(samples)}
    for label, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        row[label] = scale * percentile(samples, share) if samples else None
    return row | {"mean": scale * sum(samples) / len(samples) if samples else None, "max": scale * max(samples) if samples else None}


def summary(target: Target, load: Load, limits: Limits, seen: Sequence[Seen], wall: float) -> Result:
    good = [s for s in seen if not s.error]
    rows = [spans("TTFT ms", [s.ttft for s in good]), spans("TPOT ms", [t for s in good if (t := s.tpot) is not None]),
            spans("whole answer ms", [s.ended - s.began for s in good]), spans("prompt tokens", [s.prompt_tokens for s in good], 1.0),
            spans("answer tokens", [s.tokens for s in good], 1.0)]
    if load.turns > 1:
        rows += [spans(f"TTFT ms, turn {t + 1}", [s.ttft for s in good if s.turn == t]) for t in range(load.turns)]
    kept = sum(limits.kept(s) for s in seen)
    how = f"{load.rate:g} conversations/s (Poisson)" if load.rate is not None else f"{load.concurrency} at a time"
    facts: dict[str, Any] = {
        "server": target.url, "model": target.model, "load": f"{load.conversations} conversations of {load.turns} turns, {how}, seed {load.seed}",
        "seconds": round(wall, 2), "answers": len(good), "errors": len(seen) - len(good), "answers/s": round(len(good) / wall, 3),
        "answer tokens/s": round(sum(s.tokens for s in good) / wall, 1), "prompt tokens/s": round(sum(s.prompt_tokens for s in good) / wall, 1)}
    if limits != Limits():
        named = (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s), ("whole", limits.total_s))
        said = ", ".join(f"{n} {v * 1e3:g} ms" for n, v in named if v is not None)
        facts |= {"limits": said, "goodput answers/s": round(kept / wall, 3), "kept the limits": f"{kept} of {len(seen)}"}
    notes = ["Times are a client's own; the load generator and the server share this machine when the address is local.",
             *[f"error, {n} times: {text}" for text, n in counted([s.error for s in seen if s.error])]]
    samples = [{"began s": s.began, "turn": s.turn + 1, "TTFT ms": 1e3 * s.ttft, "TPOT ms": None if (t := s.tpot) is None else 1e3 * t,
                "answer tokens": s.tokens} for s in good]
    return Result("serve", facts, rows, notes, [Plot("began s", y, "turn") for y in ("TTFT ms", "TPOT ms")], samples)


def counted(texts: Sequence[str]) -> list[tuple[str, int]]:
    return sorted(((t, texts.count(t)) for t in set(texts)), key=lambda p: -p[1])[:5]


def bench(target: Target, load: Load, limits: Limits, tell: Callable[[str], None]) -> Result:
    """Raises BadOption for a server that is not there."""
    found, seen, wall = asyncio.run(drive(target, load, tell))
    return summary(found, load, limits, seen, wall)
