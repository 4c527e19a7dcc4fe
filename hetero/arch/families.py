"""One row per family: its config keys and tensor names turned into a Model; knows no tensor library and no file."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hetero.arch.fields import Fields
from hetero.arch.names import HF, LAYER, MIXTRAL, glu, under
from hetero.arch.names import delta_net as delta_net_names
from hetero.arch.parts import PER_TOKEN, act, delta_net, gqa, layer_kinds, leading_dense, mla, model, router, sigmoid_moe, sparse_step, stack
from hetero.arch.spec import GQA, Act, Layer, Model, MoE
from hetero.errors import UnsupportedModel


def qwen2_moe(f: Fields) -> Model:
    f.expect(use_sliding_window=False, expert_interval=1, attention_bias=False)
    f.skip("layer_types", "sliding_window")
    moe = MoE(router(f, ("num_experts",), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=False)), f.count("moe_intermediate_size"),
              shared=f.count("shared_expert_intermediate_size"), shared_gate=True, act=act(f))
    names = HF | glu("shared", LAYER + "mlp.shared_expert") | {"shared_gate": LAYER + "mlp.shared_expert_gate.weight"}
    return model(f, "qwen2_moe", stack(f, gqa(f, bias=f.flag("qkv_bias", default=True)), moe, sparse_step(f)), names)


def qwen3_moe(f: Fields, theta: float = 10000.0) -> Model:
    f.expect(use_sliding_window=False, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
    f.skip("layer_types", "sliding_window")
    bias = f.flag("attention_bias", default=False)
    moe = MoE(router(f, ("num_experts", "num_local_experts"), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=False)),
              f.count("moe_intermediate_size"), act=act(f))
    return model(f, "qwen3_moe", stack(f, gqa(f, theta=theta, qk_norm="head", bias=bias, out_bias=bias), moe, sparse_step(f)), HF)


def qwen3_vl_moe(f: Fields) -> Model:
    f.expect(norm_topk_prob=True)        # its code always does, whatever the default of the key
    f.config = f.config | {"norm_topk_prob": True}
    return replace(qwen3_moe(f, theta=500000.0), family="qwen3_vl_moe")


def mixtral(f: Fields) -> Model:
    moe = MoE(router(f, ("num_local_experts",), PER_TOKEN, "softmax", True), f.count("intermediate_size"), act=act(f))
    return model(f, "mixtral", stack(f, gqa(f, theta=1e6, window=f.count("sliding_window", default=None)), moe), MIXTRAL, eps=1e-5)


def olmoe(f: Fields) -> Model:
    bias = f.flag("attention_bias", default=False)
    moe = MoE(router(f, ("num_experts",), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=False)), f.count("intermediate_size"), act=act(f))
    attention = gqa(f, qk_norm="full", clip=f.number("clip_qkv", default=None), bias=bias, out_bias=bias)
    return model(f, "olmoe", stack(f, attention, moe), HF, eps=1e-5)


def flex_olmo(f: Fields) -> Model:
    bias = f.flag("attention_bias", default=False)
    moe = MoE(router(f, ("num_experts",), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=False)), f.count("intermediate_size"), act=act(f))
    names = HF | {"attn_norm": HF["ffn_norm"], "ffn_norm": LAYER + "post_feedforward_layernorm.weight"}
    layers = stack(f, gqa(f, theta=500000.0, qk_norm="full", bias=bias, out_bias=bias), moe)
    return model(f, "flex_olmo", [replace(layer, norm_after=True) for layer in layers], names)


def _deepseek_softmax(f: Fields) -> MoE:
    """The router of DeepSeek-MoE and DeepSeek-V2."""
    f.expect(topk_method=("greedy", "group_limited_greedy"), norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
    grouped = f("topk_method", default="greedy") == "group_limited_greedy"
    f.skip("n_group", "topk_group")
    groups = {"groups": f.count("n_group"), "top_groups": f.count("topk_group")} if grouped else {}
    width = f.count("moe_intermediate_size")
    return MoE(router(f, ("n_routed_experts",), PER_TOKEN, "softmax", False, scale=f.number("routed_scaling_factor", default=1.0), **groups), width,
               shared=width * f.count("n_shared_experts", default=0, least=0), act=act(f))


def deepseek(f: Fields) -> Model:
    """DeepSeek-MoE (arXiv 2401.06066): plain attention under the router that V2 kept."""
    f.expect(attention_bias=False, routed_scaling_factor=1.0)
    return model(f, "deepseek", stack(f, gqa(f), _deepseek_softmax(f), leading_dense(f)), HF)


def deepseek_v2(f: Fields) -> Model:
    return model(f, "deepseek_v2", stack(f, mla(f), _deepseek_softmax(f), leading_dense(f)), HF)


def deepseek_v3(f: Fields) -> Model:
    return model(f, "deepseek_v3", stack(f, mla(f), sigmoid_moe(f), leading_dense(f)), HF)


def kimi_k25(f: Fields) -> Model:
    return replace(deepseek_v3(f), family="kimi_k25")


def glm4_moe(f: Fields) -> Model:
    attention = gqa(f, partial=0.5, qk_norm="head" if f.flag("use_qk_norm", default=False) else "none", bias=f.flag("attention_bias", default=False))
    return model(f, "glm4_moe", stack(f, attention, sigmoid_moe(f), leading_dense(f, 1)), HF, eps=1e-5)


def glm4v_moe(f: Fields) -> Model:
    f.config = {"attention_bias": True} | f.config
    return replace(glm4_moe(f), family="glm4v_moe")


def glm4_moe_lite(f: Fields) -> Model:
    return model(f, "glm4_moe_lite", stack(f, mla(f), sigmoid_moe(f), leading_dense(f, 1)), HF, eps=1e-5)


def dots1(f: Fields) -> Model:
    f.skip("sliding_window")
    f.expect(layer_types="full_attention", use_sliding_window=False)
    bias = f.flag("attention_bias", default=False)
    return model(f, "dots1", stack(f, gqa(f, qk_norm="head", bias=bias, out_bias=bias), sigmoid_moe(f), leading_dense(f)), HF)


def gpt_oss(f: Fields) -> Model:
    f.expect(attention_bias=True)
    f.skip("initial_context_length", "experts_per_token")
    n = f.count("num_hidden_layers")
    window = f.count("sliding_window", default=None)
    windows = f.words("layer_types", n, {"sliding_attention": window, "full_attention": None},
                      default=["full_attention" if i % 2 else "sliding_attention" for i in range(n)])
    # The gate is x * sigmoid(alpha x): written as silu(alpha x) / alpha.
    gate = Act("silu", f.number("swiglu_alpha", default=1.702), f.number("swiglu_limit", default=7.0), up_shift=1.0)
    f.expect(hidden_act="silu")
    moe = MoE(router(f, ("num_local_experts",), (*PER_TOKEN, "experts_per_token"), "topk_softmax", False, bias=True), f.count("intermediate_size"),
              act=gate, bias=True)
    names = HF | {"router": LAYER + "mlp.router.weight", "router.bias": LAYER + "mlp.router.bias"}
    layers = [Layer(gqa(f, theta=150000.0, window=w, sinks=True, bias=True, out_bias=True), moe) for w in windows]
    return model(f, "gpt_oss", layers, names, eps=1e-5)


def minimax_m2(f: Fields) -> Model:
    f.expect(scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, attn_type_list=1, shared_intermediate_size=0,
             sliding_window=())
    moe = MoE(router(f, ("num_local_experts",), PER_TOKEN, "sigmoid", True, correction=True), f.count("intermediate_size"), act=act(f))
    return model(f, "minimax_m2", stack(f, gqa(f, theta=5e6, qk_norm="full"), moe), MIXTRAL)


def hunyuan_v1_moe(f: Fields) -> Model:
    f.expect(use_cla=False, use_mla=False, position_embedding_xdrope=False, moe_layer_num_skipped=0, group_limited_greedy=False,
             norm_topk_prob=True, norm_type="rms", routed_scaling_factor=1.0, use_qk_norm=True, use_rotary_pos_emb=True, use_mixed_mlp_moe=True,
             add_classification_head=False, moe_drop_tokens=False, moe_random_routing_dropped_token=False, xdrope_section=(), n_group=(),
             topk_group=(), kv_lora_rank=())
    f.skip("cla_share_factor", "dense_list", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "org_vocab_size", "class_num",
           "pool_type", "mask_init_id", "num_media_embeds", "skip_cls_token", "text_start_id", "text_end_id")
    f.skip(*(key for key in f.config if key.startswith(("vit_", "anyres_", "image_", "im_", "video_"))))
    width = f.count("moe_intermediate_size", "intermediate_size")
    moe = MoE(router(f, ("num_experts",), ("moe_topk",), "softmax", True), width, shared=width * f.count("num_shared_expert", default=1), act=act(f))
    f.config = ({"head_dim": f.config["attention_head_dim"]} if "attention_head_dim" in f.config else {}) | f.config
    f.skip("attention_head_dim")
    names = HF | glu("shared", LAYER + "mlp.shared_mlp") | {
        "router": LAYER + "mlp.gate.wg.weight", "attn.q_norm": LAYER + "self_attn.query_layernorm.weight",
        "attn.k_norm": LAYER + "self_attn.key_layernorm.weight"}
    bias = f.flag("attention_bias", default=False)
    return model(f, "hunyuan_v1_moe", stack(f, gqa(f, qk_norm="rotated", bias=bias, out_bias=bias), moe), names, eps=1e-5)


def ernie4_5_moe(f: Fields) -> Model:
    f.expect(use_bias=False, moe_norm_min=1e-12, moe_gate="topk", moe_use_aux_free=True, use_rmsnorm=True, compression_ratio=1.0)
    f.skip("moe_capacity", "moe_aux_loss_lambda", "moe_dropout_prob", "moe_orthogonal_loss_lambda", "moe_z_loss_lambda", "ignored_index")
    n = f.count("num_hidden_layers")
    first, step = f.count("moe_layer_start_index", default=1, least=0), f.count("moe_layer_interval", default=1)
    last = f.count("moe_layer_end_index", default=-1, least=-1)
    last = n - 1 if last == -1 else last
    width = f.count("moe_intermediate_size")
    moe = MoE(router(f, ("moe_num_experts",), ("moe_k",), "softmax", True, correction=True), width,
              shared=width * f.count("moe_num_shared_experts", default=2, least=0), act=act(f))
    names = HF | {"router.correction": LAYER + "mlp.moe_statics.e_score_correction_bias"}
    layers = stack(f, gqa(f, interleaved=True, theta=500000.0), moe, lambda i: not (first <= i <= last and (i + 1) % step == 0))
    return model(f, "ernie4_5_moe", layers, names, tied=True, eps=1e-5)


def granitemoe(f: Fields) -> Model:
    """Granite-MoE, and with `shared_intermediate_size` Granite-MoE-shared: Mixtral's shape with four published multipliers."""
    bias = f.flag("attention_bias", default=False)
    moe = MoE(router(f, ("num_local_experts",), PER_TOKEN, "topk_softmax", False), f.count("intermediate_size"),
              shared=f.count("shared_intermediate_size", default=0, least=0), act=act(f))
    layers = stack(f, gqa(f, scale=f.number("attention_multiplier", default=1.0), bias=bias, out_bias=bias), moe)
    residual = f.number("residual_multiplier", default=1.0)
    at = LAYER + "block_sparse_moe."
    names = HF | glu("expert", at + "experts.{e}") | glu("shared", LAYER + "shared_mlp") | {
        "router": at + "router.layer.weight", "experts.gate_up": at + "input_linear.weight", "experts.down": at + "output_linear.weight",
        "shared.gate_up": LAYER + "shared_mlp.input_linear.weight", "shared.down": LAYER + "shared_mlp.output_linear.weight"}
    return model(f, "granitemoe", [replace(layer, residual_scale=residual) for layer in layers], names,
                 embed_scale=f.number("embedding_multiplier", default=1.0), logit_scale=1.0 / f.number("logits_scaling", default=1.0))


