"""How checkpoints call their tensors, as maps from canonical keys to names with {l} and {e}; knows no shape and no layout on disk."""

LAYER = "model.layers.{l}."


def _attention(at: str) -> dict[str, str]:
    keys = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm", "q_a": "q_a_proj",
            "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj"}
    weights = {f"attn.{key}": f"{at}.{name}.weight" for key, name in keys.items()}
    return weights | {f"attn.{key}.bias": f"{at}.{name}.bias" for key, name in keys.items()} | {"attn.sinks": f"{at}.sinks"}


def delta_net(at: str) -> dict[str, str]:
    """A gated delta net's tensors, in both spellings of its inputs."""
    stems = {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a",
             "conv": "conv1d", "norm": "norm", "o": "out_proj"}
    named = {f"delta.{key}": f"{at}.{stem}.weight" for key, stem in stems.items()}
    return named | {"delta.dt_bias": f"{at}.dt_bias", "delta.a_log": f"{at}.A_log"}


def glu(key: str, at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """The three matrices of a gated feed-forward block and their biases."""
    parts = (("gate", gate), ("up", up), ("down", down))
    return {f"{key}.{part}{bias}": f"{at}.{name}{bias or '.weight'}" for part, name in parts for bias in ("", ".bias")}


HF = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "norm.bias": "model.norm.bias",
    "head": "lm_head.weight", "head.bias": "lm_head.bias",
    "attn_norm": LAYER + "input_layernorm.weight", "attn_norm.bias": LAYER + "input_layernorm.bias",
    "ffn_norm": LAYER + "post_attention_layernorm.weight", "ffn_norm.bias": LAYER + "post_attention_layernorm.bias",
    "router": LAYER + "mlp.gate.weight", "router.bias": LAYER + "mlp.gate.bias", "router.correction": LAYER + "mlp.gate.e_score_correction_bias",
    **_attention(LAYER + "self_attn"), **glu("mlp", LAYER + "mlp"), **glu("shared", LAYER + "mlp.shared_experts"),
    **glu("expert", LAYER + "mlp.experts.{e}"),
}
MIXTRAL = HF | glu("expert", LAYER + "block_sparse_moe.experts.{e}", "w1", "w3", "w2") | {
    "router": LAYER + "block_sparse_moe.gate.weight", "router.correction": LAYER + "block_sparse_moe.e_score_correction_bias",
}


def under(names: dict[str, str], old: str, new: str) -> dict[str, str]:
    """The same names with prefix `old` replaced: where a multimodal checkpoint keeps its text part."""
    return {key: new + name[len(old):] if name.startswith(old) else name for key, name in names.items()}
