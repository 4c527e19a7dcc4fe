"""Integer weights: compressed-tensors (int-quantized, pack-quantized), GPTQ and AWQ; knows parts by kind, no file.

compressed-tensors: https://github.com/vllm-project/compressed-tensors (compressors/). GPTQ: qweight [K / n, N], n codes of `bits` per int32 along
the input; AWQ: qweight [K, N / n] along the output, nibbles in the order 0 2 4 6 1 3 5 7.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from hetero.errors import BadCheckpoint
from hetero.weights.layout import Piece, Place
from hetero.weights.reading import Codes, Floats, Parts, Reading
from hetero.weights.stored import to_f32

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)     # where output column i % 8 lies in its word


def unpack(words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words to unsigned codes (uint8), low bits first along `axis`: [.., M, ..] -> [.., M * 32 / bits, ..]."""
    if bits in (4, 8) and order is None and axis == 1:
        flat = np.ascontiguousarray(words).view(np.uint8)
        return flat if bits == 8 else np.stack([flat & 15, flat >> 4], -1).reshape(flat.shape[0], -1)
    shifts = np.array(order or range(32 // bits), np.uint32) * bits
    codes = ((words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.uint8)
    return np.moveaxis(codes, -1, axis + 1).reshape(*(s * (len(shifts) if i == axis else 1) for i, s in enumerate(words.shape)))


Integers = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]       # signed codes, scales, zeros, groups out of order


def reading_of(name: str, bits: int, shape: tuple[int, ...], parts: Mapping[str, Piece], integers: Callable[[Parts], Integers],
               keeps: str, ordered: bool) -> Reading:
    """The reading of integers: exact in the kernel format `keeps` where what is found fits into it, inputs sorted by their group."""
    def exact(p: Parts) -> Codes | Floats:
        codes, scales, zeros, groups = integers(p)
        order = None if groups is None else np.argsort(groups, kind="stable")
        equal = groups is None or len(set(np.bincount(groups, minlength=scales.shape[1]).tolist())) == 1
        made = codes_for(keeps, codes if order is None else codes[:, order], scales, zeros) if equal else None
        if made is None:
            return Floats("f32", scaled(codes, scales, zeros, groups))
        return made if order is None else replace(made, order=order.astype(np.int32))

    return Reading(name, bits, shape, parts, lambda p: scaled(*integers(p)), exact if keeps else None, keeps, ordered and bool(keeps))


def scaled(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, groups: np.ndarray | None) -> np.ndarray:
    """float32 [N, K]: codes [N, K] less zeros, times scales [N, G], of equal groups, or of group groups[k]."""
    if zeros is not None:
        codes = codes - (zeros[:, groups] if groups is not None else np.repeat(zeros, codes.shape[1] // zeros.shape[1], 1))
    if groups is not None:
        return codes.astype(np.float32) * scales[:, groups]
    N, K = codes.shape
    return (codes.astype(np.float32).reshape(N, scales.shape[1], -1) * scales[:, :, None]).reshape(N, K)


def kept_in(bits: int, K: int, G: int, zeros: bool, scale: str) -> str:
    """The kernel format that keeps groups of K / G columns exactly, "" when none does. Symmetric 16-bit scales stay per 32 (bfloat16 ones are
    fp16 too from 2^-17 on); `zeros`: there are zero points."""
    if K % G or (K // G) % 32:
        return ""
    wide = (K // G) % 64 == 0
    if bits <= 4:
        return "int4_g32" if not zeros and scale in ("F16", "BF16") else "int4_g64z" if wide else "int4_g32z"
    if wide:
        return "int8_g64z" if zeros else "int8_g64"
    return "" if zeros else "q8_0" if scale == "F16" else "int8_g32"


def codes_for(format: str, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> Codes | None:
    """Signed codes [N, K] (value = scale · (code − zero)) as `format` has them, None when they do not fit. scales, zeros [N, G]."""
    if format in ("int4_g32", "int8_g32"):
        if zeros is not None:
            codes = codes - np.repeat(zeros, codes.shape[1] // zeros.shape[1], 1)
        return Codes(format, codes.astype(np.int8), np.ascontiguousarray(np.repeat(scales, codes.shape[1] // 32 // scales.shape[1], 1)))
    if not format.endswith("z"):
        return Codes(format, codes.astype(np.int8), scales)
    zeros = np.zeros(scales.shape, np.int16) if zeros is None else zeros
    kind: type = np.int8
    if format.startswith("int4"):
        codes, zeros, kind = codes + 8, zeros + 8, np.uint8
        fits = codes.min() >= 0 and codes.max() <= 15 and zeros.min() >= 0 and zeros.max() <= 255
    else:
        fits = zeros.min() >= -128 and zeros.max() <= 127
    return Codes(format, codes.astype(kind), scales, {"zeros": np.ascontiguousarray(zeros).astype(kind)}) if fits else None


def group_name(bits: int, K: int, G: int) -> str:
    return f"int{bits}_g{K // G}" if G > 1 else f"int{bits}_channel"


def group_count(place: Place, scale: tuple[int, ...], K: int, grouped_by_index: bool) -> int:
    G = scale[1] if len(scale) == 2 else 1
    if G == 0 or (K % G and not grouped_by_index):
        raise BadCheckpoint(f"{place.stem}: {G} scales do not divide {K} inputs")
    return G


def compressed_int(place: Place, shape: tuple[int, ...], _: dict) -> Reading | None:
    """compressed-tensors: int8 `weight` [N, K] or int32 `weight_packed`, `weight_scale` [N, G] | [N, 1] | [1], perhaps zero points and g_idx."""
    parts = dict(place.parts)
    packed = "weight_packed" in parts and parts["weight_packed"].stored.dtype == "I32"
    if "weight_scale" not in parts or not (packed or ((w := parts.get("weight")) is not None and w.stored.dtype == "I8")):
        return None
    N, K = shape
    parts.pop("weight_shape", None)
    bits = 8
    if packed:
        bits = next((b for b in (2, 4, 8) if parts["weight_packed"].shape == (N, -(-K * b // 32))), 0)
        if not bits:
            raise BadCheckpoint(f"{place.stem}.weight_packed: shape {list(parts['weight_packed'].shape)} fits 2, 4 or 8 bits of {[N, K]} not")
    elif parts["weight"].shape != shape:
        raise BadCheckpoint(f"{place.stem}.weight: shape {list(parts['weight'].shape)}, the config says {[N, K]}")
    scale = parts["weight_scale"].shape
    if scale not in ((1,), (), (1, 1)) and scale[:1] != (N,):
        raise BadCheckpoint(f"{place.stem}.weight_scale: shape {list(scale)} fits neither a tensor, {N} channels nor groups of a row")
    indexed = "weight_g_idx" in parts
    G = group_count(place, scale, K, indexed)
    zero_packed = "weight_zero_point" in parts and parts["weight_zero_point"].stored.dtype == "I32"

    def integers(p: Parts) -> Integers:
        half = 1 << (bits - 1)
        codes = unpack(p["weight_packed"], bits, 1)[:, :K].astype(np.int16) - half if packed else p["weight"].astype(np.int16)
        groups = p["weight_g_idx"].astype(np.int64) if indexed else None
        if groups is not None and ((groups < 0).any() or (groups >= G).any()):
            raise BadCheckpoint(f"{place.stem}.weight_g_idx: a group outside 0..{G - 1}")
        zeros = None
        if "weight_zero_point" in p:
            zero = p["weight_zero_point"]
            zeros = unpack(zero, bits, 0)[:N].astype(np.int16) - half if zero_packed else zero.astype(np.int16).reshape(-1, G)
            zeros = np.broadcast_to(zeros, (N, G))
        scales = to_f32(p["weight_scale"], parts["weight_scale"].stored.dtype).reshape(-1, G)
        return codes, np.ascontiguousarray(np.broadcast_to(scales, (N, G))), zeros, groups

    keeps = kept_in(bits, K, G, "weight_zero_point" in parts, parts["weight_scale"].stored.dtype)
    return reading_of(group_name(bits, K, G), bits, shape, parts, integers, keeps, indexed and G > 1)


def gptq_or_awq(place: Place, shape: tuple[int, ...], quant: dict) -> Reading | None:
    """`qweight`, `qzeros`, `scales` [G, N] (and `g_idx` [K]), stored input first. GPTQ's zero points are one too small unless gptq_v2."""
    parts = {k: place.parts[k] for k in ("qweight", "qzeros", "scales", "g_idx") if k in place.parts}
    if "qweight" not in parts:
        return None
    if missing := [k for k in ("qzeros", "scales") if k not in parts]:
        raise BadCheckpoint(f"{place.stem}: has qweight but no {missing[0]}")
    N, K = shape
    got = parts["qweight"].shape
    bits = next((b for b in (2, 4, 8) if got == (K * b // 32, N)), 0)
    awq = not bits and got == (K, N // 8)
    if awq:
        bits = 4
    if not bits:
        raise BadCheckpoint(f"{place.stem}.qweight: shape {list(got)} fits neither GPTQ (2, 4, 8 bits) nor AWQ (4 bits) for {[N, K]}")
    G = parts["scales"].shape[0]
    if parts["scales"].shape != (G, N) or parts["qzeros"].shape != (G, N * bits // 32) or ("g_idx" in parts and parts["g_idx"].shape != (K,)):
        raise BadCheckpoint(f"{place.stem}: scales {list(parts['scales'].shape)} and qzeros {list(parts['qzeros'].shape)} do not fit {[N, K]}")
    group_count(place, (N, G), K, "g_idx" in parts)
    add = 0 if awq or "gptq_v2" in (quant.get("checkpoint_format"), quant.get("format")) else 1
    order = AWQ_ORDER if awq else None

    def integers(p: Parts) -> Integers:
        half = 1 << (bits - 1)
        codes = unpack(p["qweight"], bits, 1 if awq else 0, order).astype(np.int16) - half   # [K, N]
        zeros = unpack(p["qzeros"], bits, 1, order).astype(np.int16) + (add - half)          # [G, N]
        groups = p["g_idx"].astype(np.int64) if "g_idx" in p else np.arange(K) // (K // G)
        if (groups < 0).any() or (groups >= G).any():
            raise BadCheckpoint(f"{place.stem}.g_idx: a group outside 0..{G - 1}")
        ordered = K % G == 0 and np.array_equal(groups, np.arange(K) // (K // G))
        scales = np.ascontiguousarray(to_f32(p["scales"], parts["scales"].stored.dtype).T)
        return np.ascontiguousarray(codes.T), scales, np.ascontiguousarray(zeros.T), None if ordered else groups

    ordered = not awq and G > 1 and "g_idx" in parts and bool(quant.get("desc_act", True))
    keeps = kept_in(bits, K, G, awq or not quant.get("sym", False), parts["scales"].stored.dtype)
    return reading_of(f"{'awq' if awq else 'gptq'}_{group_name(bits, K, G)}", bits, shape, parts, integers, keeps, ordered)