def phimoe(f: Fields) -> Model:
    bias = f.flag("attention_bias", default=False)
    moe = MoE(router(f, ("num_local_experts",), PER_TOKEN, "sparsemixer", False, jitter=f.number("router_jitter_noise", default=0.01)),
              f.count("intermediate_size"), act=act(f))
    if moe.router.top_k != 2:
        raise f.refuse("num_experts_per_tok", moe.router.top_k, "2 (sparsemixer picks two)")
    attention = gqa(f, theta=1e6, window=f.count("sliding_window", default=None), bias=bias, out_bias=bias)
    return model(f, "phimoe", stack(f, attention, moe), MIXTRAL, eps=1e-5, norm_bias=True, head_bias=f.flag("lm_head_bias", default=False))


def qwen3_next(f: Fields, grouped: bool = True) -> Model:
    """Three layers of gated delta net to one of gated attention, both over Qwen2-MoE's layer; norms are stored less one."""
    f.expect(attention_bias=False, use_sliding_window=False, attn_output_gate=True)
    f.skip("intermediate_size")
    attention, linear = gqa(f, partial=0.25, qk_norm="head", gate=True), delta_net(f, grouped)
    moe = MoE(router(f, ("num_experts",), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=True)), f.count("moe_intermediate_size"),
              shared=f.count("shared_expert_intermediate_size"), shared_gate=True, act=act(f))
    kinds = layer_kinds(f, {"linear_attention": linear, "full_attention": attention}, 4)
    ffns = stack(f, attention, moe, sparse_step(f))
    names = HF | glu("shared", LAYER + "mlp.shared_expert") | delta_net_names(LAYER + "linear_attn") | {
        "shared_gate": LAYER + "mlp.shared_expert_gate.weight"}
    return model(f, "qwen3_next", [replace(layer, attention=kind) for layer, kind in zip(ffns, kinds, strict=True)], names, norm_shift=1.0)


