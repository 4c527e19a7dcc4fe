"""Rotary embedding: every published spelling of it into one record, and that record into frequencies; knows no tensor library.

Formulas: linear (position interpolation, arXiv 2306.15595), dynamic (NTK-aware, and its fixed-alpha form), llama3 (Llama 3.1),
yarn (arXiv 2309.00071), longrope (arXiv 2402.13753). Defaults of left-out numbers are those of transformers.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from hetero.arch.fields import Fields
from hetero.arch.spec import Rope, Scaling
from hetero.errors import UnsupportedModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "none": "default"}
# Sections of multimodal rotary positions: for text all three axes carry the same position, so they change nothing.
TEXT_ONLY = {"mrope_section", "mrope_interleaved", "finetuned"}


def read(f: Fields, head_dim: int, interleaved: bool = False, theta: float = 10000.0, partial: float = 1.0, kind: str | None = None) -> Rope | None:
    """The config's rope over heads of `head_dim`; `theta` and `partial` are the family's defaults, `kind` the layer type when they differ.

    None when the config says null for this layer type. Raises UnsupportedModel for an unknown kind, key or number.
    """
    f.skip("rope_theta", "partial_rotary_factor", "rotary_dim", "original_max_position_embeddings", "rope_type")
    raw, key = _dictionary(f, kind)
    if raw is None:
        return None
    p = Fields({k: v for k, v in raw.items() if k not in TEXT_ONLY}, f"{f.where}{key}.")
    p.seen = set()
    name = p("rope_type", "type", default="default")
    p.skip("type")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if name not in KINDS:
        raise p.refuse(p.found(("rope_type", "type")), name, ", ".join(KINDS) + " (su is longrope)")
    base = p.number("rope_theta", default=None) or f.number("rope_theta", default=theta)
    part = p.number("partial_rotary_factor", default=None)
    if part is None:
        part = f.number("partial_rotary_factor", default=None)
    if part is None:
        part = f.count("rotary_dim", default=0, least=0) / head_dim or partial
    dim = int(head_dim * part)
    if base <= 1 or not 2 <= dim <= head_dim or dim % 2:
        raise UnsupportedModel(f"rope with theta {base} over {dim} of {head_dim} dimensions", "supported: theta above 1, an even part of the head")
    context = f.count("max_position_embeddings", default=0, least=0)
    readers = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    values = readers[name](p, f, context, dim)
    p.done()
    return Rope(dim, base, interleaved, Scaling(name, tuple(sorted(values.items()))) if values else None, context)


def _dictionary(f: Fields, kind: str | None) -> tuple[dict[str, Any] | None, str]:
    """rope_parameters and rope_scaling as one dictionary, for one layer type when they are given per type."""
    new, old = f("rope_parameters", default={}), f("rope_scaling", default={})
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict):
            raise f.refuse(key, value, "a dictionary")
    per_type = any(isinstance(v, dict) for v in new.values())
    key = "rope_scaling" if old and not new else "rope_parameters"
    if per_type:
        chosen = kind or "full_attention"
        if chosen not in new:
            raise f.refuse("rope_parameters", sorted(new), f"an entry for {chosen}")
        return new[chosen], f"rope_parameters.{chosen}"
    named = [{("rope_type" if k == "type" else k): v for k, v in d.items() if k != "type" or "rope_type" not in d} for d in (new, old)]
    if clash := [k for k in named[0].keys() & named[1].keys() if named[0][k] != named[1][k]]:
        raise f.refuse("rope_scaling", {k: old.get(k, old.get("type")) for k in clash}, f"the same as rope_parameters ({named[0][clash[0]]!r})")
    return named[0] | named[1], key


def _factor(p: Fields, default: Any = None) -> float:
    factor = p.number("factor", default=default)
    if factor is None:
        raise UnsupportedModel(f"config has no {p.where}factor", "this rope type needs it")
    if factor <= 0:
        raise p.refuse("factor", factor, "a number above 0")
    return factor


def _default(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    p.expect(factor=1.0, attention_factor=1.0)
    p.skip("original_max_position_embeddings")
    return {}


def _linear(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    return {"factor": _factor(p)}


def _dynamic(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    # Written beside alpha, read by no published code.
    p.skip("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
    alpha = p.number("alpha", default=None)
    if alpha is None and not context:
        raise UnsupportedModel(f"config has no {f.where}max_position_embeddings", "dynamic rope needs it")
    return {"factor": _factor(p)} if alpha is None else {"alpha": alpha, "factor": _factor(p, 1.0)}


def _llama3(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if not 0 < low < high:
        raise p.refuse("high_freq_factor", high, f"more than low_freq_factor ({low})")
    return {"factor": _factor(p), "low": low, "high": high, "original": _original(p, f, context)}


def _original(p: Fields, f: Fields, context: int) -> float:
    found = f.count("original_max_position_embeddings", default=None) or p.count("original_max_position_embeddings", default=context or None)
    p.skip("original_max_position_embeddings")
    if not found:
        raise UnsupportedModel(f"config has no {p.where}original_max_position_embeddings", "this rope type needs it")
    return float(found)


def _yarn(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    original = _original(p, f, context)
    factor = _factor(p, context / original if context else None)
    mscale, all_dim = p.number("mscale", default=0.0), p.number("mscale_all_dim", default=0.0)
    size = p.number("attention_factor", default=None)
    p.expect(attn_factor=1.0, extrapolation_factor=1.0)
    if size is None:
        size = yarn_size(factor, mscale) / yarn_size(factor, all_dim) if mscale and all_dim else yarn_size(factor, 1.0)
    return {"factor": factor, "original": original, "size": size, "all_dim": all_dim, "truncate": p.flag("truncate", default=True),
            "beta_fast": p.number("beta_fast", default=0.0) or 32.0, "beta_slow": p.number("beta_slow", default=0.0) or 1.0}


def _longrope(p: Fields, f: Fields, context: int, dim: int) -> dict[str, Any]:
    original = _original(p, f, context)
    values: dict[str, Any] = {"original": original}
    for name in ("short", "long"):
        numbers = p(f"{name}_factor")
        if not isinstance(numbers, list) or len(numbers) != dim // 2 or not all(type(v) in (int, float) and v > 0 for v in numbers):
            raise p.refuse(f"{name}_factor", numbers, f"a list of {dim // 2} numbers above 0")
        values[name] = tuple(map(float, numbers))
    factor = _factor(p, context / original if context else None)
    size = p.number("attention_factor", default=None)
    if size is None:
        size = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return values | {"short_size": p.number("short_mscale", default=size), "long_size": p.number("long_mscale", default=size)}


def yarn_size(factor: float, m: float) -> float:
    """YaRN's growth of attention with the stretch: 0.1 m ln(factor) + 1."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_growth(rope: Rope) -> float:
    """What DeepSeek's latent attention multiplies its softmax scale with: yarn_size(factor, mscale_all_dim) squared, else 1."""
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return 1.0
    v: dict[str, Any] = dict(rope.scaling.values)
    return yarn_size(v["factor"], v["all_dim"]) ** 2 if v["all_dim"] else 1.0


