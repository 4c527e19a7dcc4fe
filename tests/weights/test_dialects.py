"""Every quantized spelling read back equal to its own library's dequantization, or to an encoder written out from the published layout."""
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero.arch import families, tensors
from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.memory import bank
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.reading import Codes
from hetero.weights.source import open_folder
from hetero.weights.stored import E2M1, E8M0, to_f32

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64, "moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 1,
          "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True,
          "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
OUT, ATTN = "model.layers.0.mlp.experts.1.down_proj", "model.layers.0.self_attn.o_proj"


def publish(folder, encode, quant, only=lambda name: "experts" in name):
    """A checkpoint whose linears went through encode(W [N, K] float32) -> ({kind: tensor}, what it stands for as float32); the expectations."""
    generator, stored, want = torch.Generator().manual_seed(3), {}, {}
    config = CONFIG | ({"quantization_config": quant} if quant else {})
    for t in tensors.of(families.read(config)):
        w = torch.randn(t.shape, generator=generator) * 0.05
        if len(t.shape) == 2 and only(t.name):
            parts, value = encode(w)
            stored |= {t.name.removesuffix("weight") + kind: p.contiguous() for kind, p in parts.items()}
            want[t.key, t.layer, t.expert] = value.float().numpy()
        else:
            stored[t.name] = w.bfloat16()
            want[t.key, t.layer, t.expert] = w.bfloat16().float().numpy()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return want


def open_(folder):
    source = open_folder(folder)
    return Checkpoint(source, families.read(source.config))


def as_f32(matrix):
    return bank.dequantize(matrix)


def check(folder, want, format, exact, tolerance=0.0):
    """Each tensor equals what it stands for; the experts arrive in this format, as codes or not."""
    c = open_(folder)
    assert c.expert_format(0) == format
    for t in tensors.of(c.model):
        if t.home == "dense":
            assert np.allclose(c.dense(t).float().numpy(), want[t.key, t.layer, t.expert], rtol=tolerance, atol=0), t.name
    for e in range(2):
        for part, matrix in vars(c.expert(0, e)).items():
            assert isinstance(matrix, Codes) == exact, part
            value = want[f"expert.{part}", 0, e]
            assert np.allclose(as_f32(matrix), value, rtol=tolerance, atol=0), (part, np.abs(as_f32(matrix) - value).max())
    return c


def scheme(**weights):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def library(compressor, made):
    """Encode with compressed-tensors' own compressor, expect its own decompression."""
    def encode(w):
        s = made()
        state = {"weight": w} | scales_for(w, s.weights)
        packed = compressor.compress(dict(state), s)
        value = compressor.decompress({k: v.clone() for k, v in packed.items()}, s)["weight"]
        return packed, value
    return encode


def scales_for(w, a):
    _N, K = w.shape
    if a.strategy == "tensor":
        peak = w.abs().amax().reshape(1)
    elif a.strategy == "block":
        peak = w.unflatten(0, (-1, a.block_structure[0])).unflatten(2, (-1, a.block_structure[1])).abs().amax((1, 3))
    else:
        peak = w.unflatten(1, (-1, a.group_size if a.strategy == "group" else K)).abs().amax(-1)
    top = 448.0 if a.type == "float" else 2 ** (a.num_bits - 1) - 1
    state = {"weight_scale": (peak / top).bfloat16() if a.type == "int" else peak / top}
    if not a.symmetric:
        state["weight_zero_point"] = torch.randint(-3, 4, peak.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    return state


@pytest.mark.parametrize(("kind", "args", "format", "exact"), [
    ("pack", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}, "int4_g32", True),
    ("pack", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}, "int4_g64", True),
    ("pack", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}, "int4_g64", True),
    ("pack", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}, "int4_channel", True),
    ("pack", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}, "int8_g64", True),
    ("naive", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, "int8_channel", True),
    ("naive", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}, "int8_g32", True),
    ("naive", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}, "fp8", True),
    ("naive", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}, "fp8", True)])
def test_compressed_tensors_are_read_as_their_library_reads_them(kind, args, format, exact, tmp_path):
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    compressor = {"pack": PackedQuantizationCompressor, "naive": NaiveQuantizationCompressor}[kind]
    quant = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}, "ignore": ["lm_head"]}
    want = publish(tmp_path, library(compressor, lambda: scheme(**args)), quant, lambda n: "_proj" in n)
    check(tmp_path, want, format, exact, tolerance=1e-6 if args["type"] == "float" else 4e-3)