def qwen3_5_moe(f: Fields) -> Model:
    f.expect(decoder_sparse_step=1, mlp_only_layers=((), []), norm_topk_prob=True)
    return replace(qwen3_next(f, grouped=False), family="qwen3_5_moe")


def bailing_moe(f: Fields) -> Model:
    """Ling: DeepSeek-MoE's layer with renormalized weights, q, k and v in one matrix, and a head of unit columns."""
    f.expect(norm_softmax=False, use_qk_norm=False, score_function="softmax", moe_router_enable_expert_bias=False,
             n_group=1, topk_group=1, routed_scaling_factor=1.0, use_rmsnorm=True, rotary_type="rope-1d", use_rotary_pos_emb=True)
    f.skip("num_kv_heads_per_layer", "moe_router_topk_scaling_factor")
    bias, qkv = f.flag("use_bias", default=False), f.flag("use_qkv_bias", default=False)
    attention = gqa(f, bias=qkv, out_bias=bias)
    width = f.count("moe_intermediate_size")
    moe = MoE(router(f, ("num_experts",), PER_TOKEN, "softmax", f.flag("norm_topk_prob", default=True)), width,
              shared=width * f.count("num_shared_experts", default=0, least=0), act=act(f))
    layers, unit = stack(f, attention, moe, leading_dense(f)), f.flag("norm_head", default=False)
    return model(f, "bailing_moe", layers, _bailing_names(attention), unit_head=unit)


