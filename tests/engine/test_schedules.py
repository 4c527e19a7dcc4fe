"""Random requests, aborts and steps over scheduler, pages and both tiers: every answer is its solo run's, and nothing leaks."""

import dataclasses
import random

import fake
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.engine.scheduler import Limits
from hetero.request import Request, Sampling

CONTEXT = 72
STORIES = [tuple((s * 31 + i * i * 3 + i) % 57 + 1 for i in range(60)) for s in range(5)]


@pytest.fixture(autouse=True, scope="module")
def small_numbers():
    """So that texts of a few pages have windows kept along them, and a few prompts are more than one step looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.memory.pool.APART", 24)
        patch.setattr("hetero.engine.scheduler.LOOK_PAGES", 30)
        yield


def request(rng, id):
    """A prompt that often begins like another one, with any sampling that the engine serves differently."""
    story = rng.choice(STORIES)
    prompt = story[:rng.randint(1, 60)] + tuple(rng.randint(1, 57) for _ in range(rng.choice((0, 0, 1, 6))))
    sampling = Sampling(temperature=rng.choice((0.0, 1.0)), seed=rng.randint(0, 99), max_tokens=rng.choice((1, 3, 12, 30)), n=rng.choice((1, 1, 1, 2, 3)),
                        repetition_penalty=rng.choice((1.0, 1.0, 1.2)), prompt_logprobs=rng.choice((None, None, None, 1)), min_tokens=rng.choice((0, 1)))
    if rng.random() < 0.06:
        prompt = (*prompt[:30], 60)                        # the poison
    return Request(id, prompt, sampling, priority=rng.choice((0, 0, 0, 1)), cache_prompt=rng.random() < 0.9)


def schedule(seed, steps, limits, **kw):
    """Drives one engine for `steps` steps; returns how many answers were compared, and the engine's statistics."""
    rng = random.Random(seed)
    engine, solo, requests, told, compared = fake.engine(limits=limits, context=CONTEXT, poison=60, **kw), {}, {}, {}, 0
    engine.scheduler.pace.learn = lambda *a: None          # timing must not decide what is tested
    window, marks = kw.get("window"), None if kw.get("marks") is None else 0

    def want(r):
        key = (r.prompt, r.sampling)
        if key not in solo:
            alone = fake.engine(context=CONTEXT, poison=60, window=window, marks=marks, limits=Limits(max_batch=1, chunk_tokens=64))
            alone.add(dataclasses.replace(r, id="solo"))
            solo[key] = {i: (fake.tokens(o), o[-1].finish) for (_, i), o in fake.run(alone, check=False).items()}
        return solo[key]

    for step in range(steps):
        while len(requests) < 10 and rng.random() < 0.35:
            r = request(rng, f"{step}.{len(requests)}.{rng.random()}")
            requests[r.id] = r
            engine.add(r)
        if requests and rng.random() < 0.04:
            engine.abort(rng.choice(list(requests)))
        if rng.random() < 0.003:
            engine.clear()
        for o in engine.step():
            told.setdefault((o.id, o.index), []).append(o)
            if o.finish:
                expected, finish = want(requests[o.id])[o.index]
                got = fake.tokens(told.pop((o.id, o.index)))
                assert got == (expected if o.finish != "abort" else expected[:len(got)]), requests[o.id]
                assert o.finish in (finish, "abort")
                compared += 1
        engine.scheduler.check()
        assert {s.request.id for s in engine.scheduler.running + engine.scheduler.waiting} <= set(engine.live)
        requests = {id: r for id, r in requests.items() if id in engine.live}
    for id in list(engine.live):
        engine.abort(id)
    engine.step()
    assert engine.idle and engine.pages.held == 0 and not engine.scheduler.running and not engine.scheduler.waiting
    return compared, engine.stats()


@pytest.mark.parametrize(("window", "marks"), [(None, None), (9, None), (None, 3), ((None, 9), None), ((9, None, 20), None), ((None, 9), 3)])
def test_a_crowded_engine_with_both_tiers_gives_every_request_its_solo_answer(window, marks):
    compared, stats = schedule(1, 250, Limits(max_batch=4, chunk_tokens=24), pages=20, host_pages=16, window=window, marks=marks)
    assert compared > 50 and stats.aborted and stats.failed and stats.cached_tokens
    assert window == 9 or (stats.preempted and stats.copied_pages)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([18, 20, 30, 60]), st.sampled_from([0, 5, 40]), st.sampled_from([None, 4, 11, (None, 4), (11, None), (4, None, 11)]), st.sampled_from([1, 4, 12, 100]),
       st.integers(1, 6), st.sampled_from([None, None, 0, 1, 5]))
def test_any_sizes_do(seed, pages, host_pages, window, chunk, batch, marks):
    schedule(seed, 60, Limits(max_batch=batch, chunk_tokens=chunk, prompt_logprobs_chunk=7, patience_s=0.05), pages=pages, host_pages=host_pages, window=window,
             marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ten_thousand_steps(seed):
    compared, _ = schedule(seed, 2000, Limits(max_batch=5, chunk_tokens=(8, 24, 100)[seed % 3]), pages=(20, 28, 60)[seed // 2], host_pages=(0, 12)[seed % 2],
                           window=(None, (None, 9), (9, None, 20))[seed % 3], marks=(None, 3)[seed // 3])
    assert compared > 300
