"""A transformers model without weights: its modules on no memory, its routed experts found and described, all of it counted; reads no file.

Parameters live on the meta device; buffers that are computed (frequencies and the like) are real. Nothing of the text's way that the
kernels cannot compute is let through: an activation is recognized by its numbers, never by a name.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from cpu_kernels.ffn import KINDS
from cpu_kernels.plain import activate
from hetero.arch import spec
from hetero.bridge.kept import count
from hetero.bridge.known import read_config, unread
from hetero.errors import UnsupportedModel

LARGE = 1 << 16
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
BESIDE = re.compile(r"vision|visual|audio|image|talker|mtp")          # modules that a text never reaches


@dataclass(frozen=True)
class Routed:
    """One module of routed experts: where it is, how transformers lays its weights out, and what the kernels are to compute."""

    name: str
    module: nn.Module
    layer: int
    moe: spec.MoE
    transposed: bool
    concatenated: bool
    post_norm: bool

    @property
    def first(self) -> str:
        return "gate_up_proj" if self.moe.gated else "up_proj"


@dataclass(frozen=True)
class Skeleton:
    """`module` is transformers' model, `model` the same as data for planning and packing. `dense`: names of what is loaded beside routed experts;
    `left`: names of what a text never reaches."""

    name: str
    module: Any
    model: spec.Model
    routed: dict[int, Routed]
    dense: tuple[str, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)


class Absent(TorchFunctionMode):
    """Tensors of many numbers are made on no memory: experts of a large model would not fit even untouched."""

    MAKERS = frozenset({torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand, torch.full})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.MAKERS and torch.Size(flat(args)).numel() >= LARGE and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def flat(sizes: Any) -> list[int]:
    """The numbers among a maker's arguments: empty(2, 3) and empty((2, 3)) alike."""
    found: list[int] = []
    for s in sizes:
        found += flat(s) if isinstance(s, (tuple, list)) else [s] if isinstance(s, int) and not isinstance(s, bool) else []
    return found


def build(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Skeleton:
    """The skeleton of the model that this config.json describes. Raises UnsupportedModel naming class and key."""
    name, made = read_config(config)
    kind = getattr(transformers, name)
    try:
        with ExitStack() as stack:
            for context in (accelerate.init_empty_weights(include_buffers=False), Absent(), no_init_weights()):
                stack.enter_context(context)
            module = kind._from_config(made, dtype=dtype, attn_implementation=None)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, IndexError, ImportError, RuntimeError) as e:
        raise UnsupportedModel(f"{name}: transformers {transformers.__version__} cannot build it from this config: {' '.join(str(e).split())[:200]}",
                               "a newer transformers may") from e
    module.eval().requires_grad_(False)
    return describe(name, module, config)


def describe(name: str, module: Any, config: dict[str, Any]) -> Skeleton:
    """What there is to load, by layer; the model as data."""
    text = module.config.get_text_config(decoder=True)
    tied = dict(module.all_tied_weights_keys)
    routed = {r.layer: r for r in find_routed(name, module, text)}
    inside = {f"{r.name}.{p}" for r in routed.values() for p, _ in r.module.named_parameters() if not p.startswith("post_expert_norm")}
    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if n not in tied}
    left = tuple(n for n in state if BESIDE.search(n))
    dense = tuple(n for n in state if n not in inside and n not in set(left))
    head, embed = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embed is None:
        raise UnsupportedModel(f"{name} has no head that makes text", "the bridge runs models that generate text")
    shapes = {n: tuple(state[n].shape) for n in dense}
    layers: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(text.num_hidden_layers)]
    others: list[tuple[str, tuple[int, ...]]] = []
    roots = {n: kind_of(n) for n in dense}
    embed_name, head_name = (next((n for n, p in module.named_parameters(remove_duplicate=False) if p is m.weight), "") for m in (embed, head))
    for n, shape in shapes.items():
        if n in (embed_name, head_name):
            continue
        m = LAYER.search(n)
        (layers[int(m[1])] if m and int(m[1]) < len(layers) else others).append((roots[n], shape))
    none = spec.Dense(0)
    each, state_numbers, known = count(module, text)
    foreign = [spec.Foreign(tuple(own), *((each, state_numbers) if l == 0 else (0, 0))) for l, own in enumerate(layers)]
    made = tuple(spec.Layer(part, routed[l].moe if l in routed else none) for l, part in enumerate(foreign))
    hidden, vocab = embed.weight.shape[1], head.weight.shape[0]
    model = spec.Model(name, hidden, vocab, 0.0, made, head_name in tied or head_name == embed_name or not head_name, {},
                       context=positions(text), others=tuple(others))
    strange = unread(config, module.config)
    asked = str((config.get("architectures") or [name])[0])
    notes = ([] if asked.lower() == name.lower() else [f"config names {asked}, which is not installed: run as {name}, by its model_type"]) + \
        ([] if known else ["bytes of the cache are counted by heads: its code would not run on no memory"]) + \
        ([f"config keys without a field in transformers' record: {', '.join(strange)}"] if strange else []) + \
        ([f"only the text part is loaded: {len(left)} tensors of other parts are not"] if left else [])
    return Skeleton(name, module, model, routed, dense, left, tuple(notes), tied)