def nvfp4(w, modelopt):
    _N, _K = w.shape
    overall = torch.tensor([448 * 6.0]) / w.abs().max()                                     # compressed-tensors divides by it
    scale = (w.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * overall).to(torch.float8_e4m3fn)
    real = scale.float() / overall
    level = (w.unflatten(1, (-1, 16)) / real.clamp(min=1e-9)[..., None]).flatten(1)
    code = (level[..., None] - torch.from_numpy(E2M1)).abs().argmin(-1).to(torch.uint8)
    packed = code[:, ::2] | code[:, 1::2] << 4
    value = (torch.from_numpy(E2M1)[code.long()].unflatten(1, (-1, 16)) * real[..., None]).flatten(1)
    if modelopt:
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": (1 / overall).reshape(()), "input_scale": torch.ones(())}, value
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": overall}, value


def test_nvfp4_codes_unpack_as_the_library_unpacks_them():
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    from hetero.weights.minifloats import nibbles
    packed = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    assert np.array_equal(nibbles(packed.numpy(), np.float32), unpack_fp4_from_uint8(packed, 8, 64, torch.float32).numpy())


@pytest.mark.parametrize("modelopt", [False, True])
def test_nvfp4_in_both_spellings(modelopt, tmp_path):
    quant = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]} if modelopt else {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    check(tmp_path, publish(tmp_path, lambda w: nvfp4(w, modelopt), quant, lambda _: True), "nvfp4", True, 1e-6)


def mxfp4(w):
    exponent = torch.floor(torch.log2(w.unflatten(1, (-1, 32)).abs().amax(-1))) - 2
    level = (w.unflatten(1, (-1, 32)) / torch.exp2(exponent)[..., None]).flatten(1)
    code = (level[..., None] - torch.from_numpy(E2M1)).abs().argmin(-1).to(torch.uint8)
    value = (torch.from_numpy(E2M1)[code.long()].unflatten(1, (-1, 32)) * torch.exp2(exponent)[..., None]).flatten(1)
    return {"weight_packed": code[:, ::2] | code[:, 1::2] << 4, "weight_scale": (exponent + 127).to(torch.uint8)}, value


def test_mxfp4_is_kept_exactly(tmp_path):
    c = check(tmp_path, publish(tmp_path, mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, lambda _: True), "mxfp4", True)
    assert bank.load(c).filled.origins[0] == bank.Origin("mxfp4", "mxfp4", True, 0.0)


def fp8_blocks(w, ue8m0=False):
    block = torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = block.abs().amax((1, 3)) / 448
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if ue8m0 else scale
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
    code = (w / full).to(torch.float8_e4m3fn)
    return {"weight": code, "weight_scale_inv": scale.to(torch.float8_e8m0fnu) if ue8m0 else scale}, code.float() * full


@pytest.mark.parametrize("ue8m0", [False, True])
def test_block_fp8_with_float_and_power_of_two_scales(ue8m0, tmp_path):
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    want = publish(tmp_path, lambda w: fp8_blocks(w, ue8m0), quant, lambda n: "experts" in n or "_proj" in n)
    check(tmp_path, want, "fp8_b128", True, 1e-6)


def gptq(w, group, act_order, v2=False, bits=4):
    """The published layout written out by loops: qweight[r, n] holds 32 / bits inputs, zero points one too small but in v2."""
    N, K = w.shape
    G, per, top = K // group, 32 // bits, 2**bits - 1
    order = torch.randperm(K, generator=torch.Generator().manual_seed(5)) if act_order else torch.arange(K)
    g_idx = torch.empty(K, dtype=torch.int32)
    g_idx[order] = torch.arange(K, dtype=torch.int32) // group
    scales, zeros = torch.empty(G, N), torch.empty(G, N, dtype=torch.int64)
    for g in range(G):
        part = w[:, g_idx == g]
        scales[g] = ((part.amax(1) - part.amin(1)) / top).half()
        zeros[g] = torch.round(-part.amin(1) / scales[g]).clamp(1, top).long()
    code = (torch.round(w / scales.T[:, g_idx.long()]).long() + zeros.T[:, g_idx.long()]).clamp(0, top)
    qweight, qzeros = np.zeros((K // per, N), np.int64), np.zeros((G, N // per), np.int64)
    for k in range(K):
        qweight[k // per] |= code[:, k].numpy() << bits * (k % per)
    for n in range(N):
        qzeros[:, n // per] |= ((zeros[:, n].numpy() - (0 if v2 else 1)) & top) << bits * (n % per)
    words = {"qweight": qweight.astype(np.uint32).view(np.int32), "qzeros": qzeros.astype(np.uint32).view(np.int32)}
    value = (code - zeros.T[:, g_idx.long()]).float() * scales.T[:, g_idx.long()]
    return {k: torch.from_numpy(v) for k, v in words.items()} | {"scales": scales.half(), "g_idx": g_idx}, value


@pytest.mark.parametrize(("group", "act_order", "v2", "bits", "format", "exact"), [
    (64, False, False, 4, "gptq_int4_g64", True), (32, False, True, 4, "gptq_int4_g32", True), (64, True, False, 4, "gptq_int4_g64", True),
    (64, True, False, 8, "gptq_int8_g64", True), (64, False, False, 8, "gptq_int8_g64", True)])
def test_gptq_with_and_without_act_order(group, act_order, v2, bits, format, exact, tmp_path):
    quant = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False} | ({"checkpoint_format": "gptq_v2"} if v2 else {})
    want = publish(tmp_path, lambda w: gptq(w, group, act_order, v2, bits), quant, lambda n: "experts" in n or "_proj" in n)
    c = check(tmp_path, want, format, exact, 1e-6)
    b = bank.load(c)
    assert b.stores[0].form.endswith(":ordered") == act_order and str(b.filled.origins[0]) == f"{format} -> {b.stores[0].form}, exact"
    for e in range(2):                                                                       # one expert as a function of its input
        gate, up, down = (want[f"expert.{n}", 0, e].astype(np.float64) for n in ("gate", "up", "down"))
        x = np.random.default_rng(e).standard_normal((3, gate.shape[1]))
        mine = x if b.stores[0].orders is None else x[:, b.stores[0].orders[e]]
        ours = [b.stores[0].dequantize(e, n) for n in ("gate", "up", "down")]
        assert np.allclose((mine @ ours[0].T * (mine @ ours[1].T)) @ ours[2].T, (x @ gate.T * (x @ up.T)) @ down.T, rtol=1e-5, atol=1e-6)


def by_gptqmodel(w, group, act_order, layout, bits):
    """The library's own packing of a matrix, and its own dequantization of that."""
    from types import SimpleNamespace

    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.config import FORMAT
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
    (N, K), top = w.shape, 2**bits - 1
    order = torch.randperm(K, generator=torch.Generator().manual_seed(5)) if act_order else torch.arange(K)
    g_idx = torch.empty(K, dtype=torch.int32)
    g_idx[order] = torch.arange(K, dtype=torch.int32) // group
    parts = [w[:, g_idx == g] for g in range(K // group)]
    scales = torch.stack([((p.amax(1) - p.amin(1)) / top).half().float() for p in parts], 1)
    zeros = torch.stack([torch.round(-p.amin(1) / s).clamp(1, top) for p, s in zip(parts, scales.T, strict=True)], 1)
    linear, shape = torch.nn.Linear(K, N, bias=False), {"bits": bits, "group_size": group, "sym": False, "desc_act": act_order, "in_features": K, "out_features": N}
    linear.weight.data = w
    made = AwqTorchLinear(**shape, register_buffers=True) if layout == "awq" else TorchLinear(**shape, format=FORMAT.GPTQ_V2)
    made.pack(linear, scales, zeros, g_idx)
    made.post_init()
    value = made(torch.eye(K, dtype=torch.float16)).T.float() if layout == "awq" else made.dequantize_weight().T.float()
    if layout == "gptq":
        convert_gptq_v2_to_v1_format_module(made, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    stored = {k: getattr(made, k).detach().clone() for k in ("qweight", "qzeros", "scales")}
    return stored | ({} if layout == "awq" else {"g_idx": made.g_idx.clone()}), value


@pytest.mark.parametrize(("layout", "act_order", "bits"), [("gptq", False, 4), ("gptq", True, 4), ("gptq_v2", True, 8), ("gptq", False, 8), ("gptq_v2", False, 2), ("awq", False, 4)])
def test_what_gptqmodel_packs_is_read_as_it_reads_it(layout, act_order, bits, tmp_path):
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    quant = {"quant_method": "awq", "bits": 4, "version": "gemm"} if layout == "awq" else {
        "quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": act_order, "sym": False, "checkpoint_format": layout}
    want = publish(tmp_path, lambda w: by_gptqmodel(w, 64, act_order, layout, bits), quant, lambda n: "experts" in n or "_proj" in n)
    c = check(tmp_path, want, f"{quant['quant_method']}_int{bits}_g64", True, 2e-3)          # the library's products are fp16
    assert str(bank.load(c).filled.origins[0]).endswith(", exact")


def test_gate_and_up_in_different_orders_are_measured_and_said(tmp_path):
    turned = iter(range(1000))

    def encode(w):
        parts, value = gptq(w, 64, True)
        if next(turned) % 2:
            return parts, value
        return gptq(w, 64, False)
    publish(tmp_path, encode, {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": False})
    origin = bank.load(open_(tmp_path)).filled.origins[0]
    assert not origin.kept and 1e-3 < origin.error < 0.2 and origin.format == "int4_g64z:ordered"


def awq(w, group=64):
    _N, _K = w.shape
    part = w.unflatten(1, (-1, group))
    scale = ((part.amax(-1) - part.amin(-1)) / 15).half().float()
    zero = torch.round(-part.amin(-1) / scale).clamp(0, 15).long()
    code = (torch.round(part / scale[..., None]).long() + zero[..., None]).clamp(0, 15)
    value = ((code - zero[..., None]).float() * scale[..., None]).flatten(1)

    def pack(x):                                                                             # [rows, N] -> [rows, N / 8], columns 0 2 4 6 1 3 5 7
        words = np.zeros((x.shape[0], x.shape[1] // 8), np.int64)
        for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= x[:, column::8].numpy() << 4 * i
        return torch.from_numpy(words.astype(np.uint32).view(np.int32))
    return {"qweight": pack(code.flatten(1).T), "qzeros": pack(zero.T), "scales": scale.T.half()}, value


def test_awq_with_its_order_of_nibbles(tmp_path):
    want = publish(tmp_path, awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, lambda n: "_proj" in n)
    check(tmp_path, want, "awq_int4_g64", True, 1e-6)


def test_gpt_oss_blocks_are_read_as_transformers_reads_them(tiny, tmp_path):
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    folder = tiny("gpt_oss")
    raw, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    dense = {}
    for l in range(config["num_hidden_layers"]):
        at = f"model.layers.{l}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            w = raw.pop(f"{at}.{name}").mT                                                   # [E, N, K]
            parts = [mxfp4(one) for one in w]
            blocks = torch.stack([p["weight_packed"].unflatten(1, (-1, 16)) for p, _ in parts])
            scales = torch.stack([p["weight_scale"] for p, _ in parts])
            raw[f"{at}.{name}_blocks"], raw[f"{at}.{name}_scales"] = blocks.contiguous(), scales.contiguous()
            dense[l, name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(raw, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    c = open_(tmp_path)
    assert c.expert_format(0) == "mxfp4"
    for l in range(config["num_hidden_layers"]):
        for e in range(8):
            w = c.expert(l, e)
            assert np.array_equal(as_f32(w.gate), dense[l, "gate_up_proj"][e].T[::2].numpy())
            assert np.array_equal(as_f32(w.up), dense[l, "gate_up_proj"][e].T[1::2].numpy())
            assert np.array_equal(as_f32(w.down), dense[l, "down_proj"][e].T.numpy())


def test_mixed_groups_are_read_each_as_it_is_stored(tmp_path):
    def encode(w):
        return mxfp4(w) if w.shape[0] == 128 else fp8_blocks(w)
    quant = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}, "b": {"weights": {"num_bits": 8, "type": "float"}}}}
    publish(tmp_path, encode, quant)
    c = open_(tmp_path)
    assert c.expert_format(0) == "mxfp4+fp8_b128" and c.expert_arrives(0) == "mxfp4+fp8"
    assert isinstance(c.expert(0, 1).gate, Codes) and c.expert(0, 1).down.format == "fp8"
    assert str(bank.load(c).filled.origins[0]) == "mxfp4+fp8_b128 -> mxfp4+fp8, exact"


@pytest.mark.parametrize(("change", "words"), [
    (lambda raw: raw.pop(f"{OUT}.weight_scale_inv"), ["without weight_scale", OUT]),
    (lambda raw: raw.update({f"{OUT}.weight_scale_inv": torch.ones(3, 5)}), ["fits neither", OUT]),
    (lambda raw: raw.update({f"{OUT}.weight": raw[f"{OUT}.weight"].mT.contiguous()}), ["the config says", OUT]),
    (lambda raw: raw.update({f"{OUT}.weight": raw[f"{OUT}.weight"].view(torch.int8), f"{OUT}.weight_scale": torch.ones(2, 1)}), ["weight_scale", "fits neither", OUT]),
    (lambda raw: raw.update({f"{OUT}.weight": torch.zeros(256, 128, dtype=torch.int16)}), ["no known way", OUT])])
def test_parts_that_do_not_fit_are_named(change, words, tmp_path):
    from safetensors.torch import load_file
    publish(tmp_path, fp8_blocks, {"quant_method": "fp8"})
    raw = load_file(tmp_path / "model.safetensors")
    change(raw)
    save_file(raw, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint) as e:
        open_(tmp_path)
    assert all(w in e.value.message for w in words)


def test_awq_kernels_of_another_layout_are_refused(tmp_path):
    publish(tmp_path, awq, {"quant_method": "awq", "bits": 4, "version": "gemv"})
    with pytest.raises(UnsupportedModel, match="gemv"):
        open_(tmp_path)


def test_powers_of_two_are_what_torch_says():
    assert E8M0[127] == 1 and np.isnan(E8M0[255])
    assert np.array_equal(to_f32(np.arange(254, dtype=np.uint8), "F8_E8M0"), np.ldexp(1.0, np.arange(254) - 127).astype(np.float32))
