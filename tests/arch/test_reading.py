"""Reading configs: every key is accounted for, spellings old and new mean the same, and what is not understood is refused by key and value."""

import json

import pytest
from hypothesis import given, settings, strategies

from hetero.arch import families, tensors
from hetero.arch.spec import GQA, MLA, Dense, MoE
from hetero.errors import UnsupportedModel

QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "vocab_size": 256,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False, "hidden_act": "silu"}
V3 = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
      "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
      "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "vocab_size": 256, "rms_norm_eps": 1e-6}
OSS = {"architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
       "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "vocab_size": 256}


@pytest.mark.parametrize(("config", "change", "words"), [
    (QWEN3, {"attention_chunk_size": 512}, ["attention_chunk_size = 512", "no known meaning"]),
    (QWEN3, {"hidden_act": "tanh"}, ["hidden_act = 'tanh'", "silu"]),
    (QWEN3, {"use_sliding_window": True}, ["use_sliding_window = True"]),
    (QWEN3, {"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "to 8"]),
    (QWEN3, {"num_key_value_heads": 3}, ["num_key_value_heads = 3", "a divisor"]),
    (QWEN3, {"hidden_size": "64"}, ["hidden_size = '64'", "a whole number"]),
    (QWEN3, {"hidden_size": None}, ["no hidden_size"]),
    (QWEN3, {"hidden_size": 1 << 40}, ["hidden_size"]),
    (QWEN3, {"rms_norm_eps": float("inf")}, ["rms_norm_eps = inf", "finite"]),
    (QWEN3, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings = 'yes'", "true or false"]),
    (V3, {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
    (QWEN3, {"is_encoder_decoder": True}, ["is_encoder_decoder = True"]),
    (QWEN3, {"mlp_only_layers": "none"}, ["mlp_only_layers"]),
    (QWEN3, {"nrom_topk_prob": True}, ["nrom_topk_prob", "misspelt norm_topk_prob?"]),
    (QWEN3, {"shared_expert_intermediate_size": 64}, ["shared_expert_intermediate_size = 64"]),
    (V3, {"topk_method": "greedy"}, ["topk_method = 'greedy'", "noaux_tc"]),
    (V3, {"scoring_func": "softmax"}, ["scoring_func = 'softmax'"]),
    (V3, {"attention_bias": True}, ["attention_bias = True"]),
    (V3, {"n_group": 3}, ["n_group = 3", "8 experts"]),
    (V3, {"moe_layer_freq": 2}, ["moe_layer_freq = 2"]),
    (V3, {"mlp_bias": True}, ["mlp_bias"]),
    (OSS, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ["layer_types = 'chunked_attention'", "sliding_attention"]),
    (OSS, {"layer_types": ["full_attention"]}, ["layer_types", "3 words"]),
    ({"architectures": ["FooForCausalLM"]}, {}, ["architectures = 'FooForCausalLM'", "supported:"]),
    ({"architectures": ["Qwen3MoEForCausalLM"]}, {}, ["nearest: Qwen3MoeForCausalLM"]),
    ({"architectures": ["DeepseekV4ForCausalLM"]}, {}, ["architectures = 'DeepseekV4ForCausalLM'"]),
    ({"model_type": "foo"}, {}, ["no architectures", "model_type = 'foo'"]),
    ({"architectures": ["KimiK25ForConditionalGeneration"]}, {}, ["no text_config"]),
    ({"architectures": ["KimiK25ForConditionalGeneration"], "fusion": 3, "text_config": V3}, {}, ["fusion = 3"]),
    ({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": V3 | {"scoring_func": "tanh"}}, {}, ["text_config.scoring_func"]),
    ({}, {}, ["no architectures"]),
])
def test_what_is_not_understood_is_refused_by_key_and_value(config, change, words):
    with pytest.raises(UnsupportedModel) as e:
        families.read(config | change)
    assert all(word in str(e.value) for word in words), str(e.value)
    assert "\n" not in e.value.message and e.value.hint


def test_the_class_name_decides_where_the_model_type_misleads():
    assert families.read(V3 | {"model_type": "kimi_k2"}).family == "deepseek_v3"
    assert families.read(QWEN3 | {"model_type": "mixtral"}).family == "qwen3_moe"
    assert families.read({k: v for k, v in QWEN3.items() if k != "architectures"} | {"model_type": "qwen3_moe"}).family == "qwen3_moe"


def test_old_and_new_spellings_mean_the_same():
    old = families.read(QWEN3 | {"torch_dtype": "bfloat16", "rope_scaling": None, "use_cache": True, "transformers_version": "4.51.0"})
    new = families.read({k: v for k, v in QWEN3.items() if k != "rope_theta"} | {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    assert old == new
    assert families.read({k: v for k, v in V3.items() if k != "num_experts_per_tok"} | {"num_experts_per_token": 2}) == families.read(V3)


def test_training_and_generation_leftovers_change_nothing():
    left = {"_name_or_path": "x", "auto_map": {}, "temperature": 0.6, "top_k": 50, "pruned_heads": {}, "id2label": {"0": "a"}, "ep_size": 1, "pretraining_tp": 1,
            "aux_loss_alpha": 0.1, "seq_aux": True, "add_cross_attention": False, "quantization_config": {"quant_method": "fp8"}, "bos_token_id": None,
            "num_nextn_predict_layers": 1, "sliding_window": None, "what_is_null_is_absent": None, "layer_types": ["full_attention"] * 4}
    assert families.read(V3 | left) == families.read(V3)


def test_lists_with_one_value_for_every_layer_count_as_that_value_and_others_are_refused():
    hunyuan = {"architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
               "num_experts": 8, "moe_topk": [2, 2], "num_shared_expert": [1, 1], "moe_intermediate_size": [32, 32], "vocab_size": 256}
    assert families.read(hunyuan).layers[0].ffn.router.top_k == 2
    with pytest.raises(UnsupportedModel, match="moe_topk"):
        families.read(hunyuan | {"moe_topk": [2, 4]})


def test_infinity_in_json_is_read_and_refused_where_a_number_is_needed():
    config = json.loads(json.dumps(QWEN3).replace("1e-06", "Infinity"))
    with pytest.raises(UnsupportedModel, match="rms_norm_eps = inf"):
        families.read(config)


@pytest.mark.parametrize(("outer", "inner", "tied"), [(None, None, False), (True, None, True), (None, True, True), (False, True, False), (True, False, True)])
def test_embeddings_of_multimodal_checkpoints_are_tied_as_the_outer_config_says_else_the_inner(outer, inner, tied):
    text = {k: v for k, v in V3.items() if k != "architectures"} | ({} if inner is None else {"tie_word_embeddings": inner})
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text} | ({} if outer is None else {"tie_word_embeddings": outer})
    model = families.read(config)
    assert model.tied is tied
    keys = {t.key: t.name for t in tensors.of(model)}
    assert ("head" in keys) is not tied
    assert keys["embed"] == "language_model.model.embed_tokens.weight" and keys["attn.kv_b"].startswith("language_model.model.layers.")
    assert tied or keys["head"] == "language_model.lm_head.weight"


def test_dense_and_sparse_layers_follow_each_familys_own_rule():
    kinds = [type(layer.ffn) for layer in families.read(V3).layers]
    assert kinds == [Dense, MoE, MoE, MoE]
    kinds = [type(layer.ffn) for layer in families.read(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).layers]
    assert kinds == [Dense, Dense, Dense, MoE]
    glm = V3 | {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
    assert [type(layer.ffn) for layer in families.read(glm).layers] == [MoE, Dense, MoE, Dense]


def test_windows_alternate_and_the_latent_part_knows_its_ranks():
    windows = [layer.attention.window for layer in families.read(OSS).layers]
    assert windows == [8, None, 8] and families.read(OSS).windows == (None, 8)
    part = families.read(V3).layers[0].attention
    assert isinstance(part, MLA) and (part.q_rank, part.kv_rank, part.scale) == (24, 32, 32 ** -0.5)
    assert isinstance(families.read(QWEN3).layers[0].attention, GQA)


def test_a_padded_vocabulary_is_the_shape_of_the_table():
    assert {t.key: t.shape for t in tensors.of(families.read(QWEN3 | {"vocab_size": 320}))}["embed"] == (320, 64)


def test_models_are_frozen_values():
    assert families.read(QWEN3) == families.read(dict(reversed(QWEN3.items())))
    assert families.read(QWEN3).first(2).moe_layers == (0, 1) and families.read(QWEN3).first(None) == families.read(QWEN3)


JSON = strategies.recursive(strategies.none() | strategies.booleans() | strategies.integers(-4, 1 << 70) | strategies.floats() | strategies.text(max_size=4),
                            lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=3), inner, max_size=2), max_leaves=4)


@settings(max_examples=300, deadline=None)
@given(strategies.sampled_from([QWEN3, V3, OSS]), strategies.data())
def test_any_value_of_any_key_is_read_or_refused_and_never_crashes(config, data):
    key = data.draw(strategies.sampled_from([*sorted(config), "rope_scaling", "rope_parameters", "layer_types", "mlp_layer_types", "text_config", "n_group"]))
    try:
        model = families.read(config | {key: data.draw(JSON)})
    except UnsupportedModel as e:
        assert e.message and "\n" not in e.message
        return
    assert tensors.parameters(model)[0] > 0
