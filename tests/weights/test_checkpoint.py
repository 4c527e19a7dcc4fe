"""Checkpoints: every family's layout is read as the oracle reads it; what is missing, cut or contradictory is named before anything is read."""
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero.arch import families, tensors
from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.weights import dialects
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.reading import Codes, Floats
from hetero.weights.source import EMBEDDED, open_folder, open_source
from hetero.weights.stored import to_f32

FAMILIES = ["qwen2_moe", "qwen3_moe", "qwen3_moe_tied", "mixtral", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss",
            "minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "phimoe", "qwen3_next",
            "qwen3_5_moe"]


def open_(folder):
    source = open_folder(folder)
    return Checkpoint(source, families.read(source.config))


def as_f32(matrix):
    if isinstance(matrix, Codes):
        return (matrix.codes.reshape(len(matrix.codes), -1, 32) * matrix.scales[:, :, None]).reshape(matrix.codes.shape)
    return to_f32(matrix.data, matrix.tag.upper())


def every_tensor(checkpoint):
    """{(key, layer, expert): float32 array}, as a loader would get them."""
    found = {}
    for t in tensors.of(checkpoint.model):
        if t.home == "dense":
            found[t.key, t.layer, t.expert] = checkpoint.dense(t).float().numpy()
    for l in checkpoint.model.moe_layers:
        biases = checkpoint.expert_biases(l)
        for e in range(checkpoint.model.layers[l].ffn.router.experts):
            w = checkpoint.expert(l, e)
            for part, matrix in (("gate", w.gate), ("up", w.up), ("down", w.down)):
                found[f"expert.{part}", l, e] = as_f32(matrix)
                if biases:
                    found[f"expert.{part}.bias", l, e] = biases[part][e]
            checkpoint.release_expert(l, e)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_as_the_oracle_reads_it(family, tiny, oracle):
    folder = tiny(family)
    _, want = oracle.load(folder)
    got = every_tensor(open_(folder))
    assert set(got) == set(want)
    for key, tensor in want.items():
        assert np.array_equal(got[key], tensor.numpy()), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_tensors_keep_their_type_and_bits(dtype, tiny):
    folder = tiny("qwen2_moe", dtype)
    checkpoint, raw = open_(folder), load_file(folder / "model.safetensors")
    for t in tensors.of(checkpoint.model):
        if t.home == "dense":
            assert torch.equal(checkpoint.dense(t), raw[t.name])
    w = checkpoint.expert(1, 3)
    assert isinstance(w.down, Floats) and w.down.tag == {"bfloat16": "bf16", "float16": "f16"}[dtype]
    want = raw["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert np.array_equal(w.down.data.view(np.uint16), want.view(torch.uint16).numpy())
    assert checkpoint.expert_format(1) == w.down.tag == checkpoint.expert_arrives(1)


def test_the_embedded_model_arrives_as_its_own_codes_and_scales():
    source = open_source(None)
    assert source.embedded and source.name == "the embedded model"
    checkpoint = Checkpoint(source, families.read(source.config))
    raw = load_file(EMBEDDED / "model.safetensors")
    assert checkpoint.expert_format(0) == "int8_g32"
    for l, e in ((0, 0), (7, 31)):
        w, at = checkpoint.expert(l, e), f"model.layers.{l}.mlp.experts.{e}"
        for part in ("gate", "up", "down"):
            m = getattr(w, part)
            assert isinstance(m, Codes) and m.format == "int8_g32"
            assert np.array_equal(m.codes, raw[f"{at}.{part}_proj.weight"].numpy())
            assert np.array_equal(m.scales, raw[f"{at}.{part}_proj.weight_scale"].float().numpy())


def fused(folder, out, turned):
    """The same model with experts as one tensor [E, 2I, H] and [E, H, I], or their transposes."""
    raw = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in raw.items() if ".experts." not in k}
    for l in range(config["num_hidden_layers"]):
        at = f"model.layers.{l}.mlp.experts"
        if f"{at}.0.up_proj.weight" in raw:
            one = [[raw[f"{at}.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")]
            gate_up, down = torch.cat([torch.stack(one[0]), torch.stack(one[1])], 1), torch.stack(one[2])
            kept[f"{at}.gate_up_proj"], kept[f"{at}.down_proj"] = (gate_up.mT.contiguous(), down.mT.contiguous()) if turned else (gate_up, down)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(kept, out / "model.safetensors")
    return out


@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_equal_the_same_experts_one_by_one(turned, tiny, tmp_path):
    folder = tiny("qwen3_moe")
    want, got = every_tensor(open_(folder)), every_tensor(open_(fused(folder, tmp_path / "fused", turned)))
    assert set(got) == set(want) and all(np.array_equal(got[k], want[k]) for k in want)


def shard(folder, out, count=3):
    raw = load_file(folder / "model.safetensors")
    out.mkdir(parents=True)
    shutil.copy(folder / "config.json", out)
    names, index = sorted(raw), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({n: raw[n] for n in names[i::count]}, out / file)
        index |= dict.fromkeys(names[i::count], file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def refuse(folder, *words, error=BadCheckpoint):
    with pytest.raises(error) as e:
        open_(folder)
    assert all(w in e.value.message for w in words), e.value.message
    assert e.value.hint and "\n" not in e.value.message
    return e.value


def test_shards_are_read_and_strays_are_ignored_with_a_note(tiny, tmp_path):
    folder = shard(tiny("qwen3_moe"), tmp_path / "模型 é")
    save_file({"x": torch.zeros(3)}, folder / "stray.safetensors")
    assert "stray.safetensors" in open_folder(folder).notes[0]
    want, got = every_tensor(open_(tiny("qwen3_moe"))), every_tensor(open_(folder))
    assert all(np.array_equal(got[k], want[k]) for k in want)


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tiny, tmp_path):
    folder = shard(tiny("qwen3_moe"), tmp_path / "m")
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "incomplete download" in refuse(folder, "model-00002-of-00003.safetensors", "model.").hint
    (folder / "model.safetensors.index.json").unlink()
    refuse(folder, "shard 2 of 3 is missing")


@pytest.mark.parametrize("sixteenth", range(0, 16, 3))
def test_a_cut_shard_is_named(sixteenth, tiny, tmp_path):
    folder = shard(tiny("qwen3_moe"), tmp_path / "m")
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * sixteenth // 16])
    refuse(folder, path.name)


def test_an_index_that_promises_too_much_or_points_outside_is_refused(tiny, tmp_path):
    folder = shard(tiny("qwen3_moe"), tmp_path / "m")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refuse(folder, "model.ghost.weight", "model-00001-of-00003.safetensors")
    index["weight_map"]["model.ghost.weight"] = "../../etc/passwd"
    path.write_text(json.dumps(index))
    refuse(folder, "outside the folder")
    path.write_text("{cut")
    refuse(folder, "not JSON")
    path.write_text('{"weight_map": []}')
    refuse(folder, "weight_map")


def test_the_hub_cache_layout_is_read_and_a_broken_link_is_named(tiny, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in tiny("qwen3_moe").iterdir():
        shutil.copy(file, blobs / f"{file.name}.blob")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}.blob")
    link = tmp_path / "elsewhere"
    link.symlink_to(snapshot)
    for folder in (blobs, snapshot):
        folder.chmod(0o555)
    assert len(open_(link).readings) == len(open_(tiny("qwen3_moe")).readings)
    blobs.chmod(0o755)
    (blobs / "model.safetensors.blob").unlink()
    refuse(snapshot, "model.safetensors", "a link to")
    snapshot.chmod(0o755)


def rewrite(folder, out, change):
    """A copy whose tensors went through `change`."""
    out.mkdir()
    shutil.copy(folder / "config.json", out)
    raw = load_file(folder / "model.safetensors")
    change(raw)
    save_file(raw, out / "model.safetensors")
    return out


def test_tensors_that_are_missing_misshapen_or_unexplained_are_named(tiny, tmp_path):
    folder, name = tiny("qwen3_moe"), "model.layers.2.mlp.experts.5.up_proj.weight"
    refuse(rewrite(folder, tmp_path / "a", lambda raw: raw.pop(name)), name)
    refuse(rewrite(folder, tmp_path / "b", lambda raw: raw.update({name: raw[name].T.contiguous()})), name, "the config says")
    extra = {"model.layers.2.self_attn.q_proj.bias": torch.zeros(4)}
    refuse(rewrite(folder, tmp_path / "c", lambda raw: raw.update(extra)), "model.layers.2.self_attn.q_proj.bias", error=UnsupportedModel)
    fine = {"model.layers.4.mtp.weight": torch.zeros(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "vision.w": torch.zeros(4)}
    assert open_(rewrite(folder, tmp_path / "d", lambda raw: raw.update(fine))).expert_format(0) == "f32"


def test_text_weights_of_a_multimodal_checkpoint_are_found_under_their_root(tiny, tmp_path):
    def move(raw):
        for k in list(raw):
            raw[k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k] = raw.pop(k)

    folder = tiny("qwen3_moe")
    want, got = every_tensor(open_(folder)), every_tensor(open_(rewrite(folder, tmp_path / "v", move)))
    assert all(np.array_equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize(("quant", "words"), [
    ({"quant_method": "foo"}, ["quant_method", "'foo'"]), ({"quant_method": "gptg"}, ["'gptg'"]), ({"quant_method": "gptq", "bits": 3}, ["bits", "3"]),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 6, "type": "float"}}}}, ["config_groups.g", "float of 6 bits"]),
    ("fp8", ["quantization_config"]), ({"bits": 4}, ["quant_method", "None"]),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format", "'marlin'"]),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, ["format", "'gptq_p'"]),                  # the same shapes as gptq
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version", "'gemv'"]), ({"quant_method": "awq", "backend": "llm-awq"}, ["backend", "'llm-awq'"]),
    ({"quant_method": "awq", "w_bit": 3}, ["bits", "3"]),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ["format", "'marlin-24'"]),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "sparse-24-bitmask", "weights": {"num_bits": 8}}}}, ["format", "'sparse-24-bitmask'"]),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, ["quant_algo", "'W4A16_AWQ'"]), ({"quant_algo": "INT8_SQ"}, ["quant_algo", "'INT8_SQ'"]),
    ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, ["packing_format", "llm_compressor"]),
    *(({"quant_method": m}, ["quant_method", repr(m)]) for m in ("bitsandbytes", "hqq", "exl2", "exl3", "quark", "torchao", "aqlm", "bitnet")),
])
def test_a_quantization_that_is_not_known_is_refused_by_key_and_value(quant, words):
    with pytest.raises(UnsupportedModel) as e:
        dialects.quantization({"quantization_config": quant})
    assert all(w in e.value.message for w in words) and "supported: " in e.value.hint
    if quant == {"quant_method": "gptg"}:
        assert "did you mean 'gptq'" in e.value.hint


