"""The plan as a pure function: bytes equal to the kernels' own table, pins kept, refusals with the shortfall and things that help."""

import dataclasses
import importlib.util
import json
import pathlib
from collections import deque

import pytest
from hypothesis import given, settings, strategies

from cpu_kernels.formats import expert_nbytes
from hetero import options
from hetero.arch import families, tensors
from hetero.arch.spec import GQA, Dense, Layer, Model
from hetero.errors import BadOption, UnusableHardware
from hetero.memory import kv, plan, table
from hetero.memory.cost import Machine
from hetero.memory.pool import Pool, Size

configs = importlib.util.spec_from_file_location("checkpoints", pathlib.Path(__file__).resolve().parents[1] / "configs" / "checkpoints.py")
facts = importlib.util.module_from_spec(configs)
configs.loader.exec_module(facts)
CHECKPOINTS = facts.CHECKPOINTS
GiB = 1 << 30
CPU = Machine(cores=15, ram_bytes=64 * GiB, dram_bytes_s=60e9, cpu_flops=2e12, name="test")
CARD = dataclasses.replace(CPU, gpu="card", vram_bytes=24 * GiB, vram_bytes_s=900e9, gpu_flops=80e12, pcie_bytes_s=25e9)
QWEN = families.read({
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False})


def make(model=QWEN, machine=CARD, arriving="bf16", **given):
    return plan.plan(model, machine, options.resolve(given, {}), arriving)


def test_every_parameter_is_planned_once_and_total_counts_all_experts():
    found = make()
    assert sum(p.parameters for p in found.pieces) == found.total_params == tensors.parameters(QWEN)[0]
    assert round(found.total_params / 1e9, 1) == 30.5 and round(found.active_params / 1e9, 2) == 3.04
    assert found.ram["experts"] == 48 * 128 * expert_nbytes("int4_g32", 2048, 768)
    assert found.vram_bytes == sum(found.vram.values()) and found.ram_bytes == sum(found.ram.values())


def test_kv_pool_is_tokens_times_bytes_per_token():
    found = make(ctx="16k", max_batch="1")
    assert found.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert found.ctx == found.kv_tokens == 16384
    assert found.vram["KV cache"] == 16384 * found.kv_bytes_per_token
    fp8 = make(ctx="16k", max_batch="1", kv_dtype="fp8")
    assert fp8.kv_bytes_per_token == 48 * 2 * 4 * (128 + 4)