def bailing_moe_v2(f: Fields) -> Model:
    """Ling 2.0 and Ring: DeepSeek-V3's router over attention that norms its heads and turns half of each."""
    f.expect(norm_head=False, norm_softmax=False, use_qk_norm=True, score_function="sigmoid", moe_router_enable_expert_bias=True, use_rmsnorm=True,
             rotary_type=("default", "rope-1d"), router_dtype="fp32", using_split_qkv_in_self_attention=False, use_sliding_window=False)
    f.skip("num_kv_heads_per_layer", "mtp_loss_scaling_factor", "sliding_window")
    for key in ("partial_rotary_factor", "n_group", "topk_group"):
        f(key)                           # its code's own defaults have differed: they must be written
    bias, qkv = f.flag("use_bias", default=False), f.flag("use_qkv_bias", default=False)
    attention = gqa(f, qk_norm="head", bias=qkv, out_bias=bias)
    moe = sigmoid_moe(f, ("num_experts",), ("num_shared_experts",), f.count("moe_shared_expert_intermediate_size", default=None))
    at = LAYER + "attention."
    names = _bailing_names(attention) | {"attn.q_norm": at + "query_layernorm.weight", "attn.k_norm": at + "key_layernorm.weight",
                                         "router.correction": LAYER + "mlp.gate.expert_bias"}
    return model(f, "bailing_moe_v2", stack(f, attention, moe, leading_dense(f)), names)


def _bailing_names(attention: GQA) -> dict[str, str]:
    """q, k and v stand one above the other in one matrix."""
    at, q, kv = LAYER + "attention.", attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    rows = {"q": f"[0:{q}]", "k": f"[{q}:{q + kv}]", "v": f"[{q + kv}:{q + 2 * kv}]"}
    names = HF | {"embed": "model.word_embeddings.weight", "attn.o": at + "dense.weight", "attn.o.bias": at + "dense.bias"}
    return names | {f"attn.{p}{b}": f"{at}query_key_value{b or '.weight'}{r}" for p, r in rows.items() for b in ("", ".bias")}


