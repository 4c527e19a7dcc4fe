"""Published tensor layouts at their full width, few layers and random weights: they load, answer, and take the memory that was planned."""
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetero.arch import families, tensors
from hetero.weights.source import EMBEDDED

ROOT = Path(__file__).parents[2]
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
           "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 8192, "rms_norm_eps": 1e-5,
           "rope_theta": 150000, "max_position_embeddings": 4096, "attention_bias": True, "hidden_act": "silu", "tie_word_embeddings": False,
           "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 2, "quantization_config": {"quant_method": "mxfp4"}}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 128,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "vocab_size": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False,
            "attention_bias": False, "eos_token_id": 2, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SCRIPT = """
import json, pathlib, sys
from hetero.llm import LLM
from hetero.request import Sampling
with LLM(sys.argv[1], ctx=256, max_batch=1, packed_cache=False) as llm:
    status = pathlib.Path("/proc/self/status").read_text()           # not ru_maxrss, which a child takes over from the parent that forked it
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    answer = llm.generate("hello", Sampling(temperature=0, max_tokens=3, ignore_eos=True))[0]
    filled = llm.bank.filled
    print(json.dumps({"peak": peak, "planned": llm.plan.peak_load_ram_bytes, "arena": filled.nbytes, "ids": answer.token_ids,
                      "arrived": list(filled.origins.values())[0].arrived, "error": list(filled.origins.values())[0].error,
                      "said": str(list(filled.origins.values())[0])}))
"""


def bf16(rng, shape, scale):
    return (rng.standard_normal(shape, np.float32) * scale).view(np.uint32) >> 16


def parts(t, family):
    """(name, dtype, shape, maker) of what is stored for one logical tensor."""
    if family == "gpt_oss" and t.home == "expert":
        if t.expert or t.key.startswith("expert.up"):
            return
        at, part, bias = t.name.split(".experts.")[0] + ".experts.", "down_proj" if "down" in t.key else "gate_up_proj", t.key.endswith(".bias")
        N, K = (2880, 2880) if part == "down_proj" else (5760, 2880)
        if bias:
            yield at + part + "_bias", "BF16", (32, N), lambda r, s: bf16(r, s, 0.1).astype(np.uint16)
            return
        yield at + part + "_blocks", "U8", (32, N, K // 32, 16), lambda r, s: r.integers(0, 256, s, np.uint8)
        yield at + part + "_scales", "U8", (32, N, K // 32), lambda r, s: r.integers(117, 120, s, np.uint8)
    elif family == "deepseek_v3" and len(t.shape) == 2 and t.key not in ("embed", "head", "router"):
        yield t.name, "F8_E4M3", t.shape, lambda r, s: r.integers(0, 0x78, s, np.uint8) | r.integers(0, 2, s, np.uint8) << 7
        blocks = (-(-t.shape[0] // 128), -(-t.shape[1] // 128))
        yield t.name + "_scale_inv", "F32", blocks, lambda r, s: (r.random(s, np.float32) + 0.5) * np.float32(2e-4)
    else:
        one = "norm" in t.key
        yield t.name, "BF16", t.shape, lambda r, s: np.full(s, 0x3F80, np.uint16) if one else bf16(r, s, s[-1] ** -0.5).astype(np.uint16)


def write(folder, config, family):
    """Streams the tensors to one file, so that making it takes no more memory than its largest tensor."""
    listed = [p for t in tensors.of(families.read(config)) for p in parts(t, family)]
    size, header, at = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}, {}, 0
    for name, dtype, shape, _ in listed:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at := at + size[dtype] * int(np.prod(shape))]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, shape, make in listed:
            f.write(make(rng, shape).tobytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "config", "arrived"), [("gpt_oss", GPT_OSS, "mxfp4"), ("deepseek_v3", DEEPSEEK, "fp8_b128")])
def test_a_published_layout_loads_and_answers_within_its_plan(family, config, arrived, tmp_path):
    write(tmp_path, config, family)
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["arrived"] == arrived and len(found["ids"]) == 3 and found["said"].endswith("exact")
    assert found["peak"] <= 1.05 * found["planned"] + (512 << 20)