def test_layers_with_a_window_keep_what_they_see_and_what_a_chunk_writes():
    """gpt-oss-120b: every second layer sees 128 tokens."""
    model = families.read(CHECKPOINTS["gpt-oss-120b"][0])
    found = make(model, dataclasses.replace(CARD, ram_bytes=128 * GiB), ctx="131072", max_batch="1", chunk="2048")
    whole, window = found.kv
    assert (whole.window, window.window) == (None, 128) and whole.token_nbytes == window.token_nbytes == 18 * 2 * 8 * 64 * 2
    assert whole.tokens == 131072 and window.tokens == 2048 + (1 + 131072 // 2048) * (128 + 32)
    assert found.vram["KV cache"] == (131072 + 12448) * 36864 < 0.55 * 131072 * 2 * 36864
    assert found.kv_tokens == 131072 and sum(g.seen(32768) for g in found.kv) == (32768 + 128) * 36864
    text, data = table.text(found, CARD), table.record(found, CARD)["kv"]
    assert "and of layers that see 128 tokens: 12448 tokens at 36.0 KiB each" in text
    assert [(g["window"], g["tokens"]) for g in data] == [(None, 131072), (128, 12448)]


def test_pools_grow_with_what_is_free_and_always_hold_one_sequence():
    model = families.read(CHECKPOINTS["gpt-oss-120b"][0])
    sizes = [[g.tokens for g in kv.pools(model, "fp8", 4096, 8, 512, nbytes)] for nbytes in (0, GiB // 4, GiB, 64 * GiB)]
    assert sizes[0] == [4096, 512 + 16 * 160] and sizes[-1] == [8 * 4096, 512 + 24 * 160] and [s[0] for s in sizes] == sorted(s[0] for s in sizes)
    assert sizes[2][0] > sizes[1][0] and sum(g.nbytes for g in kv.pools(model, "fp8", 4096, 8, 512, GiB)) <= GiB
    assert kv.host_pages(kv.pools(model, "fp8", 4096, 8, 512, 0), 0) == [0, 0]
    assert kv.host_pages([kv.Group(None, 8, 1600), kv.Group(64, 24, 160)], 8 * 1600 + 24 * 160) == [100, 10]


@settings(max_examples=150, deadline=None)
@given(strategies.lists(strategies.sampled_from([None, 1, 100, 128, 1024, 4095]), min_size=1, max_size=6), strategies.integers(1, 20_000), strategies.integers(1, 40),
       strategies.sampled_from([1, 16, 100, 512, 8192]), strategies.integers(0, 1 << 28))
def test_pools_of_any_windows_hold_a_whole_context_and_never_more_than_there_is_beyond_that(windows, ctx, batch, chunk, nbytes):
    parts = [GQA(heads=1, kv_heads=1, head_dim=8, rope=None, window=w) for w in windows]
    model = Model("any", 8, 8, 1e-6, tuple(Layer(part, Dense(8)) for part in parts), True, {}, ctx)
    found, least = (kv.pools(model, "bfloat16", ctx, batch, chunk, n) for n in (nbytes, 0))
    assert tuple(g.window for g in found) == model.windows and sum(g.token_nbytes for g in found) == 32 * len(windows)
    for g, low in zip(found, least, strict=True):
        pool = Pool(0, Size(g.tokens // 16, 0, g.window), 16, deque(), print)
        assert g.tokens % 16 == 0 and low.tokens <= g.tokens <= 16 * -(-batch * ctx // 16) + 16 and pool.need(ctx, chunk) <= pool.count
    assert found == least or sum(g.nbytes for g in found) <= nbytes


def test_a_sequence_of_a_model_whose_layers_all_have_a_window_may_be_as_long_as_its_context():
    config = {"architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 32768,
              "sliding_window": 1024}
    found = make(families.read(config), max_batch="1", chunk="512")
    assert found.ctx == 32768 and found.kv_tokens >= 1024 + 512 + 32
    assert Pool(0, Size(found.kv_tokens // 16, 0, 1024), 16, deque(), print).need(32768, 512) <= found.kv_tokens // 16


def test_without_a_gpu_everything_is_in_system_memory():
    found = make(machine=CPU)
    assert found.device == "cpu" and not found.vram and found.vram_bytes == 0 and found.pinned_bytes == 0
    assert found.dense_format == "bf16" and {p.device for p in found.pieces} == {"cpu"}
    assert found.ram["attention, shared experts, head"] > 3.1e9 and found.fits
    assert found.prefill_by == "cpu"


def test_a_small_card_gets_eight_bit_dense_weights_and_a_large_one_keeps_sixteen():
    assert make().dense_format == "int8_g32"
    assert make(machine=dataclasses.replace(CARD, vram_bytes=80 * GiB)).dense_format == "bf16"
    assert make(dense_format="bf16").dense_format == "bf16"


@pytest.mark.parametrize(("arriving", "kept"), [("bf16", "int4_g32"), ("f32", "int4_g32"), ("int8_g32", "int8_g32"), ("fp8", "fp8"), ("fp8_e5m2", "int8_g32"),
                                                ("f16", "int4_g32"), ("gptq_int4_g128", "int4_g32"), ("gptq_int8_g128", "int8_g32"), ("int6", "int8_g32"),
                                                ("q4_k+q6_k", "q4_k+q6_k"), ("q4_k+fp8_e5m2", "q4_k+int8_g32"), ("bf16+q6_k", "int4_g32+q6_k"), ("bf16+int4_g32", "int4_g32")])
def test_experts_are_kept_as_they_arrive_or_in_the_documented_format(arriving, kept):
    assert set(make(arriving=arriving).expert_formats) == {kept}
    assert set(make(arriving=arriving, expert_format="bf16").expert_formats) == {"bf16"}


def test_formats_per_layer_are_planned_per_layer():
    found = make(arriving=["int8_g32"] * 8 + ["bf16"] * 40)
    by_layer = {p.layer: p.format for p in found.pieces if p.kind == "experts"}
    assert (by_layer[7], by_layer[8]) == ("int8_g32", "int4_g32")


def test_a_pinned_cache_holds_experts_and_is_off_below_its_floor_and_takes_what_is_spare_when_nobody_sized_it():
    large = make(ctx="8k", max_batch="1", expert_cache="8G")
    assert large.cache_slots >= 24 and large.vram["expert cache"] == large.cache_slots * 48 * expert_nbytes("int4_g32", 2048, 768)
    small = make(vram="6G", ctx="8k", max_batch="1", expert_cache="256M")
    assert small.cache_slots == 0 and "below 3 x top-k" in small.cache_note
    assert make(expert_cache="off").cache_slots == 0
    own = make(ctx="8k", max_batch="1")
    assert own.cache_slots >= 24 and own.fits and own.vram_bytes <= own.vram_limit_bytes
    assert make(vram="4G", ctx="8k", max_batch="1").cache_slots == 0 and "spare GPU memory is below" in make(vram="4G", ctx="8k", max_batch="1").cache_note
    assert large.decode_tok_s > make(ctx="8k", max_batch="1", expert_cache="off").decode_tok_s


def test_pinned_options_are_kept_even_when_nothing_fits_and_the_rest_is_not_given_up():
    found = make(vram="4G", ctx="40960", max_batch="1", expert_cache="2G")
    assert found.ctx == 40960 and found.max_batch == 1 and found.cache_slots * 48 * expert_nbytes("int4_g32", 2048, 768) <= 2 * GiB
    assert not found.fits and found.vram_short_bytes > 0 and "more GPU memory than the 4.0 GiB" in found.shortfall
    assert len(found.changes) >= 3 and any(c.startswith(("--ctx", "--kv-dtype")) for c in found.changes)


def test_changes_that_are_said_to_help_do():
    found = make(machine=dataclasses.replace(CPU, ram_bytes=24 * GiB), expert_format="int8_g32")
    assert not found.fits
    flag = next(c for c in found.changes if c.endswith("then it fits"))
    assert flag.startswith("--expert-format int4_g32")
    assert make(machine=dataclasses.replace(CPU, ram_bytes=24 * GiB), expert_format="int4_g32").fits


def test_the_peak_of_loading_stays_within_the_promise():
    for machine in (CPU, CARD):
        found = make(machine=machine)
        assert found.ram_bytes < found.peak_load_ram_bytes <= 1.05 * found.ram_bytes + (512 << 20)


def test_a_gpu_that_is_not_there_is_refused_and_can_be_imagined_for_planning():
    with pytest.raises(UnusableHardware, match="no usable GPU"):
        make(machine=CPU, device="cuda")
    wanted = options.resolve({"vram": "8G"}, {})
    imagined = plan.imagined(CPU, wanted)
    found = plan.plan(QWEN, imagined, wanted)
    assert found.device == "cuda:0" and found.assumed == ("gpu",) and found.vram_limit_bytes == 8 * GiB
    assert plan.imagined(CARD, wanted) is CARD
    more = options.resolve({"ram": "512G", "vram": "48G"}, {})
    assert (plan.imagined(CARD, more).ram_bytes, plan.imagined(CARD, more).vram_bytes) == (512 * GiB, 48 * GiB)
    assert plan.imagined(CARD, more).assumed == ("ram_bytes", "vram_bytes")


def test_unknown_formats_name_the_known_ones():
    with pytest.raises(BadOption, match="expert_format = 'int3_g32'") as e:
        make(expert_format="int3_g32")
    assert "int4_g32" in e.value.hint
    with pytest.raises(BadOption, match="dense_format"):
        make(dense_format="int3_g32")


def test_layers_cut_the_model():
    found = make(layers="4")
    assert {p.layer for p in found.pieces} == {None, 0, 1, 2, 3} and found.total_params < 4e9


def test_terms_add_up_and_name_their_formula():
    found = make(ctx="8k", max_batch="1", expert_cache="off")
    assert found.decode_tok_s == pytest.approx(1 / sum(t.seconds for t in found.decode))
    routed = found.decode[0]
    assert routed.seconds == pytest.approx(48 * 8 * expert_nbytes("int4_g32", 2048, 768) / (60e9 * 0.93))
    assert "GB/s" in routed.text
    assert found.prefill_by == "streamed" and found.prefill[0].seconds == pytest.approx(found.ram["experts"] / 25e9)


def test_prefill_is_computed_where_it_is_faster():
    assert make(chunk="8k").prefill_by == "streamed"
    assert make(machine=dataclasses.replace(CARD, pcie_bytes_s=1e9), chunk="64").prefill_by == "cpu"


def test_the_record_is_json_with_the_promised_keys_and_the_table_says_it_all():
    found = make(vram="4G", ctx="40960")
    data = json.loads(json.dumps(table.record(found, CARD)))
    assert {"fits", "vram_bytes", "ram_bytes", "peak_load_ram_bytes", "total_params", "active_params", "decode_tok_s", "prefill_tok_s", "layers"} <= set(data)
    assert sum(p["bytes"] for p in data["layers"] if p["kind"] == "experts") == data["ram"]["experts"]
    text = table.text(found, CARD)
    for word in ("int4_g32", "0-47", "KV cache", "peak while loading", "tok/s", "it does not fit", "30.5B"):
        assert word in text
    assert not [line for line in text.splitlines() if len(line) > 160]


@settings(max_examples=60, deadline=None)
@given(strategies.integers(1, 48), strategies.integers(1, 256), strategies.sampled_from([None, "4k", "40k"]), strategies.sampled_from(["auto", "off", "1G"]),
       strategies.integers(1, 32), strategies.sampled_from(["auto", "fp8", "float32"]))
def test_an_unpinned_plan_never_exceeds_a_card_that_holds_the_dense_part(vram, ram, ctx, cache, batch, kv):
    found = make(machine=dataclasses.replace(CARD, vram_bytes=vram * GiB, ram_bytes=ram * GiB), expert_cache=cache, max_batch=str(batch), kv_dtype=kv,
                 **({"ctx": ctx} if ctx else {}))
    least = make(machine=dataclasses.replace(CARD, vram_bytes=vram * GiB, ram_bytes=ram * GiB), expert_cache="off", max_batch="1", kv_dtype=kv, chunk="128",
                 ctx=str(ctx or 2048))
    if least.vram_short_bytes == 0 and ctx is None and cache != "1G" and vram >= 6:
        assert found.vram_short_bytes == 0, found.vram
    assert found.kv_tokens >= min(found.ctx, 2048)
    assert found.fits == (found.shortfall == "") and bool(found.changes) != found.fits


def test_small_models_are_counted_in_millions():
    assert [table._count(n) for n in (30_532_122_624, 35_700_000, 1_000_000_000)] == ["30.5B", "35.7M", "1.0B"]


def test_a_longrope_model_gets_the_context_of_its_short_factors_unless_a_longer_one_is_asked_for():
    config = {"architectures": ["PhiMoEForCausalLM"], "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 131072,
              "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
              "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [3.0] * 32, "short_mscale": 1.2, "long_mscale": 1.3,
                               "original_max_position_embeddings": 4096}}
    model = families.read(config)
    assert make(model).ctx == 4096 and make(model, ctx="16k").ctx == 16384
