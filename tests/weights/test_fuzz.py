"""Mutated model files, from container to last tensor: each is read or refused with one line, quickly, and without memory beyond its size."""
import json
import struct
import time
import tracemalloc

import gguf as library
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero.arch import families, tensors
from hetero.arch import gguf as arch_gguf
from hetero.errors import HeteroError
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.source import open_source

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
          "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False}
EDGES = [0, 1, 2, 3, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def write_safetensors(folder):
    stored = {}
    for t in tensors.of(families.read(CONFIG)):
        if t.home == "expert":
            stored |= {t.name: torch.randint(-127, 128, t.shape, dtype=torch.int8), f"{t.name}_scale": torch.rand(t.shape[0], 1).bfloat16()}
        else:
            stored[t.name] = torch.randn(t.shape).bfloat16()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "compressed-tensors"}}))
    return folder, folder / "model.safetensors"


def write_gguf(folder):
    path = folder / "model.gguf"
    w, model = library.GGUFWriter(path, "qwen3moe"), families.read(CONFIG)
    for key, value in {"block_count": 2, "context_length": 64, "embedding_length": 32, "attention.head_count": 2, "attention.head_count_kv": 1,
                       "attention.key_length": 16, "expert_count": 2, "expert_used_count": 1, "feed_forward_length": 32, "expert_feed_forward_length": 32}.items():
        w.add_uint32(f"qwen3moe.{key}", value)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([f"t{i}" for i in range(32)])
    w.add_token_types([1] * 32)
    w.add_token_merges(["t 1"])
    for t in tensors.of(model):
        name = arch_gguf.NAMES[t.key].format(l=t.layer)
        if t.home == "dense":
            w.add_tensor(name, np.random.randn(*t.shape).astype(np.float32))
        elif t.expert == 0:
            value = np.random.randn(2, *t.shape).astype(np.float32)
            w.add_tensor(name, library.quants.quantize(value, library.GGMLQuantizationType.Q8_0), raw_dtype=library.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path, path


def head_of(raw):
    """Where the data begins, nearly: most mutations belong into what describes it."""
    return 8 + struct.unpack_from("<Q", raw)[0] if raw[:4] != b"GGUF" else len(raw) // 3


def mutate(raw, rng):
    raw, head = bytearray(raw), head_of(raw)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, head if rng.random() < 0.9 else len(raw)))
        match int(rng.integers(0, 7)):
            case 0:
                raw[at] = int(rng.integers(0, 256))
            case 1:
                raw[at:at + 8] = struct.pack("<Q", EDGES[rng.integers(0, len(EDGES))])
            case 2:
                raw[at:at + 4] = struct.pack("<Q", EDGES[rng.integers(0, len(EDGES))])[:4]
            case 3:
                del raw[len(raw) * int(rng.integers(0, 16)) // 16:]
            case 4:
                del raw[at:at + int(rng.integers(1, 64))]
            case 5:
                raw[at:at] = raw[(b := int(rng.integers(0, head))):b + int(rng.integers(1, 64))]
            case 6:
                digits = str(EDGES[rng.integers(0, len(EDGES))]).encode()
                raw[at:at + len(digits)] = digits
        if len(raw) < 16:
            break
        head = min(head, len(raw))
    return bytes(raw)


def read_all(path):
    source = open_source(path)
    c = Checkpoint(source, source.spec())
    try:
        for t in tensors.of(c.model):
            if t.home == "dense":
                c.dense(t)
        for l in c.model.moe_layers:
            for e in range(2):
                c.expert(l, e)
    finally:
        c.close()


def run(write, tmp_path, count, seed):
    path, file = write(tmp_path)
    raw, rng, refused, worst = file.read_bytes(), np.random.default_rng(seed), 0, 0.0
    read_all(path)
    began = time.perf_counter()
    for i in range(count):
        file.write_bytes(mutate(raw, rng))
        t = time.perf_counter()
        tracemalloc.start()
        try:
            read_all(path)
        except HeteroError as e:
            refused += 1
            assert e.message and "\n" not in e.message, (seed, i)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        worst = max(worst, time.perf_counter() - t)
        assert peak < 16 * len(raw) + (2 << 20), (seed, i, peak)
    print(f"\n{write.__name__}: {count} mutated files of {len(raw)} bytes in {time.perf_counter() - began:.0f} s, {refused} refused, slowest {worst:.2f} s")
    assert refused > count // 4


@pytest.mark.parametrize("write", [write_safetensors, write_gguf])
def test_a_few_hundred_mutated_files(write, tmp_path):
    run(write, tmp_path, 200, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("write", [write_safetensors, write_gguf])
def test_ten_thousand_mutated_files(write, tmp_path):
    run(write, tmp_path, 5000, 2)
