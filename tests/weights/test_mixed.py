"""GGUF files as people have them, whose layers and matrices mix block types: each matrix in its own kernel format, byte for byte as planned, and the
logits of transformers on what the gguf library says the blocks are worth."""
import importlib.util
import json
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
import transformers

from hetero.llm import LLM

ROOT = Path(__file__).parents[2]
KINDS = {"attn_v": "Q6_K", "output": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_output": "Q4_K", "token_embd": "Q4_K"}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "mlp.gate": "ffn_gate_inp"}
Q4_K_M = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q5_K", "Q6_K")]
DYNAMIC = [("Q5_K", "Q5_K", "Q8_0"), ("Q4_1", "Q4_1", "Q5_1"), ("Q4_K", "Q5_K", "Q6_K"), ("Q4_K", "Q4_K", "BF16")]
SMALL = [("Q2_K", "Q2_K", "Q3_K"), ("IQ4_XS", "IQ4_XS", "Q5_K"), ("Q3_K", "Q3_K", "IQ4_NL"), ("Q2_K", "Q2_K", "Q2_K")]
FUSED, WIDE = [("Q4_K", "Q4_K", "Q6_K")], [("Q4_K", "Q4_K", "Q6_K")]


@pytest.fixture(scope="module")
def formats():
    spec = importlib.util.spec_from_file_location("formats", ROOT / "scripts" / "formats.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def publish(path, layers, formats, make, hidden=256, inter=256, experts=4, fused=False):
    """A file of these (gate, up, down) block types, and transformers' model on the library's dequantization of it."""
    vocab = len(json.loads((formats.EMBEDDED / "tokenizer.json").read_text())["model"]["vocab"]) + 20
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=len(layers), num_attention_heads=4, num_key_value_heads=2, head_dim=64, norm_topk_prob=True,
        intermediate_size=256, moe_intermediate_size=inter, num_experts=experts, num_experts_per_tok=2, max_position_embeddings=256)
    model, w = make.build(config), library.GGUFWriter(path, "qwen3moe")
    for key, value in {"block_count": len(layers), "context_length": 256, "embedding_length": hidden, "attention.head_count": 4, "attention.head_count_kv": 2,
                       "attention.key_length": 64, "expert_count": experts, "expert_used_count": 2, "feed_forward_length": 256,
                       "expert_feed_forward_length": inter}.items():
        w.add_uint32(f"qwen3moe.{key}", value)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    formats.add_tokenizer(w)

    def add(name, kind, value):
        """Writes and returns what was written is worth."""
        if kind == "F32":
            w.add_tensor(name, value.numpy())
            return value
        number, rows = library.GGMLQuantizationType[kind], value.numpy() / np.sqrt(value.shape[-1]) * 4
        made = formats.ENCODERS.get(kind)
        raw = library.quants.quantize(rows, number) if made is None else made(rows).reshape(*rows.shape[:-1], -1)
        w.add_tensor(name, raw, raw_dtype=number)
        return torch.from_numpy(library.quants.dequantize(raw, number).reshape(rows.shape))

    for name, p in model.named_parameters():
        parts = name.removesuffix(".weight").split(".")
        if "experts" in name:
            gate, up, down = layers[int(parts[2])]
            if name.endswith("gate_up_proj") and fused:
                p.data = add(f"blk.{parts[2]}.ffn_gate_up_exps.weight", gate, p.data)
            elif name.endswith("gate_up_proj"):
                halves = zip(("gate", "up"), (gate, up), p.data.chunk(2, 1), strict=True)
                p.data = torch.cat([add(f"blk.{parts[2]}.ffn_{n}_exps.weight", kind, half.contiguous()) for n, kind, half in halves], 1)
            else:
                p.data = add(f"blk.{parts[2]}.ffn_down_exps.weight", down, p.data)
            continue
        ours = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}" if len(parts) > 3 else {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-1]]
        p.data = add(f"{ours}.weight", KINDS.get(ours.split(".")[-1], "F32"), p.data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model


def layers_said(llm):
    return {l: (store.form, str(llm.bank.filled.origins[l])) for l, store in llm.bank.stores.items()}


@pytest.mark.parametrize(("layers", "shape", "said"), [
    (Q4_K_M, {}, ["q4_k+q6_k -> q4_k+q6_k, exact", "q4_k -> q4_k, exact", "q4_k+q6_k -> q4_k+q6_k, exact", "q5_k+q6_k -> q5_k+q6_k, exact"]),
    (FUSED, {"fused": True}, ["q4_k+q6_k -> q4_k+q6_k, exact"]),
    (SMALL, {}, ["q2_k+q3_k -> q2_k+q3_k, exact", "iq4_xs+q5_k -> iq4_xs+q5_k, exact", "q3_k+iq4_nl -> q3_k+iq4_nl, exact", "q2_k -> q2_k, exact"]),
    (DYNAMIC, {}, ["q5_k+q8_0 -> q5_k+q8_0, exact", "q4_1+q5_1 -> q4_1+q5_1, exact", "q4_k+q5_k+q6_k -> int8_g32+q6_k, error", "q4_k+bf16 -> q4_k+int4_g32, error"]),
    pytest.param(WIDE, {"hidden": 2048, "inter": 768}, ["q4_k+q6_k -> q4_k+q6_k, exact"], marks=pytest.mark.slow)], ids=["q4_k_m", "fused", "small", "dynamic", "wide"])
@torch.no_grad()
def test_every_matrix_is_kept_in_its_own_format_and_answers_as_transformers_does(layers, shape, said, formats, make, tmp_path):
    model = publish(tmp_path / "m.gguf", layers, formats, make, **shape)
    ids = [(37 * i) % 5000 + 3 for i in range(24)]
    with LLM(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "cache", threads=1, ctx=128, dense_format="f32") as llm:
        found = layers_said(llm)
        assert all(text.startswith(want) for (_, text), want in zip(found.values(), said, strict=True)), found
        assert [form for form, _ in found.values()] == list(llm.plan.expert_formats)
        assert sum(s.experts * s.record_nbytes for s in llm.bank.stores.values()) == llm.plan.ram["experts"]
        rows = [row for l, row in llm.report().rows if row.part == "experts"]
        assert [row.format for row in rows] == [form for form, _ in found.values()] and rows[0].kernel == f"rows.{rows[0].format}"
        for l, store in llm.bank.stores.items():
            moe = model.model.layers[l].mlp.experts
            parts = {"gate": moe.gate_up_proj[3, :store.inter], "up": moe.gate_up_proj[3, store.inter:], "down": moe.down_proj[3]}
            for name, want in parts.items():
                if layers is not DYNAMIC or l < 2 or (l, name) in ((2, "down"), (3, "gate"), (3, "up")):
                    assert np.allclose(store.dequantize(3, name), want.numpy(), rtol=1e-6, atol=1e-6 * float(want.abs().max())), (l, name)
        want, got = model(torch.tensor([ids])).logits[0, :, :llm.vocab], llm.logits(ids)
        if layers is not DYNAMIC:
            kl = (want.log_softmax(-1).exp() * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean().item()
            assert kl < 1e-3, kl
    with LLM(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "cache", threads=1, ctx=128) as llm:
        assert llm.bank.filled.by == "packed cache" and layers_said(llm) == found
        assert (llm.logits(ids, path="decode").argmax(-1) == want.argmax(-1)).float().mean() > 0.7
