"""The decoder on the CPU's kernels, experts packed as float32 from the checkpoint: transformers' logits, and its greedy tokens through the engine."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cpu_kernels import cpu
from cpu_kernels.team import Team
from hetero.arch import families, tensors
from hetero.engine.engine import Engine
from hetero.engine.scheduler import Limits
from hetero.gpu.host import Host
from hetero.memory import bank as banks
from hetero.memory.cache import Cache
from hetero.model.decoder import Decoder
from hetero.model.experts import OnCpu, expert_layer
from hetero.model.load import load_decoder
from hetero.model.replay import Replay
from hetero.model.weights import Weights
from hetero.request import Request, Sampling
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.source import open_source

FAMILIES = ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe", "flex_olmo", "qwen3_next", "qwen3_5_moe"]
IDS = [(7 * i) % 250 + 3 for i in range(3, 36)]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(cores=cpu.read().allowed[:1], threads=2) as made:
        yield made


def load(folder: Any, team: Team, deterministic: bool = False) -> tuple[Decoder, Host]:
    source = open_source(folder)
    model = families.read(source.config)
    checkpoint, ops = Checkpoint(source, model), Host(128, team, "")
    bank = banks.load(checkpoint, "f32")
    decoder = load_decoder(ops, model, Weights(tensors.of(model), checkpoint.dense),
                           lambda l, part: OnCpu(expert_layer(part, bank.stores[l], bank.biases[l]), ops, "accurate", deterministic), "f32", "f32")
    return decoder, ops


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers_in_chunks_and_replayed_token_by_token(family: str, tiny: Any, make: Any, paged: Any, team: Team) -> None:
    theirs = make.logits(tiny(family), IDS)
    decoder, ops = load(tiny(family), team)
    replay, rows, done = Replay(decoder, ops, 4, 8), [], 0
    cache = paged(decoder.model)
    for n in (9, 1, 1, 1, 13, *[1] * 8):
        rows.append(replay(cache.step({0: IDS[done:done + n]}), cache).clone())
        done += n
    assert (torch.cat(rows) - theirs).abs().max() <= 1e-3
    assert torch.equal(torch.cat(rows).argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe"])
@torch.no_grad()
def test_greedy_tokens_through_the_engine_are_those_of_transformers(family: str, tiny: Any, make: Any, team: Team) -> None:
    decoder, ops = load(tiny(family), team)
    cache = Cache(decoder.model, 32, 16, "f32", rows=4)
    engine = Engine(Replay(decoder, ops, 4, 9), cache, 256, 128, (), Limits(4, 8))
    prompts = {"a": IDS[:11], "b": IDS[4:9], "c": IDS[20:33]}
    for id, prompt in prompts.items():
        engine.add(Request(id, tuple(prompt), Sampling(temperature=0.0, max_tokens=10)))
    said: dict[str, list[int]] = {id: [] for id in prompts}
    while not engine.idle:
        for output in engine.step():
            said[output.id] += output.tokens
    for id, prompt in prompts.items():
        logits = make.logits(tiny(family), prompt + said[id][:-1])[len(prompt) - 1:]
        assert said[id] == logits.argmax(-1).tolist()


@torch.no_grad()
def test_pages_that_a_window_has_passed_are_given_back_and_never_read(tiny: Any, make: Any, team: Team) -> None:
    """gpt-oss: every second layer sees 8 tokens. What nobody holds is NaN before each step."""
    decoder, ops = load(tiny("gpt_oss"), team)
    cache = Cache(decoder.model, (24, 12), 4, "f32", rows=4)
    engine = Engine(Replay(decoder, ops, 4, 13), cache, 256, 48, (), Limits(4, 8))
    prompts = {"a": IDS, "b": IDS[:9], "again": IDS[:30]}
    said: dict[str, list[int]] = {id: [] for id in prompts}
    for id, prompt in prompts.items():
        engine.add(Request(id, tuple(prompt), Sampling(temperature=0.0, max_tokens=12)))
    while not engine.idle:
        for stack in cache.stacks:
            pool = engine.pages.pools[stack.group]
            stack.values[:, :, [p for p in range(pool.count) if not pool.refs[p] and p not in pool.entry]] = torch.nan
        for output in engine.step():
            said[output.id] += output.tokens
    assert len(engine.pages.pools[1].passed) > 0 and engine.stats().cached_tokens >= 8
    for id, prompt in prompts.items():
        logits = make.logits(tiny("gpt_oss"), prompt + said[id][:-1])[len(prompt) - 1:]
        assert said[id] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@torch.no_grad()
def test_with_windows_too_neighbours_chunks_and_warm_pages_change_no_bit(kv_dtype: str, tiny: Any, team: Team) -> None:
    decoder, ops = load(tiny("gpt_oss"), team, deterministic=True)
    mine = Request("mine", tuple(IDS), Sampling(temperature=0.8, seed=5, max_tokens=12, logprobs=3))

    def said(engine: Engine, *others: Request) -> list[Any]:
        found: list[Any] = []
        for request in (*others, mine):
            engine.add(request)
        while not engine.idle:
            found += [p for o in engine.step() if o.id == "mine" for p in o.logprobs]
        return found

    def fresh(chunk: int, pages: int) -> Engine:
        cache = Cache(decoder.model, (pages, 20), 4, kv_dtype, host_pages=(20, 20), rows=4)
        return Engine(Replay(decoder, ops, 4, 13), cache, 256, 48, (), Limits(4, chunk))
    alone, busy = said(fresh(64, 12)), fresh(5, 30)
    others = [Request(str(n), tuple(IDS[:n]), Sampling(temperature=1.0, seed=n, max_tokens=9)) for n in (3, 30, 17)]
    assert said(busy, *others) == alone and len(alone) == 12
    assert said(busy) == alone and busy.stats().cached_tokens >= 32
