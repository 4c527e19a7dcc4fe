"""The decoder in plain arithmetic over paged KV gives transformers' logits for every family: as one prefill, in chunks, token by token, in company."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero.arch import spec, tensors
from hetero.gpu.plain import Plain, PlainExperts
from hetero.model.decoder import Decoder
from hetero.model.load import load_decoder
from hetero.model.weights import Weights

FAMILIES = ["qwen2_moe", "qwen3_moe", "mixtral", "mixtral_window", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss",
            "minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "phimoe", "qwen3_next",
            "qwen3_5_moe"]
IDS = [(7 * i) % 250 + 3 for i in range(3, 36)]


def plain_experts(found: dict[Any, torch.Tensor], l: int, part: spec.MoE) -> PlainExperts:
    def stack(key: str) -> torch.Tensor | None:
        return torch.stack([found[key, l, e] for e in range(part.router.experts)]) if (key, l, 0) in found else None
    gate, up, down = (stack(f"expert.{k}") for k in ("gate", "up", "down"))
    biases = tuple(stack(f"expert.{k}.bias") for k in ("gate", "up", "down")) if part.bias else None
    return PlainExperts(part, gate, up, down, biases)


def plain_decoder(oracle: Any, folder: Any) -> Decoder:
    model, found = oracle.load(folder)
    weights = Weights(tensors.of(model), lambda t: found[t.key, t.layer, t.expert])
    return load_decoder(Plain(len(IDS)), model, weights, lambda l, part: plain_experts(found, l, part))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers_however_the_tokens_are_cut(family: str, tiny: Any, make: Any, oracle: Any, paged: Any) -> None:
    theirs = make.logits(tiny(family), IDS)
    decoder = plain_decoder(oracle, tiny(family))
    for cuts in ([len(IDS)], [1] * len(IDS), [10, 1, 1, 17, 4]):
        cache, done, rows = paged(decoder.model), 0, []
        for n in cuts:
            rows.append(decoder(cache.step({0: IDS[done:done + n]}), cache))
            done += n
        bound = 3e-4 if family in ("qwen3_next", "qwen3_5_moe") else 1e-4          # theirs is chunked: states round differently
        assert (torch.cat(rows) - theirs).abs().max() <= bound, cuts


@torch.no_grad()
def test_sequences_in_one_step_do_not_see_each_other(tiny: Any, oracle: Any, paged: Any) -> None:
    decoder = plain_decoder(oracle, tiny("gpt_oss"))
    alone = []
    for ids in (IDS[:20], IDS[5:12], IDS[3:4]):
        cache = paged(decoder.model)
        alone.append(decoder(cache.step({0: ids}), cache)[-1])
    cache = paged(decoder.model, sequences=3)
    decoder(cache.step({0: IDS[:19], 1: IDS[5:9]}), cache)
    together = decoder(cache.step({1: IDS[9:12], 2: IDS[3:4], 0: IDS[19:20]}, wanted=[4, 2, 3]), cache)
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_that_makes_nan_is_named(tiny: Any, oracle: Any, paged: Any) -> None:
    decoder = plain_decoder(oracle, tiny("qwen3_moe"))
    cache = paged(decoder.model)
    step = cache.step({0: IDS[:5]})
    assert decoder(step, cache).isfinite().all() and decoder.diagnose(step, cache) is None
    decoder.blocks[1].attention.out.weight[3, 2] = torch.inf
    assert not decoder(step, cache).isfinite().all()
    assert decoder.diagnose(step, cache) == 1


def test_each_part_tells_what_it_is(tiny: Any, oracle: Any) -> None:
    decoder = plain_decoder(oracle, tiny("deepseek_v3"))
    rows = list(decoder.report())
    assert {row.part for l, row in rows if l == 1} == {"linear", "attention", "router", "experts"}
    assert rows[0][0] is None and rows[0][1].part == "embed" and rows[-1][1].format == "float32"