FAMILIES: dict[str, Callable[[Fields], Model]] = {
    "Qwen2MoeForCausalLM": qwen2_moe, "Qwen3MoeForCausalLM": qwen3_moe, "MixtralForCausalLM": mixtral, "OlmoeForCausalLM": olmoe,
    "FlexOlmoForCausalLM": flex_olmo, "DeepseekForCausalLM": deepseek, "DeepseekV2ForCausalLM": deepseek_v2, "KimiK2ForCausalLM": deepseek_v3,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Glm4MoeForCausalLM": glm4_moe, "Glm4MoeLiteForCausalLM": glm4_moe_lite, "Dots1ForCausalLM": dots1, "GptOssForCausalLM": gpt_oss,
    "MiniMaxM2ForCausalLM": minimax_m2, "HunYuanMoEV1ForCausalLM": hunyuan_v1_moe, "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "GraniteMoeForCausalLM": granitemoe, "GraniteMoeSharedForCausalLM": granitemoe, "PhimoeForCausalLM": phimoe, "PhiMoEForCausalLM": phimoe,
    "BailingMoeForCausalLM": bailing_moe, "BailingMoeV2ForCausalLM": bailing_moe_v2,
    "Qwen3NextForCausalLM": qwen3_next, "Qwen3_5MoeForCausalLM": qwen3_5_moe,
}
# Multimodal checkpoints whose text part is a known family: its row, and what stands for "model." and "lm_head" in their names.
TEXT_PARTS: dict[str, tuple[Callable[[Fields], Model], str, str]] = {
    "Qwen3VLMoeForConditionalGeneration": (qwen3_vl_moe, "model.language_model.", "lm_head"),
    "Glm4vMoeForConditionalGeneration": (glm4v_moe, "model.language_model.", "lm_head"),
    "Qwen3_5MoeForConditionalGeneration": (qwen3_5_moe, "model.language_model.", "lm_head"),
    "KimiVLForConditionalGeneration": (kimi_k25, "language_model.model.", "language_model.lm_head"),
    "KimiK25ForConditionalGeneration": (kimi_k25, "language_model.model.", "language_model.lm_head"),
}
BY_TYPE = {row.__name__: name for name, row in FAMILIES.items()} | {"phimoe": "PhiMoEForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM",
                                                                    "hunyuan": "HunYuanMoEV1ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
OUTER = ("image_", "video_", "vision_", "audio_", "media_", "mm_", "projector_", "projection_", "ignore_index", "use_unified_vision_chunk",
         "language_model_only")


def native(config: dict[str, Any]) -> bool:
    """Whether a row here reads this config; what it does not read may be one for the bridge (transformers' code, our experts)."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return config.get("model_type") in BY_TYPE
    return isinstance(names[0], str) and (names[0] in FAMILIES or names[0] in TEXT_PARTS)


def read(config: dict[str, Any]) -> Model:
    """The model that this config.json describes. Raises UnsupportedModel naming the key and the value that are not understood.

    The class name in `architectures` decides; `model_type` only where that is absent, for published ones mislead.
    """
    name = architecture(config)
    if name in TEXT_PARTS:
        row, inside, head = TEXT_PARTS[name]
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise UnsupportedModel(f"config of {name} has no text_config", "its language model is described there")
        outer = Fields(config)
        outer.skip("text_config", *(key for key in config if key.startswith(OUTER)))
        tied = outer.flag("tie_word_embeddings", default=None)
        outer.expect(**{key: text[key] for key in ("vocab_size", "hidden_size") if key in text})          # said twice
        outer.done()
        f = Fields(text if tied is None else text | {"tie_word_embeddings": tied}, "text_config.")
        found = row(f)
        f.done()
        return replace(found, names=under(under(found.names, "model.", inside), "lm_head", head))
    if name not in FAMILIES:
        stems = {known.split("For")[0]: known for known in (*FAMILIES, *TEXT_PARTS)}
        near = [stems[stem] for stem in get_close_matches(name.split("For")[0], stems, 1, 0.6)]
        raise UnsupportedModel(f"config key architectures = {name!r} is not a family that hetero knows",
                               (f"nearest: {near[0]}; " if near else "") + f"supported: {', '.join(sorted([*FAMILIES, *TEXT_PARTS]))}")
    f = Fields(config)
    found = FAMILIES[name](f)
    f.done()
    return found


def architecture(config: dict[str, Any]) -> str:
    """The class name that decides which row reads the config."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in BY_TYPE:
        return BY_TYPE[kind]
    raise UnsupportedModel(f"config has no architectures, and model_type = {kind!r}", f"supported: {', '.join(sorted(BY_TYPE))}")
