"""Published spellings as facts: what checkpoints of the same model, saved by other tools or at other times, write otherwise.

SAME: (a checkpoint of checkpoints.py, the keys that are written otherwise; None removes one): the model is the same one.
OTHER: the same, where the model is another one, and what of it differs. REFUSED: changes that mean other arithmetic, and the words of the refusal.
"""

from typing import Any

GONE = None                      # null in the file is the same as no key
FIVE = {"torch_dtype": GONE, "dtype": "bfloat16", "transformers_version": "5.2.0"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TRAINED = {"use_cache": False, "output_router_logits": True, "router_aux_loss_coef": 0.001, "_name_or_path": "/tmp/run", "unsloth_version": "2025.9.1",
           "unsloth_fixed": True, "pad_token_id": 151643, "model_name": "unsloth/base"}


def inside(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with these keys changed; "text_config.key" changes the nested one."""
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    for key, value in changes.items():
        where, _, last = key.rpartition(".")
        (out[where] if where else out)[last] = value
    return out


SAME: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3-30B-A3B", FIVE | {"rope_theta": GONE, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    ("Qwen3-30B-A3B", FIVE | {"rope_theta": GONE, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "num_experts": GONE,
                              "num_local_experts": 128}),
    ("Qwen3-30B-A3B", TRAINED),
    ("Qwen3-30B-A3B", {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 48}),
    ("Qwen3-30B-A3B", {"quantization_config": BNB | {"_load_in_4bit": True}}),
    ("Qwen3-30B-A3B", {"rope_scaling": {"type": "default"}, "attention_bias": False, "attention_dropout": 0.0}),
    ("Qwen3-30B-A3B", {"rope_scaling": {"rope_type": "default", "rope_theta": 1000000.0}}),
    ("Qwen3-30B-A3B", {"rope_scaling": {}, "sliding_window": 0}),
    ("Qwen1.5-MoE-A2.7B", {"qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "layer_types": ["full_attention"] * 24, "rope_scaling": GONE}),
    ("Qwen1.5-MoE-A2.7B", FIVE | {"rope_theta": GONE, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}),
    ("Mixtral-8x7B", {"_name_or_path": "mistralai/Mixtral-8x7B-v0.1", "output_router_logits": False, "router_jitter_noise": 0.0, "head_dim": GONE}),
    ("Mixtral-8x7B", {"model_type": "mixtral", "head_dim": 128, "rope_theta": 1e6, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
                      "rope_scaling": GONE}),
    ("Mixtral-8x7B", FIVE | {"rope_theta": GONE, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("Mixtral-8x7B", {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}}),
    ("OLMoE-1B-7B", FIVE | {"router_aux_loss_coef": 0.01, "output_router_logits": False, "rope_theta": GONE,
                            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "pad_token_id": 1}),
    ("DeepSeek-V3", FIVE | {"rope_scaling": GONE, "rope_theta": GONE, "head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 10000, "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("DeepSeek-V3", {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                                      "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1}),
    ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
                     "num_nextn_predict_layers": 1}),
    ("DeepSeek-V2-Lite", {"moe_layer_freq": [1] * 27, "topk_method": "greedy"}),
    ("DeepSeek-V2-Lite", FIVE | {"head_dim": 64, "mlp_bias": False}),
    ("Moonlight-16B-A3B", {"model_type": "kimi_k2", "rope_scaling": {"type": "default"}}),
    ("Kimi-K2", {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}),
    ("Kimi-K2", {"architectures": ["KimiK2ForCausalLM"]}),
    ("Kimi-K2.5", {"text_config.architectures": ["DeepseekV3ForCausalLM"], "text_config.model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}}),
    ("GLM-4.5-Air", FIVE | {"rope_theta": GONE, "partial_rotary_factor": GONE, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}}),
    ("GLM-4.5-Air", {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}, "pad_token_id": 151329}),
    ("GLM-4.7-Flash", {"rope_theta": GONE, "rope_interleave": True, "head_dim": 64, "qk_head_dim": 256, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 1.0}, "mlp_layer_types": ["dense"] + ["sparse"] * 46}),
    ("gpt-oss-20b", FIVE | {"rope_theta": GONE, "rope_scaling": GONE, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False}, "experts_per_token": GONE, "initial_context_length": GONE}),
    ("gpt-oss-20b", {"quantization_config": GONE, "torch_dtype": "bfloat16", "unsloth_fixed": True, "pad_token_id": 200017, "attention_dropout": 0.0,
                     "output_router_logits": False, "router_aux_loss_coef": 0.9, "layer_types": GONE}),
    ("MiniMax-M2.5", {"auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"}, "output_router_logits": False,
                      "router_aux_loss_coef": 0.001, "bos_token_id": GONE, "layernorm_full_attention_beta": GONE}),
    ("MiniMax-M2.5", {"rope_theta": GONE, "rotary_dim": GONE, "partial_rotary_factor": GONE, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5}}),
    ("ERNIE-4.5-21B-A3B", {"auto_map": {"AutoModelForCausalLM": "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM"}, "moe_layer_end_index": -1,
                           "rope_scaling": GONE, "head_dim": 128, "output_router_logits": False, "router_aux_loss_coef": 0.001}),
    ("ERNIE-4.5-21B-A3B", {"moe_intermediate_size": [1536] * 28, "moe_capacity": GONE, "rope_theta": GONE,
                           "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
    ("Hunyuan-A13B", {"model_type": "hunyuan_v1_moe", "moe_intermediate_size": 3072, "moe_topk": 8, "num_shared_expert": 1, "head_dim": 128,
                      "attention_head_dim": 128, "router_aux_loss_coef": 0.001, "eod_token_id": 127960, "sep_token_id": 127962, "pad_id": -1}),
    ("Hunyuan-A13B", {"rope_theta": GONE, "rope_scaling": GONE, "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}}),
    ("dots.llm1", {"auto_map": {"AutoConfig": "configuration_dots1.Dots1Config"}, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
                   "scoring_func": "sigmoid", "max_window_layers": 62, "layer_types": ["full_attention"] * 62, "use_sliding_window": False}),
    ("Granite-3.1-1B-A400M", FIVE | {"rope_theta": GONE, "rope_parameters": {"rope_theta": 1500000.0, "rope_type": "default"}, "mlp_bias": False,
                                     "output_router_logits": False, "router_aux_loss_coef": 0.0}),
    ("Phi-3.5-MoE", {"architectures": ["PhimoeForCausalLM"], "rope_theta": GONE, "rope_scaling": GONE, "original_max_position_embeddings": GONE,
                     "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
                                         "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096}}),
    ("Qwen3-Next-80B-A3B", FIVE | {"rope_theta": GONE, "partial_rotary_factor": GONE, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}),
    ("Qwen3-Next-80B-A3B", {"output_router_logits": False, "router_aux_loss_coef": 0.001, "attention_bias": False, "head_dim": 256,
                            "linear_conv_kernel_dim": 4, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
    ("Qwen3.5-35B-A3B", {"text_config.dtype": "bfloat16", "vision_start_token_id": 248053, "vision_end_token_id": 248054, "video_token_id": 248057,
                         "text_config.full_attention_interval": 4, "language_model_only": False}),
    ("Qwen3-VL-30B-A3B", {"text_config.dtype": "bfloat16", "vision_start_token_id": 151652, "vision_end_token_id": 151653, "transformers_version": "4.57.0.dev0",
                          "text_config.bos_token_id": 151643, "text_config.use_cache": True, "text_config.pad_token_id": GONE}),
    ("Ling-lite", {"auto_map": {"AutoConfig": "configuration_bailing_moe.BailingMoeConfig"}, "num_kv_heads_per_layer": GONE, "head_dim": 128,
                   "moe_router_topk_scaling_factor": GONE, "use_cache": True, "pretraining_tp": 1, "max_window_layers": 28, "output_router_logits": False}),
]

# changed keys -> (what of the model, its value)
OTHER: list[tuple[str, dict[str, Any], str, Any]] = [
    ("Qwen3-30B-A3B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, "layers.0.attention.rope.scaling.kind", "yarn"),
    ("Qwen3-30B-A3B", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.0}},
     "layers.0.attention.rope.scaling.kind", "yarn"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0, 47]}, "moe_layers", tuple(range(1, 47))),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "moe_layers", tuple(range(1, 48, 2))),
    ("Mixtral-8x7B", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "layers.0.attention.rope.scaling.kind", "linear"),
    ("Mixtral-8x7B", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 8192}}, "layers.0.attention.rope.scaling.kind", "llama3"),
    ("Mixtral-8x7B", {"sliding_window": 4096}, "layers.0.attention.window", 4096),
    ("GLM-4.5", {"first_k_dense_replace": 0}, "moe_layers", tuple(range(92))),
    ("gpt-oss-20b", {"sliding_window": 64}, "layers.0.attention.window", 64),
    ("Kimi-K2.5", {"text_config.first_k_dense_replace": 2}, "moe_layers", tuple(range(2, 61))),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen3-30B-A3B", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    ("Qwen3-30B-A3B", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size"),
    ("Qwen3-30B-A3B", {"hidden_act": "mish"}, "hidden_act"),
    ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func"),
    ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("DeepSeek-V3", {"index_topk": 2048}, "index_topk"),
    ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
    ("MiniMax-M2.5", {"attn_type_list": [0, 1] * 31}, "attn_type_list"),
    ("MiniMax-M2.5", {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
    ("ERNIE-4.5-21B-A3B", {"moe_gate": "top2_fused"}, "moe_gate"),
    ("Hunyuan-A13B", {"use_cla": True}, "use_cla"),
    ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "moe_topk"),
    ("Granite-3.1-1B-A400M", {"position_embedding_type": "nope"}, "position_embedding_type"),
    ("Qwen3-Next-80B-A3B", {"layer_types": ["mamba"] * 48}, "layer_types"),
    ("Ling-lite", {"use_qk_norm": True}, "use_qk_norm"),
    ("Phi-3.5-MoE", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ("Ling-mini-2.0", {"partial_rotary_factor": GONE}, "partial_rotary_factor"),
    ("Ling-mini-2.0", {"n_group": GONE}, "n_group"),
    ("Kimi-VL-A3B", {"vocab_size": 163839}, "vocab_size"),
    ("Ling-mini-2.0", {"score_function": "softmax"}, "score_function"),
]
