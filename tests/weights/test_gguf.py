"""GGUF: what the gguf library writes is the same model, tokenizer and numbers; whatever is cut, hostile or missing is named."""
import dataclasses
import json
import struct
import tracemalloc

import gguf as library
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hetero.arch import families, tensors
from hetero.arch import gguf as arch_gguf
from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.memory import bank
from hetero.weights import gguf, gguf_text
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.ggml import BLOCKS
from hetero.weights.source import EMBEDDED, open_folder, open_source

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama", "olmoe": "olmoe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
                 "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "dots1": "dots1", "minimax_m2": "minimax-m2", "ernie4_5_moe": "ernie4_5-moe",
                 "hunyuan_v1_moe": "hunyuan-moe", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe"}
DELTA = {"qwen3_next": "qwen3next", "qwen3_5_moe": "qwen35moe"}
PERMUTED = ("llama", "granitemoe", "deepseek", "bailingmoe")               # whose q and k rows the converter puts in another order


def metadata_of(config, model, arch):
    """The keys that llama.cpp's converter writes for this config."""
    a, moe = model.layers[-1].attention, model.layers[-1].ffn
    r = moe.router
    m = {"block_count": len(model.layers), "context_length": model.context, "embedding_length": model.hidden, "attention.head_count": a.heads,
         "attention.head_count_kv": getattr(a, "kv_heads", 1), "attention.layer_norm_rms_epsilon": model.eps, "rope.freq_base": a.rope.theta,
         "rope.dimension_count": a.rope.dim, "expert_count": r.experts, "expert_used_count": r.top_k, "feed_forward_length": config.get("intermediate_size", 0),
         "expert_feed_forward_length": moe.width}
    if arch == "deepseek2":
        m |= {"attention.kv_lora_rank": a.kv_rank, "attention.key_length": a.kv_rank + a.rope.dim, "attention.value_length": a.kv_rank,
              "attention.key_length_mla": a.nope_dim + a.rope.dim, "attention.value_length_mla": a.v_dim} | (
                  {"attention.q_lora_rank": a.q_rank} if a.q_rank else {})
        scaling = dict(a.rope.scaling.values)
        m |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling["factor"]), "rope.scaling.original_context_length": 32,
              "rope.scaling.yarn_log_multiplier": 0.1 * scaling["all_dim"], "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
        if r.groups > 1:
            m |= {"expert_group_count": r.groups, "expert_group_used_count": r.top_groups}
    else:
        m |= {"attention.key_length": a.head_dim, "attention.value_length": a.head_dim}
    if arch in ("deepseek2", "glm4moe", "dots1"):
        m |= {"expert_weights_scale": r.scale, "expert_weights_norm": r.renormalize, "expert_gating_func": 2 if r.score == "sigmoid" else 1,
              "leading_dense_block_count": config["first_k_dense_replace"], "expert_shared_count": config["n_shared_experts"]}
    if arch == "ernie4_5-moe":
        m |= {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1, "expert_shared_count": config["moe_num_shared_experts"]}
    if arch in ("qwen2moe", "hunyuan-moe"):
        m["expert_shared_feed_forward_length"] = moe.shared
    if arch == "hunyuan-moe":                                                               # the converter folds alpha into the base
        m["rope.freq_base"] = a.rope.theta * dict(a.rope.scaling.values)["alpha"] ** (a.rope.dim / (a.rope.dim - 2))
    if arch == "gpt-oss":
        scaling = dict(a.rope.scaling.values)
        m |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling["factor"]), "rope.scaling.original_context_length": scaling["original"]}
        m["attention.sliding_window"] = model.layers[0].attention.window
    if arch == "olmoe" and a.clip:
        m["attention.clamp_kqv"] = a.clip
    if arch == "granitemoe":
        m |= {"attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"], "residual_scale": config["residual_multiplier"],
              "logit_scale": config["logits_scaling"]} | ({"expert_shared_feed_forward_length": moe.shared} if moe.shared else {})
    if arch in ("deepseek", "bailingmoe", "bailingmoe2"):
        m |= {"expert_weights_scale": r.scale, "expert_weights_norm": r.renormalize, "leading_dense_block_count": 1, "expert_shared_count": 2}
    if arch == "bailingmoe2":
        m |= {"expert_group_count": r.groups, "expert_group_used_count": r.top_groups, "expert_gating_func": 2, "expert_shared_feed_forward_length": moe.shared // 2}
    if arch in ("qwen3next", "qwen35moe"):
        d = model.layers[0].attention
        m |= {"ssm.conv_kernel": d.kernel, "ssm.state_size": d.key_dim, "ssm.group_count": d.key_heads, "ssm.time_step_rank": d.value_heads,
              "ssm.inner_size": d.values, "full_attention_interval": 4, "expert_shared_feed_forward_length": moe.shared}
        m.pop("feed_forward_length")
    return m


def as_converted(t, value, part, tiled):
    """A delta net's tensor as the converter stores it: (name after "blk.{l}.", value) pairs."""
    each, wide = part.value_heads // part.key_heads, part.value_dim

    def tile(v, at, dim):
        if not tiled:
            return v
        v = np.moveaxis(v, at, 0)
        return np.moveaxis(v.reshape(part.key_heads, each, dim, *v.shape[1:]).swapaxes(0, 1).reshape(v.shape), 0, at).copy()
    kind, rows = t.key.removeprefix("delta."), 2 * part.keys
    if kind == "qkvz":
        q, k, v, z = np.split(value.reshape(part.key_heads, -1, value.shape[1]), np.cumsum([part.key_dim, part.key_dim, each * wide]), 1)
        yield "attn_qkv.weight", np.concatenate([x.reshape(-1, value.shape[1]) for x in (q, k, v)])
        yield "attn_gate.weight", z.reshape(-1, value.shape[1]).copy()
    elif kind in ("qkv", "conv"):
        value = value.reshape(value.shape[0], -1)
        yield {"qkv": "attn_qkv.weight", "conv": "ssm_conv1d.weight"}[kind], np.concatenate([value[:rows], tile(value[rows:], 0, wide)])
    elif kind == "a_log":
        yield "ssm_a", tile(-np.exp(value), 0, 1)
    else:
        name = {"z": "attn_gate.weight", "b": "ssm_beta.weight", "a": "ssm_alpha.weight", "ba": "ssm_ba.weight", "dt_bias": "ssm_dt.bias",
                "norm": "ssm_norm.weight", "o": "ssm_out.weight"}[kind]
        yield name, value if kind in ("norm", "ba") else tile(value, int(kind == "o"), wide if kind in ("z", "o") else 1)


def convert(folder, out, arch, kind="F32", split_kv=False, edit=lambda m: None):
    """The checkpoint written as a GGUF file by the library: llama.cpp's names, permutation and stacks. Returns what each tensor is worth."""
    source = open_folder(folder)
    model = families.read(source.config)
    c = Checkpoint(source, model)
    names = arch_gguf.NAMES | dict(arch_gguf.ROWS[arch].names or {})
    w = library.GGUFWriter(out, arch)
    m = metadata_of(source.config, model, arch)
    edit(m)
    for key, value in m.items():
        full = f"{arch}.{key}"
        {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(value)](full, value)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([f"t{i}" for i in range(model.vocab)])
    w.add_token_merges(["t 1"])
    w.add_eos_token_id(2)
    worth = {}

    def add(name, value, key, wide):
        if wide and kind != "F32":
            q = library.quants.quantize(value, library.GGMLQuantizationType[kind])
            w.add_tensor(name, q, raw_dtype=library.GGMLQuantizationType[kind])
            value = library.quants.dequantize(q, library.GGMLQuantizationType[kind])
        else:
            w.add_tensor(name, value)
        return value

    if arch == "bailingmoe2":
        for l in range(len(model.layers)):
            parts = [c.dense(t).float().numpy() for t in tensors.of(model) if t.layer == l and t.key in ("attn.q", "attn.k", "attn.v")]
            w.add_tensor(f"blk.{l}.attn_qkv.weight", np.concatenate(parts))
            worth |= {(f"attn.{k}", l, None): v for k, v in zip("qkv", parts, strict=True)}
    for t in tensors.of(model):
        if (t.key, t.layer, t.expert) in worth:
            continue
        if t.home == "dense":
            value = c.dense(t).float().numpy()
            if t.key.startswith("delta."):
                for name, made in as_converted(t, value, model.layers[t.layer].attention, arch == "qwen35moe"):
                    w.add_tensor(f"blk.{t.layer}.{name}", made)
                continue
            if arch in PERMUTED and t.key in ("attn.q", "attn.k"):
                heads = value.shape[0] // model.layers[0].attention.head_dim
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape).copy()
            name = names[t.key].format(l=t.layer)
            if t.key == "attn.kv_b" and split_kv:
                a = model.layers[0].attention
                both = value.reshape(a.heads, a.nope_dim + a.v_dim, a.kv_rank)
                add(name.replace("kv_b", "k_b"), both[:, :a.nope_dim].swapaxes(1, 2).copy(), t, False)
                add(name.replace("kv_b", "v_b"), both[:, a.nope_dim:].copy(), t, False)
                worth[t.key, t.layer, None] = value
                continue
            worth[t.key, t.layer, None] = add(name, value.reshape(-1) if t.key == "shared_gate" else value, t, False).reshape(t.shape)
    for l in model.moe_layers:
        experts = [c.expert(l, e) for e in range(model.layers[l].ffn.router.experts)]
        for part in ("gate", "up", "down"):
            value = np.stack([bank.dequantize(getattr(e, part)) for e in experts])
            value = add(names[f"expert.{part}"].format(l=l), value, None, True)
            worth |= {(f"expert.{part}", l, e): value[e] for e in range(len(experts))}
        for part, value in (c.expert_biases(l) or {}).items():
            add(names[f"expert.{part}.bias"].format(l=l), value, None, False)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model, worth


