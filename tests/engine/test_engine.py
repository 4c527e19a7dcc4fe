"""The engine on a decoder whose logits depend on the KV stored."""

import dataclasses
import math

import fake
import pytest
import torch

from hetero.engine.scheduler import Limits, Pace
from hetero.engine.scripted import Script, ScriptedEngine
from hetero.errors import BadRequest, ContextExceeded, EngineFailed, HeteroError
from hetero.request import Request, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
WARM = Sampling(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


def prompt(n, salt=1):
    return tuple((salt * 17 + i * i * 7 + i) % (fake.VOCAB - 1) + 1 for i in range(n))


def solo(request, **kw):
    engine = fake.engine(**kw)
    engine.add(dataclasses.replace(request))
    return {key: fake.tokens(outputs) for key, outputs in fake.run(engine).items()}


def test_a_request_gets_its_tokens_one_per_step_and_ends_with_length():
    engine = fake.engine()
    engine.add(Request("a", prompt(10), GREEDY))
    outputs = fake.run(engine)[("a", 0)]
    assert [len(o.tokens) for o in outputs] == [1] * 12
    assert [o.finish for o in outputs] == [None] * 11 + ["length"]
    assert outputs[0].prompt_tokens == 10
    assert engine.idle and engine.pages.held == 0


@pytest.mark.parametrize("window", [None, 10, (None, 10), (10, None, 5)])
def test_chunks_neighbours_and_the_prefix_cache_change_no_token(window):
    requests = [Request(str(i), prompt(20 + 3 * i, salt=i // 2), dataclasses.replace(WARM, seed=i)) for i in range(6)]
    want = {}
    for request in requests:
        want |= solo(request, window=window)
    for chunk, size in ((4, 4), (16, 4), (64, 8)):
        engine = fake.engine(window=window, page_size=size, limits=Limits(max_batch=4, chunk_tokens=chunk))
        for request in requests:
            engine.add(request)
        got = {key: fake.tokens(outputs) for key, outputs in fake.run(engine).items()}
        assert got == want


def test_a_repeated_prompt_is_reused_but_for_its_last_page_and_the_last_token_is_evaluated_again():
    engine = fake.engine()
    for id in ("cold", "warm"):
        engine.add(Request(id, prompt(16), WARM))
        outputs = fake.run(engine)[(id, 0)]
        if id == "cold":
            first, miss = fake.tokens(outputs), outputs[0].cache_miss
    assert fake.tokens(outputs) == first
    assert miss == "not_cached@tok 0" and outputs[0].cached_tokens == 12 and outputs[0].cache_miss is None


@pytest.mark.parametrize("window", [None, 10, (None, 10)])
def test_the_second_turn_of_a_chat_reuses_prompt_and_answer(window):
    engine = fake.engine(window=window)
    engine.add(Request("1", prompt(21), GREEDY))
    answer = fake.tokens(fake.run(engine)[("1", 0)])
    engine.add(Request("2", (*prompt(21), *answer, 1, 2, 3, 4, 5, 6, 7), GREEDY))
    output = fake.run(engine)[("2", 0)][0]
    assert output.cached_tokens == (21 + 12 - 1) // 4 * 4 and output.cache_miss == "not_cached@tok 32"
    changed = list(prompt(21))
    changed[9] += 1
    engine.add(Request("3", tuple(changed), GREEDY))
    output = fake.run(engine)[("3", 0)][0]
    assert (output.cached_tokens, output.cache_miss) == (8, "prefix_mismatch@tok 9")


@pytest.mark.parametrize("window", [None, (None, 10)])
def test_who_gave_way_comes_back_from_system_memory_instead_of_being_computed_again(window):
    requests = [Request(str(i), prompt(20, i), dataclasses.replace(WARM, max_tokens=40, seed=i)) for i in range(4)]
    prefilled = {}
    for host_pages in (0, 60):
        engine = fake.engine(pages=24, host_pages=host_pages, context=70, window=window)
        for request in requests:
            engine.add(request)
        got = {key: fake.tokens(outputs) for key, outputs in fake.run(engine).items()}
        assert all(got[(r.id, 0)] == solo(r, window=window)[(r.id, 0)] for r in requests) and engine.stats().preempted > 0
        prefilled[host_pages] = engine.stats().prefill_tokens
    assert prefilled[60] < prefilled[0] and prefilled[60] <= 4 * 20 + 4 * engine.stats().preempted


def test_evicted_prompts_come_back_from_the_host_tier_and_are_named_evicted_without_one():
    for host_pages, cached, miss in ((0, 0, "evicted@tok 0"), (32, 28, None)):
        engine = fake.engine(pages=12, host_pages=host_pages, context=44)
        want = solo(Request("a", prompt(30), WARM), context=44)[("a", 0)]
        for id, salt in (("a", 1), ("b", 2), ("c", 3)):
            engine.add(Request(id, prompt(30, salt), WARM))
            fake.run(engine)
        engine.add(Request("d", prompt(30), WARM))
        outputs = fake.run(engine)[("d", 0)]
        assert fake.tokens(outputs) == want
        assert (outputs[0].cached_tokens, outputs[0].cache_miss) == (cached, miss)


def test_equal_prompts_that_come_together_are_computed_once():
    engine = fake.engine(limits=Limits(max_batch=4, chunk_tokens=8))
    for i in range(4):
        engine.add(Request(str(i), prompt(40), dataclasses.replace(WARM, seed=i)))
    outputs = fake.run(engine)
    assert [outputs[(str(i), 0)][0].cached_tokens for i in range(4)] == [0, 36, 36, 36]
    assert all(fake.tokens(outputs[(str(i), 0)]) == solo(Request("a", prompt(40), dataclasses.replace(WARM, seed=i)))[("a", 0)] for i in range(4))


def test_a_chunk_is_at_most_twice_the_largest_one_measured_and_follows_what_steps_took():
    pace = Pace(lambda tokens, context: 1e-3 * tokens, 16)
    assert pace.chunk(0, 0.2, 2048) == 32
    pace.learn(32, 32, 0.064)
    assert pace.scale == pytest.approx(2.0) and pace.chunk(0, 0.2, 2048) == 64
    pace.learn(512, 512, 1.024)
    pace.learn(0, 0, 0.04)
    assert pace.decode_s == pytest.approx(0.02) and pace.chunk(0, 0.2, 2048) == 48 and pace.chunk(0, 0.001, 2048) == 16


def test_a_model_with_states_goes_on_from_the_marks_of_its_prompt_and_its_answer():
    engine = fake.engine(marks=4)
    want = {n: solo(Request("a", prompt(n), WARM), marks=0)[("a", 0)] for n in (21, 24)}
    engine.add(Request("1", prompt(21), WARM))
    answer = fake.tokens(fake.run(engine)[("1", 0)])
    assert answer == want[21]
    engine.add(Request("2", prompt(21), WARM))
    output = fake.run(engine)[("2", 0)]
    assert output[0].cached_tokens == 20 and fake.tokens(output) == answer
    second = Request("3", (*prompt(21), *answer, 5, 6, 7), WARM)
    engine.add(second)
    output = fake.run(engine)[("3", 0)]
    assert output[0].cached_tokens == 32 and fake.tokens(output) == solo(dataclasses.replace(second, id="a"), marks=0)[("a", 0)]
    engine.add(Request("4", (*prompt(18), 9, 9, 9, 9), WARM))
    output = fake.run(engine)[("4", 0)]
    assert (output[0].cached_tokens, output[0].cache_miss) == (0, "state_not_rewindable@tok 0")


def test_a_private_prompt_leaves_nothing_behind():
    engine = fake.engine()
    engine.add(Request("a", prompt(20), WARM, cache_prompt=False))
    assert fake.run(engine)[("a", 0)][0].cache_miss == "cache_prompt"
    assert len(engine.pages.pools[0].free) == engine.pages.pools[0].count and not engine.pages.index


def test_n_answers_share_the_prompts_pages_and_each_has_its_own_stream():
    engine = fake.engine(limits=Limits(max_batch=4, chunk_tokens=64))
    engine.add(Request("a", prompt(18), dataclasses.replace(WARM, n=3)))
    outputs = fake.run(engine)
    answers = [fake.tokens(outputs[("a", i)]) for i in range(3)]
    assert len({tuple(a) for a in answers}) == 3
    assert [outputs[("a", i)][0].cached_tokens for i in range(3)] == [0, 16, 16]
    assert answers[0] == solo(Request("a", prompt(18), WARM))[("a", 0)]


def test_an_answer_longer_than_the_window_leaves_the_prompts_end_to_go_on_from():
    engine = fake.engine(pages=(64, 22), window=(None, 10), context=100)
    engine.add(Request("a", prompt(40), dataclasses.replace(WARM, max_tokens=50)))
    answer = fake.tokens(fake.run(engine)[("a", 0)])
    engine.add(Request("other", prompt(34, 5), dataclasses.replace(WARM, max_tokens=20)))
    fake.run(engine)                                       # takes pages that windows have passed, not those where somebody may go on
    engine.add(Request("b", prompt(40), dataclasses.replace(WARM, max_tokens=50)))
    output = fake.run(engine)[("b", 0)]
    assert (output[0].cached_tokens, output[0].cache_miss) == (36, None) and fake.tokens(output) == answer


def test_running_out_of_pages_preempts_and_loses_nothing():
    requests = [Request(str(i), prompt(20, i), dataclasses.replace(WARM, max_tokens=40, seed=i)) for i in range(4)]
    want = {}
    for request in requests:
        want |= solo(request)
    engine = fake.engine(pages=20, context=70)
    for request in requests:
        engine.add(request)
    got = {key: fake.tokens(outputs) for key, outputs in fake.run(engine).items()}
    assert got == want and engine.stats().preempted > 0


@pytest.mark.parametrize("when", [0, 1, 2, 6])
def test_an_abort_in_any_phase_frees_the_pages_at_once_and_hurts_nobody(when):
    engine = fake.engine(limits=Limits(max_batch=2, chunk_tokens=8))
    for i in range(3):
        engine.add(Request(str(i), prompt(20, i), GREEDY))
    told = {}
    for _ in range(when):
        for o in engine.step():
            told.setdefault((o.id, o.index), []).append(o)
    engine.abort("1")
    engine.abort("unknown")
    assert all(s.request.id != "1" for s in engine.scheduler.running + engine.scheduler.waiting)
    engine.scheduler.check()
    last = engine.step()
    assert [o.finish for o in last if o.id == "1"] == ["abort"]
    for o in last:
        told.setdefault((o.id, o.index), []).append(o)
    for key, outputs in fake.run(engine).items():
        told.setdefault(key, []).extend(outputs)
    assert fake.tokens(told[("2", 0)]) == solo(Request("2", prompt(20, 2), GREEDY))[("2", 0)]
    assert engine.stats().aborted == 1 and engine.pages.held == 0


def test_a_request_with_nan_logits_ends_alone_and_its_pages_are_zeroed_and_never_indexed():
    engine = fake.engine(poison=60, limits=Limits(max_batch=4, chunk_tokens=64))
    bad = (*prompt(9), 60, *prompt(8, 3))
    good = Request("good", tuple(t if t != 60 else 1 for t in prompt(20, 5)), dataclasses.replace(GREEDY, logit_bias=((60, -100.0),)))
    engine.add(Request("bad", bad, dataclasses.replace(GREEDY, n=2)))
    engine.add(good)
    outputs = fake.run(engine)
    for i in range(2):
        last = outputs[("bad", i)][-1]
        assert last.finish == "error" and last.error == "NaN or infinity after layer 1 at token 18" and last.tokens == ()
    assert len(fake.tokens(outputs[("good", 0)])) == 12
    engine.add(Request("again", bad, GREEDY))
    assert fake.run(engine)[("again", 0)][0].cached_tokens == 0


@pytest.mark.parametrize("marks", [None, 8])
def test_a_request_that_the_device_has_no_room_for_ends_alone(marks):
    engine, small = fake.engine(marks=marks), Request("small", prompt(9), WARM)
    want = solo(small, marks=marks)[("small", 0)]
    real = engine.runner.decoder.__class__.__call__

    def tight(self, step, cache):
        if len(step.tokens) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, step, cache)
    engine.runner.decoder = type("Tight", (fake.FakeDecoder,), {"__call__": tight})()
    engine.add(small)
    first = engine.step()
    engine.add(Request("large", prompt(40, salt=9), dataclasses.replace(WARM, n=2)))
    got = fake.run(engine)
    assert [o.finish for o in got[("large", 0)]] == ["error"] and "out of GPU memory" in got[("large", 0)][-1].error
    assert fake.tokens(first + got[("small", 0)]) == want
    assert engine.idle and engine.pages.held == 0 and engine.stats().failed == 2


def test_logprobs_are_one_per_token_and_finite_and_the_best_come_first():
    engine = fake.engine()
    engine.add(Request("a", prompt(20), dataclasses.replace(WARM, logprobs=3, prompt_logprobs=2)))
    outputs = fake.run(engine)[("a", 0)]
    assert all(len(o.tokens) == len(o.logprobs) == 1 and o.tokens[0] == o.logprobs[0].token for o in outputs)
    for o in outputs:
        top = [p for _, p in o.logprobs[0].top]
        assert len(top) == 3 and top == sorted(top, reverse=True) and all(math.isfinite(p) and p <= 0 for p in top)
    prompts = outputs[0].prompt_logprobs
    assert len(prompts) == 20 and prompts[0] is None and [p.token for p in prompts[1:]] == list(prompt(20))[1:]
    assert all(o.prompt_logprobs == () for o in outputs[1:])
    assert outputs[0].cache_miss == "prompt_logprobs"
    whole = fake.engine(limits=Limits(max_batch=4, chunk_tokens=64))
    whole.add(Request("a", prompt(20), dataclasses.replace(WARM, prompt_logprobs=2)))
    assert fake.run(whole)[("a", 0)][0].prompt_logprobs == prompts


def test_eos_ends_unless_ignored_or_too_early():
    def said(sampling):
        engine = ScriptedEngine(lambda r: Script((5, 6, 0, 7)), vocab=16, eos=(0, 9))
        engine.add(Request("a", (1, 2), sampling))
        outputs = fake.run(engine)[("a", 0)]
        return fake.tokens(outputs), outputs[-1].finish
    assert said(Sampling(temperature=0)) == ([5, 6, 0], "stop")
    assert said(Sampling(temperature=0, ignore_eos=True, max_tokens=5)) == ([5, 6, 0, 7, 7], "length")
    assert said(Sampling(temperature=0, stop_ids=(6,))) == ([5, 6], "stop")
    assert said(Sampling(temperature=0, min_tokens=4, max_tokens=9))[0][:2] == [5, 6]
    assert said(Sampling(temperature=0, min_tokens=4, max_tokens=5))[0][2] not in (0, 9)


class OnlyEven:
    def __init__(self):
        self.seen = []

    def allowed(self):
        return [0x55555555] * 2

    def accept(self, token):
        self.seen.append(token)

    def fork(self):
        return OnlyEven()


class After:
    def __init__(self, count):
        self.count = count

    def see(self, token):
        self.count -= 1
        return self.count == 0

    def fork(self):
        return After(self.count)


def test_masks_and_watchers_rule_one_sequence_each():
    mask = OnlyEven()
    engine = fake.engine()
    engine.add(Request("even", prompt(9), dataclasses.replace(WARM, n=2), mask=mask))
    engine.add(Request("free", prompt(9, 4), WARM, watcher=After(5)))
    outputs = fake.run(engine)
    said = fake.tokens(outputs[("even", 0)])
    assert all(t % 2 == 0 for i in range(2) for t in fake.tokens(outputs[("even", i)])) and mask.seen == said
    assert len(fake.tokens(outputs[("free", 0)])) == 5 and outputs[("free", 0)][-1].finish == "stop"


def test_a_mask_that_allows_nothing_is_an_error_of_that_request():
    class Nothing(OnlyEven):
        def allowed(self):
            return [0, 0]
    engine = fake.engine()
    engine.add(Request("a", prompt(9), WARM, mask=Nothing()))
    engine.add(Request("b", prompt(9), WARM))
    outputs = fake.run(engine)
    assert outputs[("a", 0)][-1].finish == "error" and outputs[("b", 0)][-1].finish == "length"


@pytest.mark.parametrize("place", ["allowed", "accept", "see"])
def test_a_mask_or_watcher_that_fails_ends_its_own_request(place):
    class Failing(OnlyEven):
        def fail(self, *_):
            raise HeteroError("the grammar took too long")

        def see(self, token):
            return False
    failing = Failing()
    setattr(failing, place, failing.fail)
    engine = fake.engine()
    engine.add(Request("a", prompt(9), WARM, mask=failing, watcher=failing))
    engine.add(Request("b", prompt(9, 2), WARM))
    outputs = fake.run(engine)
    assert outputs[("a", 0)][-1].finish == "error" and outputs[("a", 0)][-1].error == "the grammar took too long"
    assert fake.tokens(outputs[("b", 0)]) == solo(Request("b", prompt(9, 2), WARM))[("b", 0)]


@pytest.mark.parametrize("marks", [None, 2])
def test_an_interrupted_step_is_made_again(marks):
    want = solo(Request("a", prompt(21), WARM), marks=marks)[("a", 0)]
    engine = fake.engine(marks=marks)
    whole, seen = engine._accept, []

    def interrupted(*args):
        seen.append(1)
        if len(seen) in (2, 5):
            raise KeyboardInterrupt
        return whole(*args)
    engine._accept = interrupted
    engine.add(Request("a", prompt(21), WARM))
    told = []
    while not engine.idle:
        try:
            told += [t for o in engine.step() for t in o.tokens]
        except KeyboardInterrupt:
            engine.scheduler.check()
    assert told == want


@pytest.mark.parametrize(("param", "change"), [
    ("prompt", {"prompt": ()}), ("prompt", {"prompt": (1, -1)}), ("prompt", {"prompt": (1, 2**40)}), ("prompt", {"prompt": (1, "a")}),
    ("prompt", {"prompt": (1, True)}), ("priority", {"priority": 0.5})])
def test_a_bad_request_names_its_field(param, change):
    engine = fake.engine()
    with pytest.raises(BadRequest) as caught:
        engine.add(dataclasses.replace(Request("a", (1, 2), GREEDY), **change))
    assert caught.value.param == param and engine.idle


@pytest.mark.parametrize("change", [
    {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": "0.7"}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0},
    {"presence_penalty": 3}, {"logit_bias": ((999, 1.0),)}, {"logit_bias": ((-1, 1.0),)}, {"logit_bias": ((1, 1e9),)}, {"logit_bias": ((1, math.nan),)},
    {"seed": 2**64}, {"seed": 0.5}, {"max_tokens": 0}, {"min_tokens": 13}, {"stop_ids": (61,)}, {"stop": ("",)}, {"n": 0}, {"n": 10**5}, {"logprobs": 10**4},
    {"prompt_logprobs": -1}])
def test_a_bad_sampling_value_names_its_field(change):
    engine = fake.engine()
    with pytest.raises(BadRequest) as caught:
        engine.add(Request("a", (1, 2), dataclasses.replace(GREEDY, **change)))
    assert caught.value.param == next(iter(change)) and engine.idle


@pytest.mark.parametrize("change", [
    {"temperature": 1e-8}, {"temperature": 5.0}, {"top_p": 0.0}, {"top_k": -1}, {"top_k": 10**6}, {"min_p": 1.0}, {"seed": -1}, {"seed": 2**63}, {"seed": None},
    {"logit_bias": ((3, -100.0), (3, -100.0))}, {"temperature": 1e-40}, {"repetition_penalty": 1000.0, "temperature": 1.0}])
def test_values_at_the_edge_are_served(change):
    engine = fake.engine()
    engine.add(Request("a", (1, 2), dataclasses.replace(GREEDY, **change)))
    assert len(fake.tokens(fake.run(engine)[("a", 0)])) == 12


def test_a_prompt_that_fills_the_context_is_refused_and_one_less_gets_one_token():
    engine = fake.engine(context=32)
    with pytest.raises(ContextExceeded):
        engine.add(Request("a", prompt(32), GREEDY))
    engine.add(Request("b", prompt(31), GREEDY))
    outputs = fake.run(engine)[("b", 0)]
    assert [o.finish for o in outputs] == ["length"]


def test_an_id_may_be_used_again_when_its_request_has_ended():
    engine = fake.engine()
    engine.add(Request("a", prompt(5), GREEDY))
    with pytest.raises(BadRequest):
        engine.add(Request("a", prompt(5), GREEDY))
    fake.run(engine)
    engine.add(Request("a", prompt(5), GREEDY))
    fake.run(engine)


def test_a_failed_engine_ends_every_request_and_says_so_afterwards():
    engine = ScriptedEngine(lambda r: Script((5, 6), fault_at=2 if r.id == "a" else None, fault=EngineFailed("the team is lost", layer=3)), vocab=16)
    for id in "abc":
        engine.add(Request(id, (1, 2), Sampling(temperature=0)))
    outputs = fake.run(engine, check=False)
    assert {o[-1].finish for o in outputs.values()} == {"error"} and outputs[("b", 0)][-1].error == "the team is lost"
    with pytest.raises(EngineFailed):
        engine.add(Request("d", (1,), Sampling()))


def test_priority_goes_first_and_long_waiting_goes_before_priority():
    def order(patience):
        engine = fake.engine(limits=Limits(max_batch=1, chunk_tokens=64, patience_s=patience))
        for i, priority in enumerate((0, 0, 5)):
            engine.add(Request(str(i), prompt(5), dataclasses.replace(GREEDY, max_tokens=2), priority=priority))
            if i == 0:
                engine.step()
        seen = []
        while not engine.idle:
            seen += [o.id for o in engine.step() if o.finish]
        return seen
    assert order(30.0) == ["0", "2", "1"]
    assert order(0.0) == ["0", "1", "2"]


def test_a_long_prompt_that_needs_every_page_is_served_within_patience_among_a_stream_of_short_ones(monkeypatch):
    """Short prompts pass it while there is room for them; once it has waited beyond patience nobody does, and they end."""
    clock = [0.0]
    monkeypatch.setattr("hetero.engine.engine.time.monotonic", lambda: clock[0])
    engine = fake.engine(pages=20, context=76, limits=Limits(max_batch=3, chunk_tokens=16, patience_s=50.0))
    short = dataclasses.replace(GREEDY, max_tokens=6)
    engine.add(Request("0", prompt(9, 2), short))
    engine.step()
    engine.add(Request("long", prompt(70), dataclasses.replace(GREEDY, max_tokens=2)))
    first = None
    for step in range(1, 200):
        clock[0] = float(step)
        if len(engine.live) < 4:
            engine.add(Request(str(step), prompt(9, 3 + step), short))
        if any(o.id == "long" and o.tokens for o in engine.step()):
            first = step
            break
    assert first is not None and 50 < first < 50 + 2 * 6 + 70 // 16 + 4
    passed = [s for s in range(1, 50) if str(s) not in engine.live]
    assert len(passed) > 20, "until then, short ones went first"


def test_the_worst_gap_and_the_steps_beyond_the_bound_are_counted_only_while_somebody_decodes(monkeypatch):
    clock, took = [0.0], [0.0]
    monkeypatch.setattr("hetero.engine.engine.time.monotonic", lambda: clock[0])
    engine = fake.engine(limits=Limits(max_batch=4, chunk_tokens=64, max_stall_s=0.2))
    whole = engine.runner.run

    def timed(work):
        clock[0] += took[0]
        return whole(work)
    engine.runner.run = timed
    engine.add(Request("a", prompt(20), GREEDY))
    for seconds in (5.0, 0.1, 0.3, 0.25, 0.0):             # the first reads a prompt with nobody waiting for a token
        took[0] = seconds
        engine.step()
    stats = engine.stats()
    assert stats.worst_gap_s == pytest.approx(0.3) and stats.stalls == 2
    assert stats.prefill_s == pytest.approx(5.0) and stats.decode_s == pytest.approx(0.65)


@pytest.mark.parametrize("window", [None, (None, 9)])
def test_an_abort_in_the_middle_of_a_prompt_leaves_only_whole_pages_behind_and_they_are_right(window):
    engine = fake.engine(window=window, limits=Limits(max_batch=2, chunk_tokens=10))
    request = Request("a", prompt(40), WARM)
    engine.add(request)
    engine.step()
    engine.step()                                          # 20 of 40 tokens are computed, 5 pages
    engine.abort("a")
    assert engine.pages.held == 0 and len(engine.pages.index) == 5
    engine.add(dataclasses.replace(request, id="b"))
    outputs = fake.run(engine)[("b", 0)]
    assert fake.tokens(outputs) == solo(request, window=window)[("a", 0)] and outputs[0].cached_tokens == 20
    assert outputs[0].cache_miss == "not_cached@tok 20"


def test_a_prompt_among_decoding_neighbours_comes_in_chunks_that_keep_the_bound():
    engine = fake.engine(pages=200, context=400, limits=Limits(max_batch=4, chunk_tokens=128, max_stall_s=0.05), estimate=lambda t, c: 1e-3 * t)
    engine.scheduler.pace.learn = lambda *a: None
    engine.scheduler.pace.largest = 1000
    engine.add(Request("a", prompt(8), dataclasses.replace(GREEDY, max_tokens=30)))
    engine.step()
    engine.add(Request("long", prompt(300), dataclasses.replace(GREEDY, max_tokens=1)))
    decoder = engine.runner.decoder
    del decoder.sizes[:]
    fake.run(engine)
    assert decoder.sizes[:9] == [33] * 9 and decoder.sizes[9] == 1 + 292 - 9 * 32


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_pages_survive_a_trip_to_the_host(dtype):
    from hetero.memory.cache import Cache
    from hetero.memory.pool import Copy
    cache = Cache(fake.model(), 4, 4, dtype, host_pages=2)
    for stack in cache.stacks:
        for tensor, _ in stack.pairs:
            tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    want = [cache.layer(l).keys[1].float().clone() for l in range(2)]
    cache.copy([Copy(True, 1, 0), Copy(False, 0, 3)])
    assert all(torch.equal(cache.layer(l).keys[3].float(), want[l]) for l in range(2))
    cache.scrub([[1]])
    assert all(not cache.layer(l).keys[1].float().any() for l in range(2))