def short_context(ropes: Iterable[Rope | None]) -> int | None:
    """Tokens up to which longrope turns by its short factors; None without longrope. A context beyond it turns every position by the long ones."""
    found = [int(dict(r.scaling.values)["original"]) for r in ropes if r is not None and r.scaling is not None and r.scaling.kind == "longrope"]   # type: ignore[arg-type]
    return min(found, default=None)


def stretched(ropes: Iterable[Rope | None], ctx: int) -> bool:
    """Whether a context of `ctx` tokens turns short texts otherwise than a short context would."""
    return any(r is not None and not np.array_equal(frequencies(r, ctx)[0], frequencies(r)[0]) for r in ropes)


def frequencies(rope: Rope, length: int = 0) -> tuple[np.ndarray, float]:
    """(inverse frequencies [dim / 2] float32 in radians per token, the factor on cos and sin).

    `length`: the longest sequence that will be rotated with them; only dynamic and longrope depend on it, and 0 means "within the
    original context". All keys of one cache must have been rotated with one set.
    """
    exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    base, size = rope.theta, 1.0
    if rope.scaling is None:
        return (base ** -exponent).astype(np.float32), 1.0
    v: dict[str, Any] = dict(rope.scaling.values)
    match rope.scaling.kind:
        case "linear":
            freq = base ** -exponent / v["factor"]
        case "dynamic":
            stretch = v["alpha"] if "alpha" in v else v["factor"] * max(length, rope.context) / rope.context - (v["factor"] - 1)
            freq = (base * stretch ** (rope.dim / (rope.dim - 2))) ** -exponent
        case "llama3":
            freq = _llama3_frequencies(base ** -exponent, v)
        case "yarn":
            freq, size = _yarn_frequencies(base, exponent, rope.dim, v), v["size"]
        case "longrope":
            which = "long" if length > v["original"] else "short"
            freq, size = base ** -exponent / np.array(v[which]), v[f"{which}_size"]
        case unknown:
            raise AssertionError(unknown)
    return freq.astype(np.float32), size


def _llama3_frequencies(freq: np.ndarray, v: dict[str, Any]) -> np.ndarray:
    turns = v["original"] * freq / (2 * math.pi)         # full turns within the original context
    smooth = np.clip((turns - v["low"]) / (v["high"] - v["low"]), 0, 1)
    return freq * (smooth + (1 - smooth) / v["factor"])


def _yarn_frequencies(base: float, exponent: np.ndarray, dim: int, v: dict[str, Any]) -> np.ndarray:
    def place(turns: float) -> float:
        return dim * math.log(v["original"] / (turns * 2 * math.pi)) / (2 * math.log(base))
    low, high = place(v["beta_fast"]), place(v["beta_slow"])
    if v["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    freq = base ** -exponent
    return freq / v["factor"] * ramp + freq * (1 - ramp)
