"""Suggestions: the table's sizes are those of the specs, and what is said to fit does."""

import dataclasses
import importlib.util
import math
import pathlib

import pytest

from hetero.arch import families, tensors
from hetero.memory import kv, suggest
from hetero.memory.cost import Machine

spec = importlib.util.spec_from_file_location("checkpoints", pathlib.Path(__file__).resolve().parents[1] / "configs" / "checkpoints.py")
facts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(facts)
GiB = 1 << 30
SMALL = Machine(cores=8, ram_bytes=32 * GiB, dram_bytes_s=50e9, cpu_flops=1e12)


@pytest.mark.parametrize(("hub", "name"), [
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B-Instruct-2507"), ("openai/gpt-oss-120b", "gpt-oss-120b"), ("deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3.1"),
    ("zai-org/GLM-4.5-Air", "GLM-4.5-Air"), ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
    ("moonshotai/Moonlight-16B-A3B-Instruct", "Moonlight-16B-A3B"), ("tencent/Hunyuan-A13B-Instruct", "Hunyuan-A13B")])
def test_the_tables_numbers_are_those_of_the_spec(hub, name):
    known = next(k for k in suggest.KNOWN if k.name == hub)
    model = families.read(facts.CHECKPOINTS[name][0])
    part = model.layers[model.moe_layers[0]].ffn
    each = sum(math.prod(s) for _, s in tensors.expert_shapes(model, part)) * len(model.moe_layers) / 1e9
    total, _ = tensors.parameters(model)
    assert known.routed == pytest.approx(each * part.router.experts, abs=0.02)
    assert known.routed_active == pytest.approx(each * part.router.top_k, abs=0.02)
    assert known.routed + known.rest == pytest.approx(total / 1e9, rel=2e-3)
    assert known.kv == kv.groups(model, "bfloat16")[0].token_nbytes


def test_what_fits_comes_first_and_the_largest_of_it_first():
    rows = suggest.suggest(SMALL)
    fitting = [s for s in rows if s.fits]
    assert [s.fits for s in rows] == sorted((s.fits for s in rows), reverse=True)
    assert fitting and fitting == sorted(fitting, key=lambda s: -s.ram_bytes) and all(s.ram_bytes <= SMALL.ram_bytes for s in fitting)
    assert any("system memory" in s.why_not for s in rows) and not any(s.why_not for s in fitting)


def test_a_card_moves_the_dense_part_and_can_be_what_is_short():
    card = dataclasses.replace(SMALL, vram_bytes=8 * GiB, vram_bytes_s=272e9, ram_bytes=512 * GiB)
    by_name = {s.name: s for s in suggest.suggest(card)}
    assert by_name["Qwen/Qwen3-30B-A3B-Instruct-2507"].fits and "GPU memory" in by_name["deepseek-ai/DeepSeek-V3.1"].why_not
    text = suggest.lines(card)
    assert "decode" in text[0] and len(text) > 5 and all("tok/s" in line for line in text[1:])
