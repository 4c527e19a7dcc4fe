"""Chooses how a stored matrix is read: one row per dialect, tried in order; and refuses quantizations that no row understands; knows no file.

What is stored decides (types and shapes beside the name); the config's quantization block settles what bytes cannot say, and must not
contradict them. A module that the config leaves out (`ignore`, `modules_to_not_convert`, …) arrives as floats and is read as such.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.weights import ggml
from hetero.weights.integers import compressed_int, gptq_or_awq
from hetero.weights.layout import Place
from hetero.weights.minifloats import fp4, fp8
from hetero.weights.reading import Parts, Reading
from hetero.weights.stored import FLOATS, to_f32

Dialect = Callable[[Place, tuple[int, ...], dict[str, Any]], Reading | None]
METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "gptq", "modelopt", "mxfp4")
PACKINGS = {"auto_round:auto_gptq": ("gptq", "gptq"), "auto_round": ("gptq", "gptq_v2"), "auto_round:gptqmodel": ("gptq", "gptq_v2"),
            "auto_round:auto_awq": ("awq", "gemm")}        # of auto-round: which layout under which name
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {        # method: keys that name a layout, the first that is there; what they may say
    "gptq": (("checkpoint_format", "format"), ("gptq", "gptq_v2")), "awq": (("version", "checkpoint_format", "format"), ("gemm",)),
    "compressed-tensors": (("format",), ("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
                                         "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision")),
    "modelopt": (("quant_algo",), ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MXFP4", "W4A8_MXFP4_FP8",
                                   "MIXED_PRECISION"))}
SUPPORTED = f"supported: {', '.join(METHODS)}, and GGUF files"


def plain(place: Place, shape: tuple[int, ...], _: dict) -> Reading | None:
    """Floats as stored: F32, F16, BF16 (F64 is rounded to float32)."""
    w = place.parts.get("weight")
    if w is None or w.stored.dtype not in FLOATS:
        return None
    tag = w.stored.dtype
    return Reading(FLOATS[tag], 16 if tag in ("F16", "BF16") else 32, shape, {"weight": w}, lambda p: to_f32(p["weight"], tag))


DIALECTS: tuple[Dialect, ...] = (plain, ggml.blocks, ggml.split_kv, gptq_or_awq, compressed_int, fp8, fp4)


def quantization(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The quantization block of a config (or of hf_quant_config.json), {} when there is none. Raises UnsupportedModel naming key and value."""
    inner = config.get("text_config")
    quant = config.get("quantization_config") or config.get("compression_config") or \
        (inner.get("quantization_config") if isinstance(inner, dict) else None) or (beside or {}).get("quantization") or {}
    if not isinstance(quant, dict):
        raise UnsupportedModel(f"config.json: quantization_config = {str(quant)[:80]!r}", SUPPORTED)
    if not quant:
        return {}
    method = quant.get("quant_method", "modelopt" if "quant_algo" in quant else None)
    if method not in METHODS:
        guess = difflib.get_close_matches(str(method), METHODS, 1)
        near = f"; did you mean {guess[0]!r}?" if guess else ""
        raise UnsupportedModel(f"config.json: quantization_config.quant_method = {method!r}", SUPPORTED + near)
    if method == "auto-round":
        packing = quant.get("packing_format", "auto_round:auto_gptq")
        if packing not in PACKINGS:
            raise UnsupportedModel(f"config.json: quantization_config.packing_format = {packing!r}", f"supported: {', '.join(PACKINGS)}")
        method, layout = PACKINGS[packing]
        quant = quant | {"quant_method": method, "version" if method == "awq" else "checkpoint_format": layout}
    check_words(quant, method)
    if method in ("gptq", "awq") and quant.get("bits", quant.get("w_bit", 4)) not in ((2, 4, 8) if method == "gptq" else (4,)):
        raise UnsupportedModel(f"config.json: quantization_config.bits = {quant.get('bits', quant.get('w_bit'))!r} of {method}",
                               f"supported: {'2, 4, 8' if method == 'gptq' else '4'}")
    if method == "compressed-tensors":
        check_groups(quant)
    return quant


def check_words(quant: Mapping[str, Any], method: str) -> None:
    """Layouts whose tensors can look like another's are told apart by a word of the config alone."""
    keys, known = WORDS.get(method, ((), ()))
    key = next((k for k in keys if quant.get(k) is not None), "")
    if key and str(quant[key]).lower() not in [word.lower() for word in known]:
        raise UnsupportedModel(f"config.json: quantization_config.{key} = {quant[key]!r} of {method}", f"supported: {', '.join(known)}")
    if method == "awq" and quant.get("backend") == "llm-awq":
        raise UnsupportedModel("config.json: quantization_config.backend = 'llm-awq' of awq", "supported: autoawq")


def check_groups(quant: dict[str, Any]) -> None:
    """compressed-tensors: every scheme of `config_groups` must be one that some row reads."""
    if quant.get("sparsity_config"):
        kind = quant["sparsity_config"].get("format") if isinstance(quant["sparsity_config"], dict) else quant["sparsity_config"]
        if kind not in (None, "dense"):
            raise UnsupportedModel(f"config.json: quantization_config.sparsity_config.format = {kind!r}", "supported: 'dense'")
    if quant.get("transform_config"):
        raise UnsupportedModel("config.json: quantization_config.transform_config (rotated weights)", "supported: none")
    for name, group in (quant.get("config_groups") or {}).items():
        w = group.get("weights") if isinstance(group, dict) else None
        if w is None:
            continue                     # a group of activations or caches alone leaves the weights as they are
        check_words(group, "compressed-tensors")
        kind, bits = w.get("type", "int"), w.get("num_bits", 8)
        if (kind, bits) not in (("int", 2), ("int", 4), ("int", 8), ("float", 4), ("float", 8)):
            raise UnsupportedModel(f"config.json: quantization_config.config_groups.{name}.weights: {kind} of {bits} bits",
                                   "supported: int 2, 4, 8; float 4, 8")


def read(place: Place, shape: tuple[int, ...], quant: dict[str, Any]) -> Reading:
    """The reading of one logical tensor of this shape. Raises BadCheckpoint naming tensor, shapes and types."""
    for dialect in DIALECTS:
        reading = dialect(place, shape, quant)
        if reading is not None:
            w = reading.parts.get("weight")
            if w is not None and reading.format in FLOATS.values() and w.shape != shape:
                if w.stored.shape and int(np.prod(w.shape)) == int(np.prod(shape)) and 1 in w.shape + shape:
                    return reading       # [1, E] for [E] and the like: read in the shape that the config says
                raise BadCheckpoint(f"{w.stored.file}: tensor {w.stored.name!r} has the shape {list(w.shape)}, the config says {list(shape)}",
                                    "the config and the weights are of different models")
            return reading
    kinds = ", ".join(f"{k} {p.stored.dtype} {list(p.stored.shape)}" for k, p in place.parts.items())
    raise BadCheckpoint(f"{place.stem}: no known way to read {kinds}", SUPPORTED)


def floats(reading: Reading, parts: Parts) -> np.ndarray:
    """float32 in the reading's shape."""
    with np.errstate(all="ignore"):      # a NaN in the file is the file's; it is reported where it matters, not as a warning here
        return reading.dequantize(parts).reshape(reading.shape)
