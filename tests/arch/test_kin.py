"""Rows whose classes transformers lacks, proven on a relative that it has: the same numbers under the other family's names and config."""

import torch

from hetero.arch import families, tensors

IDS = [(7 * i) % 250 + 3 for i in range(3, 27)]
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}


def relative(oracle, model, found, ids):
    with torch.no_grad():
        return oracle.Oracle(model, found)(ids)


def test_ling_is_granite_shared_without_multipliers_and_with_a_unit_head(make, oracle, tmp_path):
    import transformers
    granite = transformers.GraniteMoeSharedConfig(**SHAPE, intermediate_size=32, shared_intermediate_size=64, num_local_experts=8, num_experts_per_tok=2,
                                                  attention_multiplier=16 ** -0.5)
    make.build(granite).save_pretrained(tmp_path)
    theirs, found = oracle.load(tmp_path)
    ling = families.read(SHAPE | {"architectures": ["BailingMoeForCausalLM"], "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
                                  "num_shared_experts": 2, "num_experts_per_tok": 2, "norm_topk_prob": True, "norm_head": True, "first_k_dense_replace": 0})
    assert {(t.key, t.layer, t.expert): t.shape for t in tensors.of(ling)} == {(t.key, t.layer, t.expert): t.shape for t in tensors.of(theirs)}
    assert ling.unit_head
    want = make.logits(tmp_path, IDS)
    assert (relative(oracle, ling, found, IDS) - want).abs().max() < 1e-4
    names = {t.key: t.name for t in tensors.of(ling)}
    assert names["attn.k"].endswith("attention.query_key_value.weight[64:96]") and names["embed"] == "model.word_embeddings.weight"


def test_ling_2_is_glm_4_5_under_other_names(make, oracle, tmp_path):
    import transformers
    glm = transformers.Glm4MoeConfig(**SHAPE | {"head_dim": 16}, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
                                     n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    make.build(glm).save_pretrained(tmp_path)
    theirs, found = oracle.load(tmp_path)
    ling = families.read(SHAPE | {"architectures": ["BailingMoeV2ForCausalLM"], "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
                                  "num_experts": 8, "num_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "use_qk_norm": True,
                                  "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "score_function": "sigmoid",
                                  "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "moe_shared_expert_intermediate_size": 32})
    assert ling.layers == theirs.layers
    assert (relative(oracle, ling, found, IDS) - make.logits(tmp_path, IDS)).abs().max() < 1e-4
    names = {t.key: t.name for t in tensors.of(ling) if t.layer in (None, 2)}
    assert names["attn.v"].endswith("attention.query_key_value.weight[96:128]") and names["attn.q_norm"] == "model.layers.2.attention.query_layernorm.weight"
    assert names["router.correction"] == "model.layers.2.mlp.gate.expert_bias" and names["shared.up"] == "model.layers.2.mlp.shared_experts.up_proj.weight"


def test_a_unit_head_is_divided_by_its_columns_lengths_at_load(tmp_path):
    import json

    from safetensors.torch import save_file

    from hetero.weights.checkpoint import Checkpoint
    from hetero.weights.source import open_source
    config = SHAPE | {"architectures": ["BailingMoeForCausalLM"], "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4,
                      "num_shared_experts": 1, "num_experts_per_tok": 2, "norm_head": True}
    model = families.read(config)
    draw = torch.Generator().manual_seed(0)
    stored, fused = {}, {}
    for t in tensors.of(model):
        data = torch.randn(t.shape, generator=draw)
        if "[" in t.name:
            fused.setdefault(t.name.partition("[")[0], []).append(data)
        else:
            stored[t.name] = data
    save_file(stored | {name: torch.cat(parts) for name, parts in fused.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(open_source(tmp_path), model)
    by_key = {(t.key, t.layer): t for t in tensors.of(model)}
    head = checkpoint.dense(by_key["head", None])
    torch.testing.assert_close(head.norm(dim=0), torch.ones(64))
    torch.testing.assert_close(head * stored["lm_head.weight"].norm(dim=0), stored["lm_head.weight"])
    torch.testing.assert_close(checkpoint.dense(by_key["attn.k", 1]), fused["model.layers.1.attention.query_key_value.weight"][1])
    checkpoint.close()


def test_deepseek_moe_is_qwen2_moe_with_an_open_shared_gate(make, oracle, tmp_path):
    import transformers
    qwen = transformers.Qwen2MoeConfig(**SHAPE, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8,
                                       num_experts_per_tok=2, mlp_only_layers=[0], qkv_bias=False)
    model = make.build(qwen)
    for layer in model.model.layers[1:]:
        layer.mlp.shared_expert_gate.weight.data.zero_()                 # sigmoid(0) = 1/2
    model.save_pretrained(tmp_path)
    _, found = oracle.load(tmp_path)
    deepseek = families.read(SHAPE | {"architectures": ["DeepseekForCausalLM"], "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
                                      "n_shared_experts": 2, "num_experts_per_tok": 2, "norm_topk_prob": False, "first_k_dense_replace": 1,
                                      "scoring_func": "softmax", "moe_layer_freq": 1})
    ours = {k: v / 2 if k[0] == "shared.down" else v for k, v in found.items()}
    assert set(ours) - {(t.key, t.layer, t.expert) for t in tensors.of(deepseek)} == {("shared_gate", 1, None), ("shared_gate", 2, None)}
    assert (relative(oracle, deepseek, ours, IDS) - make.logits(tmp_path, IDS)).abs().max() < 1e-4
