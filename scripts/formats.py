#!/usr/bin/env python3
"""The embedded model converted into every format that is read: file size, what it is packed as, how far the answers move, decode speed.

Each conversion is round-to-nearest, without calibration, so the figures are about formats and not about quantizers. "own" is KL(the converted
weights in float32 || the engine on them), what packing and kernels cost; "original" is KL(the original in float32 || the engine).

    python scripts/formats.py [--lines 10] [--only gptq_g128,Q4_K] [--keep FOLDER] [--speed] [--json]

--speed measures decode instead: 64 tokens, turn by turn with the embedded model's. With --keep, what was converted before is taken as it is.
"""
import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu_kernels import FORMATS
from cpu_kernels.codes import quantize
from hetero.arch import gguf as arch_gguf
from hetero.arch import tensors
from hetero.llm import LLM
from hetero.memory.bank import dequantize
from hetero.request import Sampling
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.ggml import IQ4
from hetero.weights.source import EMBEDDED, open_source
from hetero.weights.stored import E2M1

Tensor = torch.Tensor
Parts = dict[str, Tensor]
TEXT = EMBEDDED.parent / "eval" / "teacher.jsonl"


def groups(w: Tensor, size: int) -> Tensor:
    return w.unflatten(1, (-1, size))


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [rows, M] to int32 [rows, M * bits / 32], low bits first."""
    shifts = torch.tensor(order or tuple(range(32 // bits)), dtype=torch.int64) * bits
    packed = (codes.long().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.from_numpy(packed.numpy().astype(np.uint32).view(np.int32))


def ct_int4(w: Tensor, size: int = 32) -> Parts:
    scale = (groups(w, size).abs().amax(-1) / 7).bfloat16()
    code = torch.round(groups(w, size) / scale.float()[..., None]).clamp(-8, 7).flatten(1) + 8
    return {"weight_packed": words(code, 4), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}


def asymmetric(w: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] 0..15, zero points and scales [N, G]."""
    part = groups(w, size)
    low, high = part.amin(-1).clamp(max=0), part.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = torch.round(-low / scale).clamp(0, 15)
    return (torch.round(part / scale[..., None]) + zero[..., None]).clamp(0, 15).flatten(1), zero, scale


