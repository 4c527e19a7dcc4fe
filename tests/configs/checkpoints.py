"""Published checkpoints as facts: the shape-giving keys of their configs in their own spellings, and published parameter counts in billions.

Counts are (total, active) as their publishers round them; `counted` says how active was counted: "used" leaves the looked-up embedding table out,
"table" counts it, and a word of explanation stands where a published number is not the rounding of either.
"""

from typing import Any

YARN40 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def _qwen3(hidden: int, inter: int, moe: int, heads: int, layers: int, context: int, theta: float, **more: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": inter, "moe_intermediate_size": moe,
            "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": layers, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": theta,
            "rope_scaling": None, "max_position_embeddings": context, "max_window_layers": layers, "sliding_window": None, "use_sliding_window": False,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151645} | more


def _qwen2(hidden: int, inter: int, moe: int, shared: int, heads: int, kv: int, layers: int, experts: int, k: int, context: int, **more: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": hidden, "intermediate_size": inter, "moe_intermediate_size": moe,
            "shared_expert_intermediate_size": shared, "num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": layers, "num_experts": experts,
            "num_experts_per_tok": k, "norm_topk_prob": False, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": context, "max_window_layers": 21, "sliding_window": 4096, "use_sliding_window": False, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151643} | more


def _deepseek(**more: Any) -> dict[str, Any]:
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000,
            "rope_scaling": YARN40 | {"mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 163840, "attention_bias": False, "ep_size": 1,
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}} | more


