"""The load generator against our server over loopback, and against servers that are fast, slow, broken or strange."""
import asyncio
import json
import random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.bench.arrivals import Load, lengths
from hetero.bench.load import Limits, Seen, Target, address, drive, percentile, summary
from hetero.engine.scripted import Script
from hetero.errors import BadOption
from tests.serve.conftest import folder, make_stage, shared_stage, stage  # noqa: F401  the same server


def load(**values):
    return Load(**{"conversations": 6, "concurrency": 2, "rate": None, "prompt": lengths("8", ""), "output": lengths("4", ""), **values})


def run(target, wanted, transport=None):
    return asyncio.run(drive(target, wanted, lambda text: None, transport))


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n".encode()


class Fake(httpx.AsyncBaseTransport):
    """An OpenAI server without a network: `pieces` of text with pauses between; counts who is there at once."""

    def __init__(self, pieces=("one", " two", " three"), pause_s=0.0, usage=True, status=200, cut=False):
        self.pieces, self.pause_s, self.usage, self.status, self.cut = pieces, pause_s, usage, status, cut
        self.bodies, self.here, self.most, self.keys = [], 0, 0, []

    async def handle_async_request(self, request):
        self.keys.append(request.headers.get("authorization"))
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "fake-1"}]})
        self.bodies.append(json.loads(await request.aread()))
        if self.status != 200:
            return httpx.Response(self.status, text="too much")
        return httpx.Response(200, stream=Pieces(self))


class Pieces(httpx.AsyncByteStream):
    def __init__(self, fake):
        self.fake = fake

    async def __aiter__(self):
        fake = self.fake
        fake.here += 1
        fake.most = max(fake.most, fake.here)
        try:
            yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
            for piece in fake.pieces:
                await asyncio.sleep(fake.pause_s)
                yield event(choices=[{"delta": {"content": piece}}])
            if fake.cut:
                raise httpx.RemoteProtocolError("peer closed connection")
            if fake.usage:
                yield event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": 30})
            yield b": a comment\n\ndata: [DONE]\n\n"
        finally:
            fake.here -= 1


def test_our_server_answers_a_load_over_loopback(stage):  # noqa: F811
    stage.says = Script((*stage.tok.encode("Hello there, you."), 2), delay_s=0.002)
    target, seen, wall = run(Target(f"{stage.url}/v1", ""), load(conversations=5))
    assert target.model == "demo" and [s.error for s in seen] == [""] * 5 and all(s.tokens == 4 for s in seen)      # as long as was asked for
    assert all(0 < s.ttft < s.ended - s.began and s.tpot > 0 for s in seen)
    found = summary(target, load(), Limits(), seen, wall)
    assert found.facts["answers"] == len(found.samples) == 5 and {p.y for p in found.plots} <= set(found.samples[0])


def test_our_server_hears_the_turns_before(stage):  # noqa: F811
    _, seen, _ = run(Target(f"{stage.url}/v1", "demo"), load(conversations=1, turns=3))
    assert [s.turn for s in seen] == [0, 1, 2] and [s.prompt_tokens for s in seen] == sorted({s.prompt_tokens for s in seen})


def test_concurrency_is_kept_and_usage_counts():
    fake = Fake(pause_s=0.002)
    target, seen, _ = run(Target("http://fake/v1", "", key="k", extra=(("temperature", 0),)), load(conversations=9, concurrency=3), fake)
    assert fake.most == 3 and target.model == "fake-1" and {s.tokens for s in seen} == {30} and set(fake.keys) == {"Bearer k"}
    assert fake.bodies[0]["temperature"] == 0 and fake.bodies[0]["max_tokens"] == 4 and fake.bodies[0]["stream_options"] == {"include_usage": True}


def test_without_usage_pieces_count_and_thinking_is_text():
    _, seen, _ = run(Target("http://fake/v1", "m"), load(conversations=1), Fake(usage=False))
    assert seen[0].tokens == 3 and seen[0].text == "one two three"


def test_poisson_moments_are_those_of_the_plan_and_do_not_wait_for_answers():
    wanted = load(conversations=12, rate=200.0)
    moments = [at for at, _ in wanted.plans()]
    fake = Fake(pause_s=0.05)
    _, seen, _ = run(Target("http://fake/v1", "m"), wanted, fake)
    began = sorted(s.began for s in seen)
    assert moments == sorted(moments) and moments[0] == 0.0 and fake.most > 4
    assert all(b >= m for b, m in zip(began, moments, strict=True))


@pytest.mark.parametrize(("fake", "said"), [(Fake(status=429), "HTTP 429: too much"), (Fake(cut=True), "peer closed"), (Fake(pieces=(), usage=False), "without text")])
def test_what_goes_wrong_is_counted_and_ends_its_conversation(fake, said):
    target, seen, wall = run(Target("http://fake/v1", "m"), load(conversations=3, turns=2), fake)
    found = summary(target, load(), Limits(), seen, wall)
    assert len(seen) == 3 and found.facts["errors"] == 3 and found.facts["answers"] == 0 and any(said in note and "3 times" in note for note in found.notes)


def test_a_server_that_is_not_there_is_one_clear_error():
    with pytest.raises(BadOption, match="/v1/models"):
        run(Target("http://127.0.0.1:9/v1", "", timeout_s=2), load())
    with pytest.raises(BadOption, match="no address"):
        address("localhost:8080")
    assert address("http://h:1/") == address("http://h:1/v1/") == "http://h:1/v1"


def test_goodput_counts_answers_that_kept_every_limit():
    good, slow, wrong = Seen(0.0, first=0.1, ended=1.0, tokens=10), Seen(0.0, first=0.5, ended=9.0, tokens=10), Seen(0.0, ended=0.1, error="x")
    limits = Limits(ttft_s=0.2, tpot_s=0.1)
    found = summary(Target("u", "m"), load(), limits, [good, slow, wrong], 2.0)
    assert found.facts["kept the limits"] == "1 of 3" and found.facts["goodput answers/s"] == 0.5 and found.facts["errors"] == 1
    assert found.rows[0]["p50"] == pytest.approx(300) and good.tpot == pytest.approx(0.1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_lie_between_the_samples(samples, share):
    assert min(samples) <= percentile(samples, share) <= max(samples) * (1 + 1e-12)
    assert percentile(samples, 0.0) == min(samples) and percentile(samples, 1.0) == pytest.approx(max(samples))


@pytest.mark.parametrize(("text", "low", "high"), [("512", 512, 512), ("fixed:7", 7, 7), ("uniform:100-500", 100, 500), ("normal:50,5", 1, 100), ("lognormal:64,0.5", 1, 2000)])
def test_lengths_are_drawn_from_what_was_said(text, low, high):
    rng, found = random.Random(1), lengths(text, "--prompt-length")
    drawn = [found.draw(rng) for _ in range(300)]
    assert low <= min(drawn) <= max(drawn) <= high and (low == high or len(set(drawn)) > 10)


@pytest.mark.parametrize("text", ["", "0", "uniform:5-2", "uniform:5", "zipf:3", "-4", "normal:5"])
def test_lengths_that_cannot_be_meant_name_the_flag(text):
    with pytest.raises(BadOption, match="--output-length"):
        lengths(text, "--output-length")


def test_a_seed_makes_the_same_load_again():
    wanted = load(conversations=4, turns=2, rate=3.0, prompt=lengths("uniform:3-9", ""))
    assert list(wanted.plans()) == list(wanted.plans()) != list(load(conversations=4, turns=2, rate=3.0, prompt=lengths("uniform:3-9", ""), seed=1).plans())