def gptq(w: Tensor, size: int = 128, act_order: bool = False) -> Parts:
    """Symmetric, zero point 8. act_order: an order that all matrices with these inputs share, as their common inputs make it."""
    K = w.shape[1]
    order = torch.randperm(K, generator=torch.Generator().manual_seed(K)) if act_order else torch.arange(K)
    g_idx = torch.empty(K, dtype=torch.int32)
    g_idx[order] = torch.arange(K, dtype=torch.int32) // size
    scale = (groups(w[:, order], size).abs().amax(-1) / 7).half()
    code = (torch.round(w / scale.float()[:, g_idx.long()]) + 8).clamp(0, 15)
    zeros = torch.full((K // size, w.shape[0]), 7.0)
    return {"qweight": words(code, 4).T, "qzeros": words(zeros, 4), "scales": scale.T,
            "g_idx": g_idx}


def awq(w: Tensor, size: int = 128) -> Parts:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    code, zero, scale = asymmetric(w, size)
    return {"qweight": words(code.T, 4, order), "qzeros": words(zero.T, 4, order), "scales": scale.T.half()}


def fp8_block(w: Tensor) -> Parts:
    scale = w.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    return {"weight": (w / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def fp8_channel(w: Tensor) -> Parts:
    scale = w.abs().amax(1, keepdim=True) / 448
    return {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def e2m1(level: Tensor) -> Tensor:
    code = (level[..., None] - torch.from_numpy(E2M1)).abs().argmin(-1).to(torch.uint8)
    return code[:, ::2] | code[:, 1::2] << 4


def mxfp4(w: Tensor) -> Parts:
    power = torch.floor(torch.log2(groups(w, 32).abs().amax(-1))) - 2
    return {"weight_packed": e2m1((groups(w, 32) / torch.exp2(power)[..., None]).flatten(1)), "weight_scale": (power + 127).to(torch.uint8)}


def nvfp4(w: Tensor) -> Parts:
    overall = 448 * 6 / w.abs().max().reshape(1)
    scale = (groups(w, 16).abs().amax(-1) / 6 * overall).to(torch.float8_e4m3fn)
    real = scale.float() / overall
    return {"weight_packed": e2m1((groups(w, 16) / real[..., None]).flatten(1)), "weight_scale": scale, "weight_global_scale": overall}


CT = {"quant_method": "compressed-tensors"}
SAFE: dict[str, tuple[dict[str, Any] | None, Callable[[Tensor], Parts]]] = {
    "bf16": (None, lambda w: {"weight": w.bfloat16()}), "f16": (None, lambda w: {"weight": w.half()}),
    "ct_int4_g32": (CT, ct_int4), "ct_int4_g128": (CT, lambda w: ct_int4(w, 128)),
    "gptq_g128": ({"quant_method": "gptq", "bits": 4, "desc_act": False}, gptq),
    "gptq_g64_act_order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda w: gptq(w, 64, True)),
    "awq_g128": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_block), "fp8_channel": (CT, fp8_channel),
    "mxfp4": (CT, mxfp4), "nvfp4": (CT, nvfp4)}
GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "MXFP4", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "Q2_K")


def halves(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float16)[:, None].view(np.uint8)


def q45_k(w: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K or Q5_K blocks of 256: six-bit scales and minimums of eight groups."""
    x, top = w.reshape(-1, 8, 32), 2**bits - 1
    low = np.minimum(x.min(-1), 0)
    scale, least = (np.maximum(x.max(-1), 0) - low) / top, -low
    d, m = (scale.max(-1) / 63).astype(np.float16), (least.max(-1) / 63).astype(np.float16)
    s, z = (np.rint(v / np.maximum(u.astype(np.float32), 1e-12)[:, None]).clip(0, 63).astype(np.uint8) for v, u in ((scale, d), (least, m)))
    real = np.maximum(d.astype(np.float32)[:, None] * s, 1e-12)
    q = np.rint((x + (m.astype(np.float32)[:, None] * z)[..., None]) / real[..., None]).clip(0, top).astype(np.uint8)
    packed = np.concatenate([s[:, :4] | (s[:, 4:] >> 4) << 6, z[:, :4] | (z[:, 4:] >> 4) << 6, (s[:, 4:] & 15) | (z[:, 4:] & 15) << 4], 1)
    pairs = q.reshape(-1, 4, 2, 32) & 15
    high = [((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)] if bits == 5 else []
    return np.concatenate([halves(d), halves(m), packed, *high, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], 1)


def iq4_nl(w: np.ndarray) -> np.ndarray:
    x, table = w.reshape(-1, 32), IQ4.astype(np.float32)
    d = (np.abs(x).max(-1) / 127).astype(np.float16)
    q = np.searchsorted((table[1:] + table[:-1]) / 2, x / np.maximum(d.astype(np.float32), 1e-12)[:, None]).astype(np.uint8)
    return np.concatenate([halves(d), q[:, :16] | q[:, 16:] << 4], 1)


def q6_k(w: np.ndarray) -> np.ndarray:
    x = w.reshape(-1, 16, 16)
    scale = np.abs(x).max(-1) / 31
    d = (scale.max(-1) / 127).astype(np.float16)
    s = np.rint(scale / np.maximum(d.astype(np.float32), 1e-12)[:, None]).astype(np.int8)
    real = np.maximum(d.astype(np.float32)[:, None] * s, 1e-12)
    q = (np.rint(x / real[..., None]).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q & 15).reshape(-1, 2, 2, 64)
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8)
    return np.concatenate([(low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128), high.reshape(-1, 64), s.view(np.uint8), halves(d)], 1)


def six(w: np.ndarray, group: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights over their scales, ±most [blocks, groups, group]; scales + 32 [blocks, groups]; fp16 per block) of signed six-bit scales."""
    x = w.reshape(-1, 256 // group, group)
    scale = np.abs(x).max(-1) / most
    d = (scale.max(-1) / 31).astype(np.float16)
    s = np.rint(scale / np.maximum(d.astype(np.float32), 1e-12)[:, None]).clip(0, 31)
    return x / np.maximum(d.astype(np.float32)[:, None] * s, 1e-12)[..., None], (s + 32).astype(np.uint8), d


def quarters(q: np.ndarray) -> np.ndarray:
    """Codes of two bits, [blocks, 256] to [blocks, 64]."""
    return (q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(-1, 64)


def q2_k(w: np.ndarray) -> np.ndarray:
    q, f = quantize(FORMATS["q2_k"], w.reshape(-1, 256))
    return np.concatenate([f["scales"] | f["minimums"] << 4, quarters(q), halves(f["supers"][:, 0]), halves(f["least"][:, 0])], 1)


def q3_k(w: np.ndarray) -> np.ndarray:
    x, s, d = six(w, 16, 3)
    q = (np.rint(x).clip(-4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    upper = (q.reshape(-1, 8, 32) >> 2 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    high = (s.reshape(-1, 4, 4) >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return np.concatenate([upper, quarters(q & 3), s[:, :8] & 15 | (s[:, 8:] & 15) << 4, high, halves(d)], 1)


def iq4_xs(w: np.ndarray) -> np.ndarray:
    (x, s, d), table = six(w, 32, 127), IQ4.astype(np.float32)
    q = np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.uint8)
    high = (s.astype(np.uint16) >> 4 << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    return np.concatenate([halves(d), high[:, None].view(np.uint8), s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4,
                           (q[:, :, :16] | q[:, :, 16:] << 4).reshape(-1, 128)], 1)


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_K": lambda v: q45_k(v, 4), "Q5_K": lambda v: q45_k(v, 5), "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "Q3_K": q3_k, "Q2_K": q2_k}


def convert(name: str, out: Path) -> Path:
    """Write the embedded model's weights in this format, unless they are there; the folder or file to open."""
    if out.exists():
        return out / f"{name}.gguf" if name in GGUF else out
    source = open_source(None)
    c = Checkpoint(source, source.spec())
    out.mkdir(parents=True)
    if name in GGUF:
        return write_gguf(name, c, out / f"{name}.gguf")
    quant, encode = SAFE[name]
    stored: Parts = {}
    for t in tensors.of(c.model):
        if t.home == "dense":
            stored[t.name] = c.dense(t)
        else:
            w = torch.from_numpy(dequantize(getattr(c.expert(t.layer or 0, t.expert or 0), t.key.split(".")[1])))
            stored |= {t.name.removesuffix("weight") + kind: p.contiguous() for kind, p in encode(w).items()}
    save_file(stored, out / "model.safetensors")
    for path in EMBEDDED.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, out)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"} | ({"quantization_config": quant} if quant else {})
    (out / "config.json").write_text(json.dumps(config))
    return out


def write_gguf(kind: str, c: Checkpoint, out: Path) -> Path:
    """K blocks need rows of 256, which down (128 wide) has not: it becomes Q8_0, as converters do."""
    import gguf as library

    w, model, config = library.GGUFWriter(out, "qwen3moe"), c.model, c.source.config
    numbers = {"block_count": len(model.layers), "context_length": model.context, "embedding_length": model.hidden,
               "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
               "attention.key_length": config["head_dim"], "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"],
               "feed_forward_length": config["intermediate_size"], "expert_feed_forward_length": config["moe_intermediate_size"]}
    for key, value in numbers.items():
        w.add_uint32(f"qwen3moe.{key}", value)
    w.add_layer_norm_rms_eps(model.eps)
    w.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(w)
    for t in tensors.of(model):
        name = arch_gguf.NAMES[t.key].format(l=t.layer)
        if t.home == "dense":
            w.add_tensor(name, c.dense(t).float().numpy())
        elif t.expert == 0:
            part, l = t.key.split(".")[1], t.layer or 0
            value = np.stack([dequantize(getattr(c.expert(l, e), part)) for e in range(config["num_experts"])])
            use = kind if not kind.endswith(("_K", "_XS")) or value.shape[-1] % 256 == 0 else "Q8_0"
            number = library.GGMLQuantizationType[use]
            made = ENCODERS.get(use)
            raw = library.quants.quantize(value, number) if made is None else made(value).reshape(*value.shape[:2], -1)
            w.add_tensor(name, raw, raw_dtype=number)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def add_tokenizer(w: Any) -> None:
    made, config = (json.loads((EMBEDDED / n).read_text()) for n in ("tokenizer.json", "tokenizer_config.json"))
    vocab = made["model"]["vocab"] | {t["content"]: t["id"] for t in made["added_tokens"]}
    special = {t["id"] for t in made["added_tokens"] if t["special"]}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(sorted(vocab, key=vocab.__getitem__))
    w.add_token_types([3 if i in special else 1 for i in range(len(vocab))])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]])
    w.add_eos_token_id(2)
    w.add_chat_template(config["chat_template"])


def logits(path: Path | None, format: str, lines: list[str]) -> tuple[list[Tensor], dict[str, Any]]:
    """Log probabilities of each line, and what the load said."""
    with LLM(path, expert_format=format, packed_cache=False) as llm:
        found = [llm.logits([*llm.tokenizer.encode(line), 0][:512])[:-1].log_softmax(-1) for line in lines]
        filled = llm.bank.filled
        assert filled is not None
        return found, {"arrived": next(iter(filled.origins.values())).arrived, "packed": next(iter(filled.origins.values())).format,
                       "kept": all(o.kept for o in filled.origins.values()), "error": max(o.error for o in filled.origins.values())}


def speeds(path: Path, rounds: int = 9) -> tuple[float, float]:
    """(tokens per second, times the embedded model's speed): medians over `rounds` turns of each."""
    asked = Sampling(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(None, packed_cache=False, threads=1) as ours, LLM(path, packed_cache=False, threads=1) as other:
        took: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for llm, times in zip((ours, other), took, strict=True):
                began = time.perf_counter()
                llm.generate("Once upon a time", asked)
                times.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(*(t[1:] for t in took), strict=True)]
    return 64 / statistics.median(took[1][1:]), statistics.median(ratios)


def divergence(want: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Mean KL in nats per token, share of equal top-1."""
    a, b = torch.cat(want), torch.cat(got)
    return (a.exp() * (a - b)).sum(-1).mean().item(), (a.argmax(-1) == b.argmax(-1)).float().mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=10)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--keep", type=Path, help="leave the converted models here")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else ["embedded", *SAFE, *GGUF]
    with tempfile.TemporaryDirectory() as folder:
        made = {name: EMBEDDED if name == "embedded" else convert(name, (args.keep or Path(folder)) / name) for name in names}
        rows = speed_rows(made, args.json) if args.speed else quality_rows(made, args.lines, args.json)
    if args.json:
        print(json.dumps(rows))
    return 0


def speed_rows(made: dict[str, Path], quiet: bool) -> list[dict[str, Any]]:
    rows = []
    for name, path in made.items():
        tok_s, ratio = speeds(path)
        rows.append({"format": name, "tok_s": tok_s, "ratio": ratio})
        if not quiet:
            print(f"{name:20} {tok_s:7.0f} tok/s  {ratio:5.2f} x embedded", flush=True)
    return rows


def quality_rows(made: dict[str, Path], count: int, quiet: bool) -> list[dict[str, Any]]:
    texts = [json.loads(line)["text"] for line in TEXT.read_text().splitlines() if line.strip()]
    lines = texts[::max(1, len(texts) // count)][:count]
    original, _ = logits(None, "f32", lines)
    rows = []
    if not quiet:
        print("format                   MB packed as         kept    error    KL own KL original  top-1")
    for name, path in made.items():
        nbytes = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.glob("*.safetensors"))
        own, _ = logits(path, "f32", lines)
        got, row = logits(path, "auto", lines)
        (kl_own, _), (kl, top) = divergence(own, got), divergence(original, got)
        rows.append(row | {"format": name, "nbytes": nbytes, "kl_own": kl_own, "kl": kl, "top1": top})
        if not quiet:
            kept = "yes" if row["kept"] else "no"
            print(f"{name:20} {nbytes / 1e6:6.1f} {row['packed']:>16} {kept:>5} {row['error']:8.1e} {kl_own:9.1e} {kl:11.1e} {top:6.4f}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