def _kimi(**more: Any) -> dict[str, Any]:
    return _deepseek(num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827,
                     first_k_dense_replace=1, vocab_size=163840, rope_theta=50000.0, num_nextn_predict_layers=0, aux_loss_alpha=0.001, seq_aux=True,
                     rope_scaling={"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                                   "mscale_all_dim": 1.0}, max_position_embeddings=131072, eos_token_id=163585) | more


def _v2(**more: Any) -> dict[str, Any]:
    return {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400, "rms_norm_eps": 1e-6, "rope_theta": 10000,
            "rope_scaling": YARN40 | {"mscale": 0.707, "mscale_all_dim": 0.707}, "max_position_embeddings": 163840, "attention_bias": False,
            "aux_loss_alpha": 0.001, "seq_aux": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu"} | more


def _glm(hidden: int, inter: int, moe: int, layers: int, experts: int, dense: int, scale: float, qk_norm: bool, **more: Any) -> dict[str, Any]:
    return {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": hidden, "intermediate_size": inter, "moe_intermediate_size": moe,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": layers, "n_routed_experts": experts,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": scale,
            "first_k_dense_replace": dense, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": qk_norm, "vocab_size": 151552,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": [151329, 151336, 151338]} | more


def _mixtral(hidden: int, inter: int, heads: int, layers: int, context: int, theta: float) -> dict[str, Any]:
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": inter, "num_attention_heads": heads,
            "num_key_value_heads": 8, "num_hidden_layers": layers, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5,
            "rope_theta": theta, "max_position_embeddings": context, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "hidden_act": "silu", "router_aux_loss_coef": 0.02}


def _granite(hidden: int, heads: int, layers: int, experts: int, vocab: int, context: int, theta: float, **more: Any) -> dict[str, Any]:
    return {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_size": hidden, "intermediate_size": 512, "num_attention_heads": heads,
            "num_key_value_heads": 8, "num_hidden_layers": layers, "num_local_experts": experts, "num_experts_per_tok": 8, "vocab_size": vocab,
            "rms_norm_eps": 1e-6, "rope_theta": theta, "rope_scaling": None, "max_position_embeddings": context, "attention_bias": False,
            "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22, "tie_word_embeddings": True} | more


def _oss(layers: int, experts: int) -> dict[str, Any]:
    return {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": layers, "num_local_experts": experts, "num_experts_per_tok": 4, "experts_per_token": 4,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
            "rms_norm_eps": 1e-5, "rope_theta": 150000, "initial_context_length": 4096, "max_position_embeddings": 131072, "attention_bias": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 200002, "quantization_config": {"quant_method": "mxfp4"}}


def _minimax(**more: Any) -> dict[str, Any]:
    return {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200064,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "tie_word_embeddings": False, "use_mtp": True, "num_mtp_modules": 3,
            "mtp_transformer_layers": 1, "hidden_act": "silu", "router_jitter_noise": 0.0} | more


def _ling(hidden: int, inter: int, moe: int, heads: int, kv: int, layers: int, shared: int, k: int, **more: Any) -> dict[str, Any]:
    return {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "hidden_size": hidden, "intermediate_size": inter,
            "moe_intermediate_size": moe, "num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": layers, "num_experts": 64,
            "num_shared_experts": shared, "num_experts_per_tok": k, "norm_topk_prob": True, "first_k_dense_replace": 0, "vocab_size": 126464,
            "rms_norm_eps": 1e-6, "rope_theta": 600000, "rope_scaling": None, "max_position_embeddings": 16384, "use_bias": False, "use_qkv_bias": False,
            "norm_head": True, "norm_softmax": False, "embedding_dropout": 0.0, "output_dropout": 0.0, "tie_word_embeddings": False, "hidden_act": "silu"} | more


def _ling2(hidden: int, inter: int, moe: int, heads: int, kv: int, layers: int, dense: int, **more: Any) -> dict[str, Any]:
    return {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "hidden_size": hidden, "intermediate_size": inter,
            "moe_intermediate_size": moe, "moe_shared_expert_intermediate_size": moe, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 128,
            "num_hidden_layers": layers, "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32",
            "first_k_dense_replace": dense, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_bias": False, "use_qkv_bias": False, "use_rmsnorm": True,
            "vocab_size": 157184, "rms_norm_eps": 1e-6, "rope_theta": 600000, "rope_scaling": None, "max_position_embeddings": 32768,
            "embedding_dropout": 0.0, "output_dropout": 0.0, "max_window_layers": 20, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "hidden_act": "silu", "num_nextn_predict_layers": 0, "mtp_loss_scaling_factor": 0} | more


QWEN_TEXT = {k: v for k, v in _qwen3(2048, 6144, 768, 32, 48, 262144, 5000000).items() if k not in ("architectures", "tie_word_embeddings", "max_window_layers",
                                                                                                     "sliding_window", "use_sliding_window")}
LEFTOVERS = {"add_cross_attention": False, "is_decoder": False, "is_encoder_decoder": False, "pruned_heads": {}, "torchscript": False, "top_k": 50, "num_beams": 1,
             "return_dict": True, "id2label": {"0": "LABEL_0"}, "tie_encoder_decoder": False, "problem_type": None}

def _next(family: str, hidden: int, layers: int, experts: int, k: int, width: int, heads: int, kv: int, value_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"architectures": [family], "hidden_size": hidden, "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": k,
            "moe_intermediate_size": width, "shared_expert_intermediate_size": width, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": vocab, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "hidden_act": "silu"} | more


QWEN35 = {k: v for k, v in _next("", 2048, 40, 256, 8, 512, 16, 2, 32, 248320, attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32",
                                 mtp_use_dedicated_embeddings=False, attention_bias=False, mlp_only_layers=[], rope_parameters={
                                     "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                                     "mrope_interleaved": True}).items() if k != "architectures"}

# name -> (config, total, active, how active was counted)
CHECKPOINTS: dict[str, tuple[dict[str, Any], float, float, str]] = {
    "Qwen1.5-MoE-A2.7B": (_qwen2(2048, 5632, 1408, 5632, 16, 16, 24, 60, 4, 8192, expert_interval=1), 14.3, 2.7, "table"),
    "Qwen1.5-MoE-A2.7B-Chat": (_qwen2(2048, 5632, 1408, 5632, 16, 16, 24, 60, 4, 32768, decoder_sparse_step=1), 14.3, 2.7, "table"),
    "Qwen2-57B-A14B": (_qwen2(3584, 20480, 2560, 20480, 28, 4, 28, 64, 8, 131072, decoder_sparse_step=1), 57, 14, "used"),
    "Qwen3-30B-A3B": (_qwen3(2048, 6144, 768, 32, 48, 40960, 1000000.0), 30.5, 3.3, "table, cut rather than rounded"),
    "Qwen3-30B-A3B-Instruct-2507": (_qwen3(2048, 6144, 768, 32, 48, 262144, 10000000), 30.5, 3.3, "table, cut rather than rounded"),
    "Qwen3-Coder-30B-A3B": (_qwen3(2048, 5472, 768, 32, 48, 262144, 10000000, qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True), 30.5, 3.3,
                            "table, cut rather than rounded"),
    "Qwen3-235B-A22B": (_qwen3(4096, 12288, 1536, 64, 94, 40960, 1000000.0), 235, 22, "used"),
    "Qwen3-VL-30B-A3B": ({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 151655,
                          "video_token_id": 151656, "vision_config": {"depth": 27}, "tie_word_embeddings": False,
                          "text_config": QWEN_TEXT | {"model_type": "qwen3_vl_moe_text",
                                                      "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}},
                         30, 3, "used; total is 30.5"),
    "Mixtral-8x7B": (_mixtral(4096, 14336, 32, 32, 32768, 1000000.0), 46.7, 12.9, "table"),
    "Mixtral-8x22B": (_mixtral(6144, 16384, 48, 56, 65536, 1000000), 141, 39, "used"),
    "OLMoE-1B-7B": ({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
                     "num_key_value_heads": 16, "num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "vocab_size": 50304,
                     "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "clip_qkv": None, "attention_bias": False, "max_position_embeddings": 4096,
                     "tie_word_embeddings": False, "hidden_act": "silu"}, 6.9, 1.3, "table"),
    "DeepSeek-MoE-16B": ({"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944,
                          "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 28, "n_routed_experts": 64,
                          "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1,
                          "first_k_dense_replace": 1, "vocab_size": 102400, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None,
                          "max_position_embeddings": 4096, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}, 16.4, 2.8, "table"),
    "DeepSeek-V2-Lite": (_v2(), 15.7, 2.4, "used, cut rather than rounded"),
    "DeepSeek-V2": (_v2(hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, num_attention_heads=128, num_key_value_heads=128,
                        num_hidden_layers=60, n_routed_experts=160, topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0,
                        q_lora_rank=1536), 236, 21, "used"),
    "DeepSeek-V3": (_deepseek(), 671, 37, "used"),
    "DeepSeek-R1": (_deepseek(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}), 671, 37, "used"),
    "DeepSeek-V3.1": (_deepseek(quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0"}), 671, 37, "used"),
    "Moonlight-16B-A3B": (_deepseek(hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16,
                                    num_hidden_layers=27, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
                                    routed_scaling_factor=2.446, first_k_dense_replace=1, q_lora_rank=None, vocab_size=163840, rope_theta=50000.0,
                                    rope_scaling=None, max_position_embeddings=8192, num_nextn_predict_layers=0), 16, 3, "table"),
    "Kimi-K2": (_kimi(model_type="kimi_k2"), 1026, 32, "used"),
    "Kimi-K2.5": ({"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "media_placeholder_token_id": 163605, "ignore_index": -100,
                   "use_unified_vision_chunk": True, "video_placeholder": "<|video|>", "vision_config": {}, "tie_word_embeddings": False, "dtype": "bfloat16",
                   "text_config": {k: v for k, v in _kimi(max_position_embeddings=262144, rms_norm_eps=1e-5).items() if k != "architectures"} | LEFTOVERS},
                  1026, 32, "used"),
    "Kimi-K2.7-Code": ({"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "eos_token_id": 163586, "vision_config": {},
                        "text_config": {k: v for k, v in _kimi().items() if k not in ("architectures", "rope_scaling")} | LEFTOVERS
                        | {"rope_parameters": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                                               "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 50000.0, "type": "yarn"}}}, 1026, 32, "used"),
    "GLM-4.5": (_glm(5120, 12288, 1536, 92, 160, 3, 2.5, True), 353, 33, "used; published 355 / 32 counts the prediction layer and cuts"),
    "GLM-4.5-Air": (_glm(4096, 10944, 1408, 46, 128, 1, 1.0, False), 107, 13, "used; published 106 / 12 cuts"),
    "GLM-4.7-Flash": ({"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
                       "moe_intermediate_size": 1536, "num_attention_heads": 20, "num_key_value_heads": 20, "num_hidden_layers": 47, "n_routed_experts": 64,
                       "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
                       "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
                       "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None,
                       "partial_rotary_factor": 1.0, "max_position_embeddings": 202752, "num_nextn_predict_layers": 1, "attention_bias": False,
                       "tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu"}, 29.9, 3.6, "used; 31.2 with the prediction layer"),
    "gpt-oss-20b": (_oss(24, 32), 20.9, 3.6, "used"),
    "gpt-oss-120b": (_oss(36, 128), 116.8, 5.1, "used"),
    "MiniMax-M2": (_minimax(rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}), 229, 10, "used; published 230"),
    "MiniMax-M2.5": (_minimax(rope_theta=5000000, partial_rotary_factor=0.5, rotary_dim=64, qk_norm_type="per_layer", use_qk_norm=True, use_routing_bias=True,
                              scoring_func="sigmoid", attn_type_list=[1] * 62, shared_intermediate_size=0, sliding_window=None), 229, 10, "used; published 230"),
    "dots.llm1": ({"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                   "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 62, "n_routed_experts": 128, "n_shared_experts": 2,
                   "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "moe_layer_freq": 1,
                   "first_k_dense_replace": 1, "vocab_size": 152064, "rms_norm_eps": 1e-5, "rope_theta": 10000000, "rope_scaling": None,
                   "max_position_embeddings": 32768, "sliding_window": None, "use_sliding_window": False, "attention_bias": False, "tie_word_embeddings": False,
                   "hidden_act": "silu"}, 143, 14, "table; published 142 cuts"),
    "ERNIE-4.5-21B-A3B": ({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
                           "moe_intermediate_size": 1536, "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28, "moe_num_experts": 64,
                           "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1,
                           "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "vocab_size": 103424, "rms_norm_eps": 1e-5,
                           "rope_theta": 500000.0, "max_position_embeddings": 131072, "use_bias": False, "tie_word_embeddings": True, "hidden_act": "silu"},
                          21.8, 3.4, "used; published 21 / 3 leaves embeddings out"),
    "Hunyuan-A13B": ({"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan", "hidden_size": 4096, "intermediate_size": 3072,
                      "moe_intermediate_size": [3072] * 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
                      "num_hidden_layers": 32, "num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True,
                      "norm_topk_prob": True, "norm_type": "rms", "use_cla": False, "cla_share_factor": 2, "use_mla": False, "use_qk_norm": True,
                      "use_rotary_pos_emb": True, "group_limited_greedy": False, "moe_layer_num_skipped": 0, "vocab_size": 128167, "rms_norm_eps": 1e-5,
                      "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                                              "mscale_all_dim": 1.0}, "max_position_embeddings": 32768, "attention_bias": False,
                      "mlp_bias": False, "vit_type": None, "im_start_id": 5, "image_token_id": 9, "dense_list": [4096, 0], "tie_word_embeddings": True,
                      "hidden_act": "silu"}, 80, 13, "used"),
    "Granite-3.0-1B-A400M": (_granite(1024, 16, 24, 32, 49152, 4096, 10000), 1.3, 0.4, "used"),
    "Granite-3.0-3B-A800M": (_granite(1536, 24, 32, 40, 49155, 4096, 10000, torch_dtype="bfloat16"), 3.3, 0.9, "used"),
    "Granite-3.1-1B-A400M": (_granite(1024, 16, 24, 32, 49155, 131072, 1500000.0), 1.3, 0.4, "used"),
    "Phi-3.5-MoE": ({"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "num_hidden_layers": 32, "num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 32064,
                     "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                     "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.243163121016122,
                                      "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096}, "sliding_window": 131072,
                     "attention_bias": True, "lm_head_bias": True, "input_jitter_noise": 0.01, "router_jitter_noise": 0.01, "hidden_dropout": 0.0,
                     "tie_word_embeddings": False, "hidden_act": "silu"}, 41.9, 6.6, "table"),
    "Qwen3-Next-80B-A3B": (_next("Qwen3NextForCausalLM", 2048, 48, 512, 10, 512, 16, 2, 32, 151936, model_type="qwen3_next", decoder_sparse_step=1,
                                 mlp_only_layers=[], norm_topk_prob=True, intermediate_size=5120, partial_rotary_factor=0.25, rope_theta=10000000,
                                 rope_scaling=None, tie_word_embeddings=False, use_sliding_window=False), 80, 3, "used, cut rather than rounded"),
    "Qwen3.5-35B-A3B": ({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 248056, "vision_config": {},
                         "tie_word_embeddings": False, "text_config": QWEN35 | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10}},
                        35, 3, "used"),
    "Qwen3.8-2.4T-A95B": (_next("Qwen3_5MoeForCausalLM", 8192, 92, 512, 10, 2048, 64, 4, 128, 248320, model_type="qwen3_5_moe_text", attn_output_gate=True,
                                output_gate_type="swish", mtp_num_hidden_layers=1, mamba_ssm_dtype="float32", partial_rotary_factor=0.25,
                                rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, tie_word_embeddings=False,
                                pad_token_id=None), 2420, 95, "table; published 2.4T"),
    "Ling-lite": (_ling(2048, 5632, 1408, 16, 4, 28, 2, 6), 16.8, 2.75, "table"),
    "Ling-mini-2.0": (_ling2(2048, 5120, 512, 16, 4, 20, 1), 16, 1.4, "table; total is 16.3"),
    "Ling-flash-2.0": (_ling2(4096, 9216, 1024, 32, 4, 32, 1), 103, 6.1, "table, cut rather than rounded; published 100"),
    "Kimi-VL-A3B": ({"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "media_placeholder_token_id": 163605, "ignore_index": -100,
                     "pad_token_id": 0, "vocab_size": 163840, "vision_config": {}, "torch_dtype": "bfloat16",
                     "text_config": {k: v for k, v in _deepseek(
                         hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16,
                         num_hidden_layers=27, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
                         routed_scaling_factor=2.446, first_k_dense_replace=1, q_lora_rank=None, vocab_size=163840, rope_theta=800000.0, rope_scaling=None,
                         max_position_embeddings=131072, num_nextn_predict_layers=0).items() if k != "architectures"}}, 16, 3, "table"),
    "Ling-plus": (_ling(5376, 12288, 3072, 56, 8, 88, 1, 4), 291, 29, "table; published 290 / 28.8"),
}