@pytest.mark.parametrize("quant", [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
     "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True, "modules_to_not_convert": None, "backend": "autoawq"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True,
     "dynamic": {"-:.*mlp.gate$": {}, "+:.*down_proj": {"bits": 8}}, "meta": {"quantizer": ["gptqmodel:2.1.0"]}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
     "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"], "sparsity_config": {}, "transform_config": {},
     "config_groups": {"group_0": {"format": None, "input_activations": None, "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32,
                                                                                                             "strategy": "group", "symmetric": True, "actorder": None}}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "ignore": ["lm_head", "model.layers.61*"],
     "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}, "producer": {"name": "modelopt"}},
    {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}])
def test_blocks_as_they_are_published_are_taken(quant):
    assert dialects.quantization({"quantization_config": quant}) == quant
    assert dialects.quantization({"text_config": {"quantization_config": quant}}) == quant == dialects.quantization({}, {"quantization": quant})


@pytest.mark.parametrize(("packing", "method", "layout"), [
    ("auto_round:auto_gptq", "gptq", "gptq"), ("auto_round", "gptq", "gptq_v2"), ("auto_round:gptqmodel", "gptq", "gptq_v2"), ("auto_round:auto_awq", "awq", "gemm")])
def test_auto_round_packs_as_somebody_else_does(packing, method, layout):
    found = dialects.quantization({"quantization_config": {"quant_method": "auto-round", "bits": 4, "sym": True, "packing_format": packing}})
    assert found["quant_method"] == method and found["version" if method == "awq" else "checkpoint_format"] == layout


def test_folders_that_hold_no_model_say_what_is_missing(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="pickle"):
        open_folder(tmp_path)
    with pytest.raises(BadCheckpoint, match="no such folder"):
        open_source(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="not JSON"):
        open_folder(tmp_path)


def test_dummy_weights_need_only_a_config(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny("qwen3_moe") / "config.json").read_text())
    for path in (tmp_path, tmp_path / "config.json"):
        source = open_source(path, weights=False)
        assert source.spec().hidden == 64 and source.weights == ()
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        open_source(tmp_path)
