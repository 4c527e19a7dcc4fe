"""Makes tiny random models with transformers, one per family, as checkpoint folders; knows nothing of hetero.

`save(family, folder, dtype)` writes config.json and model.safetensors as transformers would publish them; `logits(folder, ids)` is its answer.
Weights are drawn so that routing, norms, biases and sinks all matter: no gain is 1, no bias 0, and router scores are far apart.
"""

import functools
import json
import pathlib
import warnings
from typing import Any

import torch
import transformers as T

COMMON = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128}
V3 = {"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
      "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
SPECIAL = {"pad_token_id": 1, "eos_token_id": 2}
HYBRID = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
          "linear_conv_kernel_dim": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0], "short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 64}


def configs() -> dict[str, Any]:
    """family -> transformers config, not yet made (a config class warns when it is made)."""
    def c(cls: str, **more: Any) -> Any:
        return functools.partial(getattr(T, cls), **COMMON | more)

    return {
        "qwen2_moe": c("Qwen2MoeConfig", num_key_value_heads=2, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48,
                       num_experts=8, num_experts_per_tok=2, mlp_only_layers=[0]),
        "qwen3_moe": c("Qwen3MoeConfig", num_key_value_heads=2, head_dim=32, intermediate_size=96, moe_intermediate_size=32, num_experts=8,
                       num_experts_per_tok=2, norm_topk_prob=True),
        "qwen3_moe_tied": c("Qwen3MoeConfig", num_key_value_heads=1, head_dim=32, intermediate_size=96, moe_intermediate_size=32, num_experts=8,
                            num_experts_per_tok=3, norm_topk_prob=False, tie_word_embeddings=True, attention_bias=True, decoder_sparse_step=2),
        "mixtral": c("MixtralConfig", num_key_value_heads=2, intermediate_size=32, **EIGHT),
        "mixtral_window": c("MixtralConfig", num_key_value_heads=2, intermediate_size=32, sliding_window=8, **EIGHT),
        "olmoe": c("OlmoeConfig", num_key_value_heads=4, intermediate_size=32, num_experts=8, num_experts_per_tok=2, clip_qkv=0.5, **SPECIAL),
        "flex_olmo": c("FlexOlmoConfig", num_key_value_heads=4, intermediate_size=32, num_experts=8, num_experts_per_tok=2, **SPECIAL),
        "deepseek_v2": c("DeepseekV2Config", **V3, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None, topk_method="group_limited_greedy",
                         n_group=4, topk_group=2, routed_scaling_factor=1.5, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
        "deepseek_v3": c("DeepseekV3Config", **V3, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, n_group=4, topk_group=2,
                         rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        "glm4_moe": c("Glm4MoeConfig", num_key_value_heads=2, head_dim=32, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8,
                      num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True, n_group=1, topk_group=1,
                      routed_scaling_factor=1.2),
        "glm4_moe_lite": c("Glm4MoeLiteConfig", **V3, q_lora_rank=24),
        "gpt_oss": c("GptOssConfig", num_key_value_heads=2, head_dim=32, intermediate_size=32, sliding_window=8, pad_token_id=1, **EIGHT),
        "minimax_m2": c("MiniMaxM2Config", num_key_value_heads=2, head_dim=32, intermediate_size=32, rotary_dim=16,
                        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},     # 5.17 does not read rotary_dim
                        **SPECIAL | {"bos_token_id": 3}, **EIGHT),
        "dots1": c("Dots1Config", num_key_value_heads=2, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
                   n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5),
        "ernie4_5_moe": c("Ernie4_5_MoeConfig", num_key_value_heads=2, intermediate_size=96, moe_intermediate_size=32, moe_num_experts=8, moe_k=2,
                          moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=3),
        "hunyuan_v1_moe": c("HunYuanMoEV1Config", num_key_value_heads=2, head_dim=32, intermediate_size=32, num_experts=8, moe_topk=2,
                            rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}, **SPECIAL),
        "granitemoe": c("GraniteMoeConfig", num_key_value_heads=2, intermediate_size=32, embedding_multiplier=3.0, logits_scaling=2.0,
                        residual_multiplier=0.5, attention_multiplier=0.2, tie_word_embeddings=True, **EIGHT),
        "granitemoeshared": c("GraniteMoeSharedConfig", num_key_value_heads=2, intermediate_size=32, shared_intermediate_size=48, embedding_multiplier=3.0,
                              logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2, **EIGHT),
        "qwen3_next": c("Qwen3NextConfig", **HYBRID, decoder_sparse_step=1, intermediate_size=96),
        "qwen3_5_moe": c("Qwen3_5MoeTextConfig", **HYBRID),
        "phimoe": c("PhimoeConfig", num_key_value_heads=2, intermediate_size=32, attention_bias=True, lm_head_bias=True, sliding_window=128,
                    rope_parameters=LONG, **EIGHT),
    }


def names() -> list[str]:
    return list(configs())


def build(config: Any) -> Any:
    """A float32 model with random weights under a fixed seed."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(1)
    for name, p in [*model.named_parameters(), *((k, b) for k, b in model.named_buffers() if "inv_freq" not in k and b.is_floating_point())]:
        shifted = "qwen3_next" in config.model_type or "qwen3_5" in config.model_type             # whose norms are stored less one
        gain = 1.0 if "norm" in name and not name.endswith("bias") and not (shifted and "linear_attn" not in name) else 0.0
        p.data.copy_(torch.randn(p.shape, generator=draw) * (0.2 if p.ndim > 1 else 0.3) + gain)
    return model


def save(family: str, folder: pathlib.Path | str, dtype: torch.dtype = torch.float32) -> pathlib.Path:
    """Writes the tiny model of `family` as config.json and model.safetensors; returns the folder."""
    folder = pathlib.Path(folder)
    T.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(configs()[family]()).to(dtype).save_pretrained(folder)
    return folder


def logits(folder: pathlib.Path | str, ids: list[int]) -> torch.Tensor:
    """transformers' own logits for the saved model, [T, V] float32, eager attention."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = T.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        return model(torch.tensor([ids])).logits[0].float()


def config(folder: pathlib.Path | str) -> dict[str, Any]:
    return json.loads((pathlib.Path(folder) / "config.json").read_text())
