"""Each row of the families table on a tiny random model: the plain decoder gives transformers' logits, and the tensor list is the checkpoint."""

import json

import pytest
import torch
from safetensors import safe_open

from hetero.arch import families, tensors

FAMILIES = ["qwen2_moe", "qwen3_moe", "qwen3_moe_tied", "mixtral", "mixtral_window", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "glm4_moe",
            "glm4_moe_lite", "gpt_oss", "minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "phimoe", "qwen3_next", "qwen3_5_moe"]
IDS = [(7 * i) % 250 + 3 for i in range(3, 27)]


def test_every_maker_is_tested(make):
    assert sorted(make.names()) == sorted(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_decoder_gives_the_logits_of_transformers(family, tiny, make, oracle):
    folder = tiny(family)
    model, found = oracle.load(folder)
    theirs = make.logits(folder, IDS)
    with torch.no_grad():
        ours = oracle.Oracle(model, found)(IDS)
    assert theirs.std() > 0.1
    bound = 3e-4 if family in ("qwen3_next", "qwen3_5_moe") else 1e-4          # theirs is chunked: states round differently
    assert (ours - theirs).abs().max() <= bound, family
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensor_list_counts_what_the_checkpoint_holds(family, tiny):
    folder = tiny(family)
    model = families.read(json.loads((folder / "config.json").read_text()))
    with safe_open(folder / "model.safetensors", "pt") as f:
        held = sum(f.get_tensor(k).numel() for k in f.keys())                # noqa: SIM118
    total, active = tensors.parameters(model)
    assert total == held
    assert active < total
    assert len({(t.key, t.layer, t.expert) for t in tensors.of(model)}) == sum(1 for _ in tensors.of(model))
