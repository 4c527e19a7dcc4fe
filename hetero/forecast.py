"""The plan of a model that is not loaded: from its folder, or from a bare config.json; allocates nothing and moves nothing."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cpu_kernels.formats import ORDERED
from hetero.arch import families
from hetero.arch.spec import Model
from hetero.llm import bridge_to, fetch, open_weights
from hetero.memory import machine as machines
from hetero.memory import plan as plans
from hetero.memory.cost import Machine
from hetero.options import Options
from hetero.weights import dialects
from hetero.weights.integers import kept_in
from hetero.weights.source import Source, open_source, read_config

BY_METHOD = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4_g64z", "modelopt": "nvfp4"}


def arriving(config: Mapping[str, Any]) -> str:
    """The format in which routed experts come, by the config's own word: for planning, when no weights are there to look at."""
    quant = dialects.quantization(config)
    method = quant.get("quant_method", "modelopt") if quant else ""
    if method == "gptq":
        bits, size = quant.get("bits", 4), quant.get("group_size", 128)
        groups = 1 if size == -1 else (1 << 14) // size
        kept = kept_in(bits, 1 << 14, groups, not quant.get("sym", False), "F16")
        return kept + ORDERED * bool(quant.get("desc_act") and groups > 1) if kept else f"int{bits}"
    if method == "compressed-tensors":
        for group in (quant.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
            if kind == "float":
                return "fp8" if bits == 8 else "mxfp4" if size == 32 else "nvfp4"
            return kept_in(bits, 1 << 14, (1 << 14) // size if size and size > 0 else 1, not weights.get("symmetric", True), "BF16") or f"int{bits}"
    if method == "modelopt" and "FP8" in str(quant.get("quant_algo")):
        return "fp8"
    return BY_METHOD.get(method, "bf16")


def read(config: Mapping[str, Any], options: Options) -> tuple[Model, Options]:
    """The model that a bare config describes, by a native row, else counted on transformers' skeleton; and the options as it means them."""
    found, options = bridge_to(Source("config.json", Path(), dict(config), ()), options)
    return found.model if found else families.read(dict(config)).first(options.layers), options


def forecast(name: str | None, options: Options, config_only: bool = False) -> tuple[plans.Plan, Machine]:
    """The plan and the machine it is for. config_only: `name` is a config.json or a folder with one, and its weights are not looked at."""
    machine = plans.imagined(machines.this_machine(options.cache_dir, options.device), options)
    if config_only and name is not None:
        config = read_config(Path(name).expanduser())
        comes: str | list[str] = arriving(config)
        model, options = read(config, options)
        return plans.plan(model, machine, options, comes), machine
    source = open_source(name, partial(fetch, offline=options.offline, progress=lambda *_: None))
    skeleton, options = bridge_to(source, options)
    model = skeleton.model if skeleton else source.spec().first(options.layers)
    if options.load_format == "dummy":
        comes = arriving(source.config)
    else:
        checkpoint = open_weights(source, model, skeleton)
        comes = [checkpoint.expert_arrives(l) for l in model.moe_layers] or "bf16"
        checkpoint.close()
    return plans.plan(model, machine, options, comes), machine