def same_model(got, want, interleaved):
    strip = {"names": {}, "family": "", "layers": ()}
    assert dataclasses.replace(got, **strip) == dataclasses.replace(want, **strip)
    for g, o in zip(got.layers, want.layers, strict=True):
        if interleaved:
            o = arch_gguf.interleave(o)
        if got.family == "hunyuan_v1_moe":
            r = o.attention.rope
            base = r.theta * dict(r.scaling.values)["alpha"] ** (r.dim / (r.dim - 2))
            o = dataclasses.replace(o, attention=dataclasses.replace(o.attention, rope=dataclasses.replace(r, theta=base, scaling=None)))
        assert np.allclose(flat(g), flat(o), rtol=1e-6, equal_nan=True), (g, o)
        assert words(g) == words(o)


def leaves(x):
    if dataclasses.is_dataclass(x):
        for f in dataclasses.fields(x):
            yield from leaves(getattr(x, f.name))
    elif isinstance(x, tuple):
        for v in x:
            yield from leaves(v)
    else:
        yield x


def flat(x):
    return [float(v) for v in leaves(x) if isinstance(v, int | float)]


def words(x):
    return [v for v in leaves(x) if not isinstance(v, int | float)]


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_each_architecture_is_the_same_model_with_the_same_numbers(family, tiny, tmp_path):
    arch = ARCHITECTURES[family]
    want, worth = convert(tiny(family), tmp_path / "m.gguf", arch, split_kv=family == "deepseek_v3")
    source = open_source(tmp_path / "m.gguf")
    model = source.spec()
    same_model(model, want, arch in PERMUTED)
    c = Checkpoint(source, model)
    for t in tensors.of(model):
        if t.home == "dense":
            assert np.array_equal(c.dense(t).float().numpy(), worth[t.key, t.layer, None]), t
    for l in model.moe_layers:
        for e in range(model.layers[l].ffn.router.experts):
            for part, matrix in vars(c.expert(l, e)).items():
                assert np.array_equal(bank.dequantize(matrix), worth[f"expert.{part}", l, e])
        if (biases := c.expert_biases(l)) is not None:
            assert np.array_equal(biases["up"], Checkpoint(open_folder(tiny(family)), want).expert_biases(l)["up"])


