"""Whole models on a real card beside the CPU's own answers: every native family, every home of the experts, the bridge, one model after another."""

import importlib.util
import json
import pathlib
import shutil

import pytest
import torch

from hetero.errors import BadOption
from hetero.weights.source import EMBEDDED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"), pytest.mark.filterwarnings("default")]
IDS = [(7 * i + 3) % 250 + 3 for i in range(60)]
FAMILIES = ("qwen2_moe", "qwen3_moe", "qwen3_moe_tied", "mixtral", "mixtral_window", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "glm4_moe",
            "glm4_moe_lite", "gpt_oss", "minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "qwen3_next", "qwen3_5_moe",
            "phimoe")
BRIDGED = ("AfmoeForCausalLM", "DeepseekV4ForCausalLM", "NemotronHForCausalLM")
NEAR, ROUGH = 0.05, 0.3                          # deviations of the logits: in float32, and with bf16 activations through four layers of random weights
WORKSPACE = 64 << 20                             # bytes: cuBLAS keeps its own (32 MiB on Hopper) for every stream that graphs were captured on
KL = 2e-3                                        # nats per token; bf16 activations in plain arithmetic are 5.5e-4 from the CPU's own


def with_text(folder):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder)
    return folder


def llm(folder, device, **options):
    import hetero

    return hetero.LLM(folder, device=device, max_batch=2, packed_cache=False, offline=True, **options)


def stream_all(gpu, least=1):
    for block in gpu.placed.decoder.blocks:
        if hasattr(block.ffn, "experts"):
            block.ffn.experts.least = least


def near(got, want, near=NEAR):
    """Half the tokens are within `near` in their worst logit (a tie among experts moves a few tokens alone), and greedy tokens are equal wherever the
    margin leaves no doubt, but for one or 5 % of those."""
    got, spread = got.float(), want.std()
    assert torch.isfinite(got).all()
    error = (got - want).abs().amax(-1) / spread
    assert error.median() <= near, f"{error.median():.3f} of a deviation"
    two = want.topk(2).values
    sure = (two[:, 0] - two[:, 1]) / spread > 2 * near
    assert (got.argmax(-1) != want.argmax(-1))[sure].sum() <= max(1, 0.05 * sure.sum())


def divergence(got, want):
    got = got.float().log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.parametrize("family,dtype", [*((f, "float32") for f in FAMILIES), *((f, "bfloat16") for f in ("qwen3_moe", "gpt_oss", "deepseek_v3"))])
def test_a_family_says_on_the_card_what_it_says_on_the_cpu(family, dtype, tiny):
    folder, bound = with_text(tiny(family)), NEAR if dtype == "float32" else ROUGH
    exact = {"ctx": 128, "expert_format": "f32"}
    with llm(folder, "cpu", dense_format="f32", **exact) as cpu:
        want = cpu.logits(IDS)
    with llm(folder, "cuda", dtype=dtype, dense_format="f32" if dtype == "float32" else "bf16", **exact) as gpu:
        near(gpu.logits(IDS), want, bound)
        near(gpu.logits(IDS, "decode"), want, bound)
        stream_all(gpu)
        near(gpu.logits(IDS), want, bound)


@pytest.fixture(scope="module")
def held_out():
    lines = (EMBEDDED.parent / "eval" / "teacher.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    with llm(None, "cpu") as cpu:
        ids = [id for line in lines for id in cpu.encode(json.loads(line)["text"])]
        return ids, cpu.logits(ids).log_softmax(-1)


@pytest.mark.parametrize("home", ["cpu", "some", "all"])
def test_the_embedded_model_is_the_same_wherever_its_experts_are(home, held_out):
    ids, want = held_out
    with llm(None, "cuda", expert_cache=0) as gpu:
        record = next(iter(gpu.layers.values())).store.record_nbytes
        layers, experts = len(gpu.layers), next(iter(gpu.layers.values())).store.experts
    slots = {"cpu": 0, "some": experts // 2, "all": experts}[home]
    with llm(None, "cuda", expert_cache=int(slots * layers * record * 1.02)) as gpu:
        held = 0 if gpu.placed.residents is None else gpu.placed.residents.slots
        assert held == slots
        for path in ("prefill", "decode"):
            assert divergence(gpu.logits(ids, path), want) < KL, path
        if home == "some":
            gpu.generate([f"Story {i}: one day" for i in range(24)])
            assert gpu.placed.residents.swapped > 0
            assert divergence(gpu.logits(ids, "decode"), want) < KL, "after swaps"
        stream_all(gpu)
        assert divergence(gpu.logits(ids), want) < KL, "streamed"


@pytest.mark.parametrize("format", ["int4_g32", "mxfp4", "q4_k", "fp8", "bf16"])
def test_a_format_streams_and_decodes_as_on_the_cpu(format, held_out):
    ids = held_out[0]
    try:
        with llm(None, "cpu", expert_format=format) as cpu:
            want = cpu.logits(ids).log_softmax(-1)
    except BadOption as error:
        pytest.skip(str(error))
    with llm(None, "cuda", expert_format=format) as gpu:
        assert divergence(gpu.logits(ids, "decode"), want) < KL
        stream_all(gpu)
        assert divergence(gpu.logits(ids), want) < KL


def test_one_model_after_another_in_one_process_gives_its_memory_back(held_out):
    before = 0
    for turn in range(3):
        with llm(None, "cuda") as gpu:
            assert gpu.generate("Once upon a time")[0].text
            assert divergence(gpu.logits(held_out[0]), held_out[1]) < KL
        used = torch.cuda.memory_reserved()
        assert turn == 0 or used <= before + WORKSPACE
        before = used


@pytest.mark.parametrize("name", BRIDGED)
def test_a_bridged_class_says_on_the_card_what_it_says_on_the_cpu(name, tmp_path):
    place = importlib.util.spec_from_file_location("bridged", pathlib.Path(__file__).resolve().parents[1] / "bridge" / "bridged.py")
    bridged = importlib.util.module_from_spec(place)
    place.loader.exec_module(bridged)
    bridged.save(bridged.build(name)[1], tmp_path)
    with_text(tmp_path)
    with llm(tmp_path, "cpu", ctx=128, expert_format="f32", dense_format="f32", dtype="float32") as cpu:
        want = cpu.logits(IDS)
    with llm(tmp_path, "cuda", ctx=128, expert_format="f32", dtype="float32") as gpu:
        near(gpu.logits(IDS), want, 0.02)
        near(gpu.logits(IDS, "decode"), want, 0.02)
