"""What a GGUF file's metadata means: a config.json that says the same, and the names of its tensors; knows no file and no bytes.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's architecture table. A row per `general.architecture`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero.arch import families
from hetero.arch.names import glu
from hetero.arch.spec import GQA, GatedDeltaNet, Layer, Model
from hetero.errors import UnsupportedModel

L = "blk.{l}."
NAMES = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "norm.bias": "output_norm.bias", "head": "output.weight", "head.bias": "output.bias",
    "attn_norm": L + "attn_norm.weight", "attn_norm.bias": L + "attn_norm.bias", "ffn_norm": L + "ffn_norm.weight",
    "ffn_norm.bias": L + "ffn_norm.bias",
    **{f"attn.{k}{b}": f"{L}attn_{n}{b or '.weight'}" for b in ("", ".bias") for k, n in (
        ("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"), ("q_norm", "q_norm"), ("k_norm", "k_norm"), ("q_a", "q_a"), ("q_a_norm", "q_a_norm"),
        ("q_b", "q_b"), ("kv_a", "kv_a_mqa"), ("kv_a_norm", "kv_a_norm"), ("kv_b", "kv_b"))},
    "attn.sinks": L + "attn_sinks.weight", "router": L + "ffn_gate_inp.weight", "router.bias": L + "ffn_gate_inp.bias",
    "router.correction": L + "exp_probs_b.bias", "shared_gate": L + "ffn_gate_inp_shexp.weight",
    **glu("mlp", L[:-1], "ffn_gate", "ffn_up", "ffn_down"), **glu("shared", L[:-1], "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    **glu("expert", L[:-1], "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
}
AFTER = {"ffn_norm": L + "post_attention_norm.weight"}
DELTA = AFTER | {f"delta.{key}": L + name for key, name in {
    "qkv": "attn_qkv.weight", "z": "attn_gate.weight", "ba": "ssm_ba.weight", "b": "ssm_beta.weight", "a": "ssm_alpha.weight", "a_log": "ssm_a",
    "conv": "ssm_conv1d.weight", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm.weight", "o": "ssm_out.weight"}.items()}


class Meta:
    """Metadata under one architecture's prefix, and which tensors there are."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Iterable[str], vocab: int) -> None:
        self.all, self.arch, self.tensors, self.vocab = metadata, str(metadata.get("general.architecture")), set(tensors), vocab

    def get(self, key: str, default: Any = None) -> Any:
        return self.all.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"metadata has no {self.arch}.{key}", "the file was converted by a tool that leaves out what the model needs")
        return value

    def one(self, key: str) -> Any:
        """A number that may be written once per layer, when all layers have the same."""
        value = self.need(key)
        values = [value] if isinstance(value, int | float) else [v for v in list(value) if v]
        if not values or any(v != values[0] for v in values):
            raise UnsupportedModel(f"{self.arch}.{key} differs between layers: {values[:6]}", "supported: the same in all layers")
        return values[0] if isinstance(values[0], int | float) else values[0].item()

    def has(self, name: str) -> bool:
        return any(f"blk.{l}.{name}" in self.tensors for l in range(4096 if self.tensors else 0))