def positions(text: Any) -> int:
    found = vars(text).get("max_position_embeddings")
    return found if isinstance(found, int) else 0


def kind_of(name: str) -> str:
    """A parameter's kind as the plan's table knows kinds, by its name."""
    rules = (("shared", "shared"), ("attn", "attn"), ("attention", "attn"), ("mixer", "attn"), ("mamba", "attn"), ("conv", "attn"),
             ("gate.weight", "router"), ("router", "router"), ("mlp", "mlp"), ("feed_forward", "mlp"), ("norm", "norms"))
    tail = LAYER.split(name)[-1]
    return f"{next((kind for part, kind in rules if part in tail), 'other')}.{tail}"


def find_routed(name: str, module: Any, text: Any) -> list[Routed]:
    """Every module on the experts interface that a text reaches, one per layer."""
    found: dict[int, Routed] = {}
    for path, m in module.named_modules():
        if "is_concatenated" not in vars(m) or "is_transposed" not in vars(m) or BESIDE.search(path):
            continue
        at = LAYER.search(path + ".")
        if at is None or int(at[1]) in found:
            raise UnsupportedModel(f"{name}: experts {path} ({type(m).__name__}) are {'the second of their layer' if at else 'in no layer'}",
                                   "the bridge runs one set of routed experts per layer")
        found[int(at[1])] = routed_of(name, path, m, int(at[1]), text)
    if not found:
        raise UnsupportedModel(f"{name}: this config has no routed experts", "hetero runs mixture-of-experts models")
    return [found[l] for l in sorted(found)]


def routed_of(name: str, path: str, m: Any, layer: int, text: Any) -> Routed:
    """One module described. Its parameters must be exactly those of the interface."""
    gated, bias, turned = bool(m.has_gate), bool(m.has_bias), bool(m.is_transposed)
    own = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=False)}
    first, rest = "gate_up_proj" if gated else "up_proj", {n for n, _ in m.named_parameters() if "." in n}
    wanted = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if bias else set())
    post = bool(vars(m).get("has_post_expert_norm", False))
    if set(own) != wanted or any(not n.startswith("post_expert_norm.") for n in rest) or (rest and not post):
        raise UnsupportedModel(f"{name}: {type(m).__name__} has the parameters {', '.join(sorted({*own, *rest}))}",
                               f"the experts interface knows {', '.join(sorted(wanted))}")
    if m._forward_hooks or m._forward_pre_hooks:
        raise UnsupportedModel(f"{name}: {path} ({type(m).__name__}) has a forward hook", "experts with hooks are not run")
    E, rows, cols = own[first]
    hidden, width = (rows, cols) if turned else (cols, rows)
    width //= 1 + gated
    top_k = next((v for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token", "top_k")
                  if isinstance(v := vars(text).get(key), (int, list))), 1)
    top_k = top_k if isinstance(top_k, int) else top_k[min(layer, len(top_k) - 1)]
    router = spec.Router(E, min(top_k, E), "foreign", False)
    moe = spec.MoE(router, width, act=fit(name, m), gated=gated, bias=bias, hidden=hidden)
    return Routed(path, m, layer, moe, turned, bool(m.is_concatenated), post)


def fit(name: str, m: Any) -> spec.Act:
    """The activation of the kernels that gives this module's numbers, on values that reach every clamp. Raises UnsupportedModel."""
    limits = [None, *sorted({float(v) for k, v in vars(m).items() if "limit" in k and isinstance(v, (int, float)) and not isinstance(v, bool)})]
    grid = torch.linspace(-1, 1, 41) * max([v for v in limits if v], default=6.0) * 1.5
    gate, up = (t.reshape(1, -1) for t in torch.meshgrid(grid, grid * 0.9 + 0.05, indexing="ij"))
    with torch.no_grad():
        if m.has_gate:
            both = torch.cat((gate, up), -1) if m.is_concatenated else torch.stack((gate, up), -1).reshape(1, -1)
            want = m._apply_gate(both).double().numpy()
        else:
            want = m.act_fn(up).double().numpy()
    arrays = (gate.double().numpy(), up.double().numpy()) if m.has_gate else (up.double().numpy(), None)
    alphas = {1.0, *(float(v) for k, v in vars(m).items() if "alpha" in k and isinstance(v, (int, float)))}
    for kind, alpha, limit, shift in product(KINDS, sorted(alphas), limits, (0.0, 1.0)):
        if (alpha != 1.0 and kind != "silu") or (not m.has_gate and (limit is not None or shift)):
            continue
        got = activate(kind, alpha, limit, shift, *arrays)
        if (np.abs(got - want) <= 2e-5 * (1 + np.abs(want))).all():
            return spec.Act(kind, alpha, limit, shift)
    keys = {k: v for k, v in vars(m.config).items() if re.search(r"act$|_act|activation|swiglu|softcap", k) and not k.startswith("_")}
    said = ", ".join(f"{k} = {v!r}" for k, v in keys.items())
    raise UnsupportedModel(f"{name}: {type(m).__name__} has an activation that the kernels do not: {said}",
                           f"the kernels compute {', '.join(KINDS)}, clamped or shifted")
