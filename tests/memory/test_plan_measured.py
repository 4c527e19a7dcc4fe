"""What was planned beside what is there once a model is loaded: the same bytes, item by item, within one per cent."""

import pytest
import torch

from hetero.llm import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    made = LLM(None, offline=True, cache_dir=tmp_path_factory.mktemp("cache"), packed_cache=False, threads=2, ctx=256, max_batch=2, device="cpu")
    yield made
    made.close()


def test_routed_experts_take_the_bytes_that_were_planned(llm):
    held = sum(store.buffer.nbytes for store in llm.bank.stores.values())
    assert held == pytest.approx(llm.plan.ram["experts"], rel=0.01)
    assert {store.format.name for store in llm.bank.stores.values()} == set(llm.plan.expert_formats)


def test_the_cache_takes_the_bytes_that_were_planned(llm):
    assert llm.placed.cache.nbytes == llm.plan.ram["KV cache"]
    assert llm.placed.cache.page_nbytes == [16 * group.token_nbytes for group in llm.plan.kv]


def test_dense_weights_take_the_bytes_that_were_planned(llm):
    kinds = {"embed", "linear", "attention", "router", "delta net"}
    held = sum(row.nbytes for _, row in llm.placed.decoder.report() if row.part in kinds)
    planned = sum(p.nbytes for p in llm.plan.pieces if p.kind in ("attention", "mlp", "shared", "router", "embed", "head"))
    assert held == pytest.approx(planned, rel=0.02), [(row.part, row.format, row.nbytes) for _, row in llm.placed.decoder.report()][:12]


def test_states_take_the_bytes_that_were_planned(tiny):
    import json

    from hetero.arch import families
    from hetero.memory import kv
    from hetero.memory.cache import Cache
    model = families.read(json.loads((tiny("qwen3_next") / "config.json").read_text()))
    cache = Cache(model, 4, 16, "bf16", rows=3, marks=3)
    held = sum(t.nbytes for state in cache.states.values() for t in (state.conv, state.memory))
    assert held == (2 * 3 + 1) * kv.state_nbytes(model) and cache.nbytes == 64 * kv.groups(model, "bfloat16")[0].token_nbytes
    assert all(t.dtype == torch.float32 for state in cache.states.values() for t in (state.conv, state.memory))