def rope(m: Meta, head_dim: int) -> dict[str, Any]:
    if "rope_freqs.weight" in m.tensors:
        raise UnsupportedModel("rope_freqs.weight: rotary frequencies stored as a tensor", "supported: none, linear and yarn scaling by metadata")
    kind, turned = m.get("rope.scaling.type", "none"), m.get("rope.dimension_count", head_dim)
    found = {"rope_theta": m.get("rope.freq_base", 10000.0)} | ({"partial_rotary_factor": turned / head_dim} if turned != head_dim else {})
    if kind in ("none", None):
        return found
    scaling: dict[str, Any] = {"rope_type": kind, "factor": m.need("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = m.need("rope.scaling.original_context_length")
        for key, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := m.get(f"rope.scaling.{name}")) is not None:
                scaling[key] = value
        if log := m.get("rope.scaling.yarn_log_multiplier"):
            scaling |= {"mscale": log * 10, "mscale_all_dim": log * 10}
    elif kind != "linear":
        raise UnsupportedModel(f"{m.arch}.rope.scaling.type = {kind!r}", "supported: none, linear, yarn")
    return found | {"rope_scaling": scaling}


def common(m: Meta, architecture: str, **more: Any) -> dict[str, Any]:
    heads, hidden = m.one("attention.head_count"), m.need("embedding_length")
    dim = m.get("attention.key_length", hidden // heads)
    return {"architectures": [architecture], "hidden_size": hidden, "num_hidden_layers": m.need("block_count") - m.get("nextn_predict_layers", 0),
            "num_attention_heads": heads, "num_key_value_heads": m.one("attention.head_count_kv"), "head_dim": dim, "vocab_size": m.vocab,
            "rms_norm_eps": m.need("attention.layer_norm_rms_epsilon"), "max_position_embeddings": m.need("context_length"),
            "tie_word_embeddings": "output.weight" not in m.tensors, "hidden_act": "silu", "num_experts_per_tok": m.need("expert_used_count"),
            "intermediate_size": m.one("feed_forward_length") if m.get("feed_forward_length") is not None else m.get("expert_feed_forward_length"),
            **rope(m, dim)} | more


def width(m: Meta) -> dict[str, Any]:
    return {"moe_intermediate_size": m.need("expert_feed_forward_length")}


def qwen3moe(m: Meta) -> dict[str, Any]:
    return common(m, "Qwen3MoeForCausalLM", num_experts=m.need("expert_count"), norm_topk_prob=True, **width(m))


def qwen2moe(m: Meta) -> dict[str, Any]:
    return common(m, "Qwen2MoeForCausalLM", num_experts=m.need("expert_count"), norm_topk_prob=False, qkv_bias=m.has("attn_q.bias"),
                  shared_expert_intermediate_size=m.need("expert_shared_feed_forward_length"), mlp_only_layers=plain_layers(m), **width(m))


def plain_layers(m: Meta) -> list[int]:
    return [l for l in range(m.need("block_count")) if f"blk.{l}.ffn_gate_inp.weight" not in m.tensors]


def llama(m: Meta) -> dict[str, Any]:
    if not m.get("expert_count"):
        raise UnsupportedModel("general.architecture = 'llama' without experts", "supported: mixture-of-experts models")
    return common(m, "MixtralForCausalLM", num_local_experts=m.need("expert_count"))


def olmoe(m: Meta) -> dict[str, Any]:
    clip = m.get("attention.clamp_kqv")
    return common(m, "OlmoeForCausalLM", num_experts=m.need("expert_count"), norm_topk_prob=False, **({"clip_qkv": clip} if clip else {}))


def sigmoid(m: Meta) -> dict[str, Any]:
    return {"n_routed_experts": m.need("expert_count"), "n_shared_experts": m.get("expert_shared_count", 0),
            "norm_topk_prob": bool(m.get("expert_weights_norm", True)), "routed_scaling_factor": m.get("expert_weights_scale", 1.0),
            "first_k_dense_replace": m.get("leading_dense_block_count", 0), "n_group": m.get("expert_group_count", 1),
            "topk_group": m.get("expert_group_used_count", 1), **width(m)}


def deepseek2(m: Meta) -> dict[str, Any]:
    turned, key = m.need("rope.dimension_count"), m.get("attention.key_length_mla", m.get("attention.key_length"))
    value, groups = m.get("attention.value_length_mla", m.get("attention.value_length")), m.get("expert_group_count", 1)
    latent = {"kv_lora_rank": m.need("attention.kv_lora_rank"), "qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned, "v_head_dim": value,
              "q_lora_rank": m.get("attention.q_lora_rank")}
    config = common(m, "DeepseekV3ForCausalLM", **sigmoid(m)) | latent
    config.pop("partial_rotary_factor", None)
    config |= {k: v for k, v in rope(m, turned).items() if k != "partial_rotary_factor"}
    if m.get("expert_gating_func", 1) == 2:
        return config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return config | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method, "norm_topk_prob": False}


def gpt_oss(m: Meta) -> dict[str, Any]:
    config = common(m, "GptOssForCausalLM", num_local_experts=m.need("expert_count"), intermediate_size=m.need("expert_feed_forward_length"),
                    sliding_window=m.need("attention.sliding_window"), attention_bias=True)
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    return config


def glm4moe(m: Meta) -> dict[str, Any]:
    return common(m, "Glm4MoeForCausalLM", use_qk_norm=m.has("attn_q_norm.weight"), attention_bias=m.has("attn_q.bias"), **sigmoid(m))


def dots1(m: Meta) -> dict[str, Any]:
    return common(m, "Dots1ForCausalLM", **sigmoid(m))


def minimax_m2(m: Meta) -> dict[str, Any]:
    return common(m, "MiniMaxM2ForCausalLM", num_local_experts=m.need("expert_count"), intermediate_size=m.need("expert_feed_forward_length"),
                  scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True)


def ernie4_5_moe(m: Meta) -> dict[str, Any]:
    return common(m, "Ernie4_5_MoeForCausalLM", moe_num_experts=m.need("expert_count"), moe_k=m.need("expert_used_count"),
                  moe_num_shared_experts=m.get("expert_shared_count", 0), moe_layer_start_index=m.get("leading_dense_block_count", 0),
                  moe_layer_interval=m.get("interleave_moe_layer_step", 1), **width(m)) | {"num_experts_per_tok": None}


def hunyuan_moe(m: Meta) -> dict[str, Any]:
    I = m.need("expert_feed_forward_length")
    return common(m, "HunYuanMoEV1ForCausalLM", num_experts=m.need("expert_count"), moe_topk=m.need("expert_used_count"), intermediate_size=I,
                  num_shared_expert=m.get("expert_shared_feed_forward_length", I) // I) | {"num_experts_per_tok": None}


def granitemoe(m: Meta) -> dict[str, Any]:
    return common(m, "GraniteMoeSharedForCausalLM", num_local_experts=m.need("expert_count"), attention_bias=m.has("attn_q.bias"),
                  shared_intermediate_size=m.get("expert_shared_feed_forward_length", 0), attention_multiplier=m.get("attention.scale", 1.0),
                  embedding_multiplier=m.get("embedding_scale", 1.0), residual_multiplier=m.get("residual_scale", 1.0),
                  logits_scaling=m.get("logit_scale", 1.0))


def deepseek(m: Meta) -> dict[str, Any]:
    return common(m, "DeepseekForCausalLM", **sigmoid(m)) | {"norm_topk_prob": bool(m.get("expert_weights_norm", False))}


def bailingmoe(m: Meta) -> dict[str, Any]:
    """A unit head is divided by its columns' lengths when the file is made."""
    return common(m, "BailingMoeForCausalLM", num_experts=m.need("expert_count"), num_shared_experts=m.get("expert_shared_count", 0), norm_head=False,
                  norm_topk_prob=bool(m.need("expert_weights_norm")), first_k_dense_replace=m.get("leading_dense_block_count", 0), **width(m))


def bailingmoe2(m: Meta) -> dict[str, Any]:
    if m.need("expert_gating_func") != 2:
        raise UnsupportedModel(f"{m.arch}.expert_gating_func = {m.get('expert_gating_func')}", "supported: 2 (sigmoid)")
    config = common(m, "BailingMoeV2ForCausalLM", num_experts=m.need("expert_count"), num_shared_experts=m.get("expert_shared_count", 0),
                    moe_shared_expert_intermediate_size=m.get("expert_shared_feed_forward_length"), **sigmoid(m))
    return {"partial_rotary_factor": 1.0} | {k: v for k, v in config.items() if k not in ("n_routed_experts", "n_shared_experts")}


def qwen3next(m: Meta) -> dict[str, Any]:
    heads = m.need("ssm.time_step_rank")
    return common(m, "Qwen3NextForCausalLM", num_experts=m.need("expert_count"), norm_topk_prob=True, linear_num_key_heads=m.need("ssm.group_count"),
                  linear_num_value_heads=heads, linear_key_head_dim=m.need("ssm.state_size"), linear_value_head_dim=m.need("ssm.inner_size") // heads,
                  linear_conv_kernel_dim=m.need("ssm.conv_kernel"), full_attention_interval=m.get("full_attention_interval", 4),
                  shared_expert_intermediate_size=m.need("expert_shared_feed_forward_length"), **width(m))


def qwen35moe(m: Meta) -> dict[str, Any]:
    return qwen3next(m) | {"architectures": ["Qwen3_5MoeForCausalLM"]}


@dataclass(frozen=True)
class Row:
    """interleaved: q and k rows were put in the order that rotates neighbours. names: what differs from NAMES. fused: q, k and v are one tensor.
    tiled: a delta net's value heads were put in the order that repeats the key heads."""

    config: Callable[[Meta], dict[str, Any]]
    interleaved: bool = False
    names: Mapping[str, str] | None = None
    fused: bool = False
    tiled: bool = False


ROWS: dict[str, Row] = {
    "qwen3moe": Row(qwen3moe), "qwen2moe": Row(qwen2moe), "llama": Row(llama, interleaved=True), "olmoe": Row(olmoe), "deepseek2": Row(deepseek2),
    "gpt-oss": Row(gpt_oss, names=AFTER), "glm4moe": Row(glm4moe, names=AFTER), "dots1": Row(dots1), "minimax-m2": Row(minimax_m2),
    "ernie4_5-moe": Row(ernie4_5_moe), "hunyuan-moe": Row(hunyuan_moe), "qwen3vlmoe": Row(qwen3moe), "deepseek": Row(deepseek, interleaved=True),
    "granitemoe": Row(granitemoe, interleaved=True), "bailingmoe": Row(bailingmoe, interleaved=True), "bailingmoe2": Row(bailingmoe2, fused=True),
    "qwen3next": Row(qwen3next, names=DELTA), "qwen35moe": Row(qwen35moe, names=DELTA, tiled=True),
}


def config_of(metadata: Mapping[str, Any], tensors: Iterable[str], vocab: int) -> dict[str, Any]:
    """A config.json that says the same. Raises UnsupportedModel naming key and value."""
    name = str(metadata.get("general.architecture"))
    if name not in ROWS:
        raise UnsupportedModel(f"general.architecture = {name!r}", f"supported GGUF architectures: {', '.join(sorted(ROWS))}")
    m = Meta(metadata, tensors, vocab)
    config = {k: v for k, v in ROWS[name].config(m).items() if v is not None}
    for key in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    return config


def read(config: dict[str, Any], architecture: str) -> Model:
    """The model of `config_of`, with this container's names and order of rows."""
    row = ROWS[architecture]
    found = families.read(config)
    layers = found.layers
    if row.interleaved:
        layers = tuple(interleave(layer) for layer in layers)
    layers = tuple(replace(x, attention=replace(x.attention, grouped=False)) if isinstance(x.attention, GatedDeltaNet) else x for x in layers)
    names = NAMES | dict(row.names or {})
    if row.fused:
        names |= {f"attn.{p}": f"{L}attn_qkv.weight[{found.names[f'attn.{p}'].partition('[')[2]}" for p in "qkv"}
    return replace(found, layers=layers, names=names, norm_shift=0.0)        # norms are stored whole


def interleave(layer: Layer) -> Layer:
    a = layer.attention
    if not isinstance(a, GQA) or a.rope is None:
        return layer
    return replace(layer, attention=replace(a, rope=replace(a.rope, interleaved=True)))
