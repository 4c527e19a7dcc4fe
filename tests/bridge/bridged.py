"""Tiny random models of every class that can be bridged, made by the installed transformers and saved as it saves them."""

import pathlib

import torch
import transformers

from hetero.bridge import known

COMMON = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "num_hidden_layers": 4, "vocab_size": 320, "max_position_embeddings": 512, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
          "moe_num_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2, "moe_topk": 2, "n_shared_experts": 1, "num_shared_experts": 1,
          "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "shared_intermediate_size": 48, "first_k_dense_replace": 1,
          "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 32,
          "n_group": 1, "topk_group": 1, "sliding_window": 16, "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32,
          "unpadded_vocab_size": 320, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_d_state": 16,
          "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_dt_rank": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
          "ssm_state_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config_of(name):
    """A tiny config of this class: its own defaults with every common size made small."""
    kind = known.bridgeable()[name][-1 if name.endswith("CausalLM") else 0]
    made = transformers.CONFIG_MAPPING[kind]
    return shrink(made, name)


def shrink(kind, name):
    plain = kind().to_dict()
    return kind(**small(plain, OWN.get(name, {})))


def small(plain, own):
    out = {}
    for key, value in plain.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "per_layer_config":
            out[key] = small(value, VISION | own.get(key, {}) if "vision" in key or "audio" in key else own.get(key, {}))
        elif key in own:
            out[key] = own[key]
        elif key in ("sub_configs", "layer_types", "mlp_layer_types", "layers_block_type", "rope_parameters", "per_layer_config", "architectures", "dtype", "torch_dtype", "transformers_version"):
            continue
        elif key in COMMON and value is not None:
            out[key] = COMMON[key]
        else:
            out[key] = value
    return out | {k: v for k, v in own.items() if k not in out and not k.endswith("_config")}


VISION = {"num_hidden_layers": 1, "depth": 1, "out_hidden_size": 64, "text_hidden_size": 64, "num_heads": 4, "hidden_size": 64, "intermediate_size": 96,
          "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "encoder_layers": 1, "d_model": 64, "encoder_attention_heads": 4,
          "encoder_ffn_dim": 96, "output_dim": 64}
MLA = {"num_key_value_heads": 4}
KDA = {"num_key_value_heads": 4, "num_experts_per_token": 2, "num_expert_group": 1, "linear_head_dim": 16, "linear_num_heads": 4,
       "layer_types": ["linear_attention", "full_attention"] * 2, "model_max_length": 512}
GEMMA = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48, "hidden_size_per_layer_input": 0,
         "vocab_size_per_layer_input": 320, "layer_types": ["sliding_attention", "full_attention"] * 2}
DOTS = {"num_key_value_heads": 4, "head_dim": 32, "shared_experts_intermediate_size": 48,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2}
GLM5 = {"num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4, "head_dim": 16,
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "index_kpool": 4, "qk_head_dim": 16, "qk_rope_head_dim": 0}
QWEN4 = {"layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_lowrank": 16, "ngram_vocab_size_base": 1000, "ple_embed_dim": 64,
         "split_ngram_parts": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8, "indexer_compress_ratio": 4}
CANNOT = {                               # what this file does not make small: the class's own words when it tries
    "InklingForConditionalGeneration": "its vision part takes 24 GB whatever the config's sizes",
    "Qwen3OmniMoeForConditionalGeneration": "no attribute 'shared_expert_intermediate_size'",
}
OWN = {
    "AXK1ForCausalLM": MLA, "AXK2ForCausalLM": MLA, "DeepseekV32ForCausalLM": MLA, "GlmMoeDsaForCausalLM": MLA, "KimiLinearForCausalLM": KDA,
    "BailingHybridForCausalLM": KDA, "Mistral4ForCausalLM": MLA | {"head_dim": 32}, "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2}, "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LagunaForCausalLM": {"num_attention_heads_per_layer": [4] * 4}, "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "Dots3NoteForCausalLM": DOTS, "Dots3NoteForConditionalGeneration": {"text_config": DOTS, "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
                                          "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
    "Gemma4ForCausalLM": GEMMA, "Gemma4ForConditionalGeneration": {"text_config": GEMMA},
    "Glm5NextForConditionalGeneration": {"text_config": GLM5},
    "Qwen4ExpForCausalLM": QWEN4, "Qwen4ExpForConditionalGeneration": {"text_config": QWEN4},
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config": {"moe_intermediate_size": [48, 24], "rope_parameters": {
        "rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}}},
    "HYV4VLForConditionalGeneration": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}},
    "MistralLarge4ForConditionalGeneration": {"text_config": MLA | {"head_dim": 32, "kv_source_layers": None, "indexer_types": None, "no_rope_layers": None,
                                                            "index_topk": 64}},     # its scores of keys tie at 0,
    "MuseSparkForConditionalGeneration": {k: {"num_hidden_layers": 4} for k in ("vision_config", "audio_config")},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2}},
}


def build(name, seed=0):
    """(config, model in float32, random weights of a size that keeps numbers alive)."""
    torch.manual_seed(seed)
    config = config_of(name)
    config._experts_implementation = "eager"
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() >= 2 and p.is_floating_point():
            p.data.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
    return config, model


def save(model, folder):
    """As transformers saves it: in the published layout."""
    folder = pathlib.Path(folder)
    model.save_pretrained(folder)
    return folder