@pytest.mark.parametrize(("family", "arch"), [("mixtral", "llama"), ("granitemoeshared", "granitemoe"), *DELTA.items()])
def test_what_the_converter_puts_in_another_order_gives_the_logits_of_transformers(family, arch, tiny, make, oracle, tmp_path):
    convert(tiny(family), tmp_path / "m.gguf", arch)
    source = open_source(tmp_path / "m.gguf")
    c, ids = Checkpoint(source, source.spec()), [(7 * i) % 250 + 3 for i in range(16)]
    found = {(t.key, t.layer, t.expert): c.dense(t).float() for t in tensors.of(c.model) if t.home == "dense"}
    for l in c.model.moe_layers:
        for e in range(8):
            found |= {(f"expert.{p}", l, e): torch.from_numpy(bank.dequantize(m).copy()) for p, m in vars(c.expert(l, e)).items()}
    with torch.no_grad():
        assert (oracle.Oracle(c.model, found)(ids) - make.logits(tiny(family), ids)).abs().max() < 2e-4


COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
          "max_position_embeddings": 128, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
          "hidden_act": "silu"}
LING = COMMON | {"num_experts": 8, "num_shared_experts": 2}


@pytest.mark.parametrize(("arch", "config"), [
    ("deepseek", COMMON | {"architectures": ["DeepseekForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": False}),
    ("bailingmoe", LING | {"architectures": ["BailingMoeForCausalLM"], "norm_topk_prob": True, "norm_head": True}),
    ("bailingmoe2", LING | {"architectures": ["BailingMoeV2ForCausalLM"], "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
                            "partial_rotary_factor": 0.5, "use_qk_norm": True})])
def test_families_that_transformers_lacks_are_the_same_model_with_the_same_numbers(arch, config, tmp_path):
    want, draw = families.read(config), torch.Generator().manual_seed(0)
    stored = {}
    for t in tensors.of(want):
        stored.setdefault(t.name.partition("[")[0], []).append(torch.randn(t.shape, generator=draw))
    (tmp_path / "hf").mkdir()
    save_file({k: torch.cat(v) for k, v in stored.items()}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    _, worth = convert(tmp_path / "hf", tmp_path / "m.gguf", arch)
    source = open_source(tmp_path / "m.gguf")
    model = source.spec()
    same_model(model, dataclasses.replace(want, unit_head=False), arch in PERMUTED)      # the converter divides the head
    c = Checkpoint(source, model)
    for t in tensors.of(model):
        if t.home == "dense":
            assert np.array_equal(c.dense(t).float().numpy(), worth[t.key, t.layer, None]), t


@pytest.mark.parametrize(("kind", "exact"), [("Q8_0", True), ("Q4_0", True), ("Q5_0", True), ("Q4_1", True), ("Q5_1", True), ("MXFP4", True), ("BF16", False), ("F16", False)])
def test_experts_of_each_block_type_are_what_the_library_says(kind, exact, tiny, tmp_path):
    _, worth = convert(tiny("qwen3_moe"), tmp_path / "m.gguf", "qwen3moe", kind)
    source = open_source(tmp_path / "m.gguf")
    c = Checkpoint(source, source.spec())
    assert c.expert_format(0) == kind.lower()
    w = c.expert(2, 5)
    for part in ("gate", "up", "down"):
        assert np.array_equal(bank.dequantize(getattr(w, part)), worth[f"expert.{part}", 2, 5])
        assert (type(getattr(w, part)).__name__ == "Codes") == exact
    if exact:
        origin = bank.load(c).filled.origins[0]
        assert origin.kept and str(origin).endswith("exact")


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_any_bytes_of_a_block_type_are_read_as_the_library_reads_them(kind):
    raw = np.random.default_rng(7).integers(0, 256, (64, BLOCKS[kind].nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = library.quants.dequantize(raw, library.GGMLQuantizationType[kind])
        assert library.GGMLQuantizationType[kind].value == BLOCKS[kind].number
        assert np.array_equal(BLOCKS[kind].floats(raw), want, equal_nan=True)
        if BLOCKS[kind].kept is not None:                 # minimums may be subtracted in another order of rounding
            got, size = bank.dequantize(BLOCKS[kind].kept[1](raw, 64)), np.abs(np.nan_to_num(want, posinf=0, neginf=0)).max()
            usable = np.isfinite(want) & (np.abs(want) > 1e-37)
            assert np.allclose(got[usable], want[usable], rtol=1e-6, atol=1e-7 * size)


def embedded_as_metadata():
    """The embedded model's own tokenizer as GGUF metadata."""
    made = json.loads((EMBEDDED / "tokenizer.json").read_text())
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    vocab = made["model"]["vocab"] | {t["content"]: t["id"] for t in made["added_tokens"]}
    tokens, kinds = [""] * len(vocab), [1] * len(vocab)
    for text, i in vocab.items():
        tokens[i] = text
    for t in made["added_tokens"]:
        kinds[t["id"]] = 3 if t["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": config["chat_template"],
            "general.sampling.temp": 0.7, "tokenizer.ggml.eot_token_id": 0}


def test_the_tokenizer_and_template_from_metadata_are_the_folders_own():
    texts = gguf_text.texts(embedded_as_metadata())
    ours, theirs = tokenizers.Tokenizer.from_str(texts["tokenizer.json"]), tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    for text in ("Hello, world!  It's 2026.\n\n<|im_start|>user\nÀ été 汉字 🙂<|im_end|>", " a  b\t c\r\n", "don't WE'LL 12345"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    ids = theirs.encode("Once upon a time, a mouse").ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert json.loads(texts["tokenizer_config.json"])["chat_template"] == embedded_as_metadata()["tokenizer.chat_template"]
    assert json.loads(texts["generation_config.json"]) == {"eos_token_id": [0, 2], "temperature": 0.7}


def test_a_sentencepiece_vocabulary_splits_by_score():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", *(f"<0x{i:02X}>" for i in range(256))]
    scores = np.array([0, 0, 0, -9, -8, -7, -3, -1, -2] + [0] * 256, np.float32)
    kinds = np.array([2, 3, 3, 1, 1, 1, 1, 1, 1] + [6] * 256, np.int32)
    texts = gguf_text.texts({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
                             "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1})
    t = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
    assert t.encode("ab a").tokens == ["▁ab", "▁a"] and t.encode("é").tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert t.decode(t.encode("ab a").ids) == "ab a" and json.loads(texts["tokenizer_config.json"])["add_bos_token"] is True


@pytest.mark.parametrize(("change", "words"), [
    ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model"), ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre"), ({"tokenizer.ggml.merges": None}, "merges"),
    ({"tokenizer.ggml.tokens": 3}, "tokens"), ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "token_type")])
def test_tokenizers_that_are_not_understood_are_refused_by_key(change, words):
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=words):
        gguf_text.texts(embedded_as_metadata() | change)


def test_metadata_that_is_not_understood_is_refused_by_key(tiny, tmp_path):
    convert(tiny("qwen3_moe"), tmp_path / "a.gguf", "qwen3moe", edit=lambda m: m.pop("expert_count"))
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: metadata has no qwen3moe\.expert_count"):
        open_source(tmp_path / "a.gguf")
    convert(tiny("qwen3_moe"), tmp_path / "b.gguf", "qwen3moe", edit=lambda m: m.update({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}))
    with pytest.raises(UnsupportedModel, match="longrope"):
        open_source(tmp_path / "b.gguf")
    convert(tiny("qwen3_moe"), tmp_path / "c.gguf", "qwen3moe", edit=lambda m: m.update({"block_count": 9}))
    with pytest.raises(BadCheckpoint, match=r"no tensor for blk\.4"):
        Checkpoint(open_source(tmp_path / "c.gguf"), open_source(tmp_path / "c.gguf").spec())
    with pytest.raises(UnsupportedModel, match="'gemma'"):
        arch_gguf.config_of({"general.architecture": "gemma"}, [], 1)


def small(tensors=(("a", (2, 32), 8, 0), ("b", (4,), 0, 96)), pairs=(("general.architecture", 8, b"llama"),), magic=b"GGUF", version=3, data=b"\0" * 128,
          counts=None):
    """A file written byte by byte."""
    def text(b):
        return struct.pack("<Q", len(b)) + b
    out = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    for key, kind, value in pairs:
        out += text(key.encode()) + struct.pack("<I", kind) + (text(value) if kind == 8 else value)
    for name, shape, kind, start in tensors:
        out += text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, start)
    return out + b"\0" * (-len(out) % 32) + data


def test_a_file_written_by_hand_is_read(tmp_path):
    (tmp_path / "s.gguf").write_bytes(small())
    metadata, found, files = gguf.read(tmp_path / "s.gguf")
    assert metadata == {"general.architecture": "llama"} and len(files) == 1
    assert (found["a"].dtype, found["a"].shape, found["a"].nbytes, found["b"].start - found["a"].start) == ("Q8_0", (2, 32), 68, 96)


@pytest.mark.parametrize(("raw", "error", "words"), [
    (b"GGUF", BadCheckpoint, "too short"), (small(magic=b"GGML"), BadCheckpoint, "not GGUF"), (small(version=1), UnsupportedModel, "version 1"),
    (small(counts=(1 << 60, 1)), BadCheckpoint, "do not fit"), (small(counts=(2, 1 << 60)), BadCheckpoint, "do not fit"),
    (small(pairs=(("k", 8, b""),)).replace(struct.pack("<Q", 1) + b"k", struct.pack("<Q", 1 << 63) + b"k"), BadCheckpoint, "past the end"),
    (small(pairs=(("k", 9, struct.pack("<IQ", 8, 1 << 61)),)), BadCheckpoint, "do not fit"),
    (small(pairs=(("k", 9, struct.pack("<IQ", 6, 1 << 61)),)), BadCheckpoint, "past the end"),
    (small(pairs=(("k", 9, struct.pack("<IQ", 9, 1) * 6),)), BadCheckpoint, "no value of type"),
    (small(pairs=(("k", 77, b""),)), BadCheckpoint, "no value of type 77"), (small(pairs=(("k", 8, b"a"), ("k", 8, b"b"))), BadCheckpoint, "twice"),
    (small(pairs=(("general.alignment", 4, struct.pack("<I", 33)),)), BadCheckpoint, "general.alignment"),
    (small(tensors=(("a", (1,) * 100, 0, 0),)), BadCheckpoint, "100 dimensions"), (small(tensors=(("a", (2, 33), 8, 0),)), BadCheckpoint, "whole blocks"),
    (small(tensors=(("a", (1 << 62, 1 << 62), 0, 0),)), BadCheckpoint, "past the end"), (small(tensors=(("a", (4,), 0, 1 << 40),)), BadCheckpoint, "past the end"),
    (small(tensors=(("a", (4,), 0, 8),)), BadCheckpoint, "multiple of 32"), (small(tensors=(("a", (16,), 0, 0), ("b", (16,), 0, 32))), BadCheckpoint, "overlap"),
    (small(tensors=(("a", (4,), 0, 0), ("a", (4,), 0, 32))), BadCheckpoint, "second tensor"), (small(tensors=(("a", (256,), 16, 0),)), UnsupportedModel, "IQ2_XXS"),
    (small(tensors=(("a", (4,), 999, 0),)), UnsupportedModel, "999"), (small() + b"x" * 9000, BadCheckpoint, "after the last tensor")])
def test_a_hostile_file_is_named_with_what_is_wrong(raw, error, words, tmp_path):
    path = tmp_path / "h.gguf"
    path.write_bytes(raw)
    with pytest.raises(error) as e:
        gguf.read(path)
    assert words in e.value.message and "h.gguf" in e.value.message and "\n" not in e.value.message


@pytest.mark.parametrize("sixteenth", range(16))
def test_a_file_cut_anywhere_is_refused(sixteenth, tiny, tmp_path):
    path = tmp_path / "m.gguf"
    convert(tiny("qwen3_moe"), path, "qwen3moe")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * sixteenth // 16])
    with pytest.raises(BadCheckpoint, match=r"m\.gguf"):
        open_source(path)


def test_split_files_are_one_model_and_a_missing_or_foreign_one_is_named(tmp_path):
    def part(no, count, name, total=2):
        pairs = (("split.no", 2, struct.pack("<H", no)), ("split.count", 2, struct.pack("<H", count)), ("split.tensors.count", 5, struct.pack("<i", total)))
        return small(tensors=((name, (4,), 0, 0),), pairs=pairs, data=b"\0" * 32)
    one, two = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    one.write_bytes(part(0, 2, "a"))
    with pytest.raises(BadCheckpoint, match=r"m-00002-of-00002\.gguf: missing"):
        gguf.read(one)
    two.write_bytes(part(1, 2, "b"))
    assert set(gguf.read(two)[1]) == {"a", "b"}
    two.write_bytes(part(0, 2, "b"))
    with pytest.raises(BadCheckpoint, match="says otherwise"):
        gguf.read(one)
    two.write_bytes(part(1, 2, "a"))
    with pytest.raises(BadCheckpoint, match="lies in"):
        gguf.read(one)
    one.write_bytes(part(0, 2, "a", 5))
    two.write_bytes(part(1, 2, "b", 5))
    with pytest.raises(BadCheckpoint, match="split"):
        gguf.read(one)
    (tmp_path / "joined.gguf").write_bytes(part(0, 2, "a") + part(1, 2, "b"))
    with pytest.raises(BadCheckpoint, match="2 files"):
        gguf.read(tmp_path / "joined.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 16))
def test_a_mutated_file_is_read_or_refused_and_nothing_else(tmp_path, where, value, cut):
    raw = bytearray(small())
    raw[where % len(raw)] = value
    raw = raw[: len(raw) * cut // 16] if cut else raw
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        for s in gguf.read(path)[1].values():
            assert s.start + s.nbytes <= len(raw)
    except (BadCheckpoint, UnsupportedModel) as e:
        assert "m.gguf" in e.message
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
