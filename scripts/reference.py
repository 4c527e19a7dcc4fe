"""The embedded model as transformers runs it: routed experts dequantized to floats; the reference that scripts measure against."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

EMBEDDED = Path(__file__).resolve().parents[1] / "hetero" / "embedded"
MAIN = EMBEDDED / "model-int8"


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """int8 [N, K] codes times bf16 [N, K / 32] scales, in float32; everything else as float32 too."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            continue
        scale = tensors.get(f"{name}_scale")
        plain[name] = tensor.float() if scale is None else tensor.float() * scale.float().repeat_interleave(32, 1)
    return plain


def folder(target: Path) -> Path:
    """A transformers checkpoint folder with the dequantized weights, float32."""
    config = json.loads((MAIN / "config.json").read_text())
    del config["quantization_config"]
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    save_file(dequantized(load_file(MAIN / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MAIN / name, target / name)
    return target


def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as name:
        return AutoModelForCausalLM.from_pretrained(folder(Path(name)), dtype=dtype).eval()
