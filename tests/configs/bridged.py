"""Published checkpoints that run through the bridge, as facts: their configs' keys in their own spellings, and published counts in billions.

name -> (config, the class that runs it, total, active, how active was counted as in checkpoints.py; None where the publisher's is not met, and why).
"""

from typing import Any

PERIOD = ["sliding_attention"] * 3 + ["full_attention"]
AFMOE: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "attention_dropout": 0.0, "auto_map": {"AutoConfig":
    "configuration_afmoe.AfmoeConfig"}, "dtype": "bfloat16", "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 131072, "moe_intermediate_size":
    256, "mup_enabled": True, "n_group": 1, "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 56, "num_key_value_heads": 2, "num_limited_groups": 1, "num_shared_experts": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
    "sliding_window": 2048, "layer_types": PERIOD * 14, "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 200192,
    "use_grouped_mm": True, "load_balance_coeff": 0.001}
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "dtype":
    "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168, "layer_types":
    ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)], "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2,
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta":
    1000000.0, "routed_scaling_factor": 1.0, "use_cache": True, "use_expert_bias": True, "vocab_size": 65536}
SOLAR: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "hidden_size": 4096, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10240, "moe_intermediate_size": 1280,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "vocab_size": 196608, "max_position_embeddings": 131072, "rope_theta": 1000000, "rope_scaling": {"type": "yarn", "factor": 2.0,
    "original_max_position_embeddings": 65536}, "partial_rotary_factor": 1.0, "attention_bias": False, "use_qk_norm": False, "rms_norm_eps":
    1e-05, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "hidden_act":
    "silu"}
EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 53,
    "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
    "intermediate_size": 18432, "is_moe_layer": [0] + [1] * 47, "layer_types": PERIOD * 12, "max_position_embeddings": 262144, "model_type":
    "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1, "pad_token_id": 0, "rms_norm_eps":
    1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
    "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers":
    1, "vocab_size": 153600}
MIMO: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "torch_dtype": "bfloat16", "num_hidden_layers": 48,
    "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim":
    128, "vocab_size": 152576, "max_position_embeddings": 262144, "rope_theta": 5000000, "layernorm_epsilon": 1e-05, "tie_word_embeddings":
    False, "attention_bias": False, "hidden_act": "silu", "partial_rotary_factor": 0.334, "hybrid_layer_pattern": [0, 1, 1, 1, 1] + [0, 1,
    1, 1, 1, 1] * 7 + [0], "sliding_window_size": 128, "sliding_window": 128, "attention_chunk_size": 128, "swa_rope_theta": 10000,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "add_swa_attention_sink_bias":
    True, "add_full_attention_sink_bias": False, "attention_value_scale": 0.707, "moe_layer_freq": [0] + [1] * 47, "n_routed_experts": 256,
    "n_shared_experts": None, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": None, "scoring_func":
    "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier":
    0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512, "layer_types": ["attention"
    if i in (5, 15, 25, 35) else "mamba" for i in range(40)], "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 100352}
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
    "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False, "max_position_embeddings":
    262144, "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "output_router_logits": False, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": True, "vocab_size": 65536}
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads":
    64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 80, "num_local_experts": 32, "num_experts_per_tok": 2, "vocab_size":
    200064, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "max_position_embeddings": 10240000, "layer_types": (["linear_attention"] * 7 +
    ["full_attention"]) * 10, "tie_word_embeddings": False, "block_size": 256, "full_attn_alpha_factor": 3.5565588200778455,
    "full_attn_beta_factor": 1.0, "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0, "mlp_alpha_factor":
    3.5565588200778455, "mlp_beta_factor": 1.0, "hidden_act": "silu"}

CHECKPOINTS: dict[str, tuple[dict[str, Any], str, float, float | None, str]] = {
    "Trinity-Nano": (AFMOE, "AfmoeForCausalLM", 6, 1, "table"),
    "Trinity-Mini": (AFMOE | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_attention_heads": 32,
                              "num_key_value_heads": 4, "num_hidden_layers": 32, "layer_types": PERIOD * 8}, "AfmoeForCausalLM", 26, 3, "used"),
    "LFM2-8B-A1B": (LFM2, "Lfm2MoeForCausalLM", 8.3, 1.5, "used, cut rather than rounded"),
    "LFM2.5-8B-A1B": ({k: v for k, v in LFM2.items() if k != "rope_theta"} | {
        "vocab_size": 128000, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"}},
        "Lfm2MoeForCausalLM", 8.5, 1.7, "used; published 8.3 / 1.5 are its elder's, whose vocabulary is half"),
    "Solar-Open-100B": (SOLAR, "SolarOpenForCausalLM", 102.7, 12, "table; published 102.6 cuts"),
    "K-EXAONE-236B-A23B": (EXAONE, "ExaoneMoeForCausalLM", 237, 23, "used; published 236 cuts"),
    "MiMo-V2-Flash": (MIMO, "MiMoV2FlashForCausalLM", 309, 15, "used"),
    "MiMo-V2-Flash under its newer name": (MIMO | {"architectures": ["MiMoV2ForCausalLM"]}, "MiMoV2FlashForCausalLM", 309, 15, "used"),
    "Granite-4.0-H-Tiny": (GRANITE, "GraniteMoeHybridForCausalLM", 7, 1, "used"),
    "Granite-4.0-H-Small": (GRANITE | {"hidden_size": 4096, "intermediate_size": 768, "mamba_n_heads": 128, "num_attention_heads": 32,
                                       "num_key_value_heads": 8, "num_experts_per_tok": 10, "num_local_experts": 72, "shared_intermediate_size": 1536,
                                       "logits_scaling": 16}, "GraniteMoeHybridForCausalLM", 32, 9, "used"),
    "Jamba-1.5-Mini": (JAMBA, "JambaForCausalLM", 52, 12, "used"),
    "Jamba-1.5-Large": (JAMBA | {"hidden_size": 8192, "intermediate_size": 24576, "mamba_dt_rank": 512, "num_attention_heads": 64,
                                 "num_hidden_layers": 72}, "JambaForCausalLM", 399, 94, "used; published 398 cuts"),
    "MiniMax-Text-01": (MINIMAX, "MiniMaxForCausalLM", 456, None, "47.5 by every tensor of its shape is written 45.9"),
}
