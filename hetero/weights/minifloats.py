"""Floats of eight and four bits: FP8 (per tensor, channel or block), MXFP4 and NVFP4; knows parts by kind, no file.

MXFP4: E2M1 with one E8M0 per 32 (OCP microscaling 1.0), gpt-oss blocks/scales and compressed-tensors spellings. NVFP4: E2M1 with one E4M3 per
16 and one float per tensor: compressed-tensors divides by `weight_global_scale`, modelopt multiplies by `weight_scale_2`.
"""

from collections.abc import Callable

import numpy as np

from hetero.errors import BadCheckpoint
from hetero.weights.layout import Place
from hetero.weights.reading import Codes, Parts, Reading
from hetero.weights.stored import E2M1, E8M0, to_f32

TWICE = (2 * E2M1).astype(np.int8)       # E2M1 doubled is a small integer, so MXFP4 is int8 with half the scale, exactly
PAIRS: dict[np.dtype, np.ndarray] = {table.dtype: np.stack([table[np.arange(256) & 15], table[np.arange(256) >> 4]], -1) for table in (E2M1, TWICE)}


def nibbles(packed: np.ndarray, dtype: type) -> np.ndarray:
    """uint8 [N, K / 2] to E2M1 values [N, K] (float32), or twice them (int8); the low nibble comes first."""
    return PAIRS[np.dtype(dtype)][packed].reshape(packed.shape[0], -1)


def spread(scale: np.ndarray, block: int, size: int, axis: int) -> np.ndarray:
    """Scales per block to scales per row or column, cut at `size`."""
    return np.repeat(scale, block, axis)[:size] if axis == 0 else np.repeat(scale, block, axis)[:, :size]


def fp8(place: Place, shape: tuple[int, ...], quant: dict) -> Reading | None:
    """`weight` in FP8 with `weight_scale_inv` or `weight_scale` (both multiply): one, [N], [N, 1], or one per block of rows and columns."""
    w = place.parts.get("weight")
    if w is None or w.stored.dtype not in ("F8_E4M3", "F8_E5M2"):
        return None
    kind = next((k for k in ("weight_scale_inv", "weight_scale", "scale_inv", "scale") if k in place.parts), None)
    if kind is None:
        raise BadCheckpoint(f"{place.stem}: weight is {w.stored.dtype} without weight_scale or weight_scale_inv",
                            "FP8 weights mean nothing without scales")
    scale, (N, K) = place.parts[kind], shape
    if w.shape != shape:
        raise BadCheckpoint(f"{place.stem}.weight: shape {list(w.shape)}, the config says {[N, K]}")
    rows, cols = block_size(quant)
    grid: tuple[int, ...]
    s = scale.shape
    if s == (-(-N // rows), -(-K // cols)) and s not in ((N, 1), (1, 1)):
        name, grid = f"fp8_b{rows}", s
    elif len(s) < 2 or s[1] == 1:
        name, grid = "fp8", (int(np.prod(s)), 1)
        rows, cols = N // max(grid[0], 1), K
    elif s[0] == N and s[1] and K % s[1] == 0:
        name, grid, rows, cols = f"fp8_g{K // s[1]}", s, 1, K // s[1]
    else:
        name, grid = "fp8", (0, 0)
    if name == "fp8" and grid not in ((1, 1), (N, 1)):
        raise BadCheckpoint(f"{place.stem}.{kind}: shape {list(s)} fits neither a tensor, {N} channels nor blocks of {rows} x {cols}")

    def dequantize(p: Parts) -> np.ndarray:
        scales = to_f32(p[kind], "F8_E8M0" if scale.stored.dtype == "U8" else scale.stored.dtype).reshape(grid)
        return to_f32(p["weight"], w.stored.dtype) * spread(spread(scales, rows, N, 0), cols, K, 1)

    def exact(p: Parts) -> Codes:
        scales = to_f32(p[kind], "F8_E8M0" if scale.stored.dtype == "U8" else scale.stored.dtype).reshape(grid)
        return Codes("fp8", p["weight"], spread(scales, rows, N, 0) if cols >= K else spread(spread(scales, rows, N, 0), cols, K, 1)[:, ::64])

    name += "_e5m2" * (w.stored.dtype == "F8_E5M2")
    keeps = w.stored.dtype == "F8_E4M3" and (cols >= K or cols % 64 == 0)
    return Reading(name, 8, shape, {"weight": w, kind: scale}, dequantize, exact if keeps else None, "fp8" if keeps else "")


def block_size(quant: dict) -> tuple[int, int]:
    """weight_block_size, or compressed-tensors' block_structure; 128 x 128 when the config says nothing."""
    groups = [g.get("weights") or {} for g in (quant.get("config_groups") or {}).values() if isinstance(g, dict)]
    size = quant.get("weight_block_size") or next((g["block_structure"] for g in groups if g.get("block_structure")), None) or (128, 128)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(v, int) and 0 < v <= 1 << 20 for v in size):
        raise BadCheckpoint(f"config.json: weight_block_size = {size!r}", "two positive whole numbers, [128, 128] for most")
    return size[0], size[1]


def fp4(place: Place, shape: tuple[int, ...], _: dict) -> Reading | None:
    """E2M1 packed two to a byte: gpt-oss `blocks` and `scales`, compressed-tensors `weight_packed`, modelopt `weight` of uint8."""
    kind = next((k for k in ("blocks", "weight_packed", "weight") if k in place.parts and place.parts[k].stored.dtype == "U8"), None)
    if kind is None:
        return None
    N, K = shape
    packed, scale = place.parts[kind], place.parts.get("scales" if kind == "blocks" else "weight_scale")
    if scale is None:
        raise BadCheckpoint(f"{place.stem}: {kind} of four-bit floats without scales")
    want = (N, K // 32, 16) if kind == "blocks" else (N, K // 2)
    group = K // max(scale.shape[-1], 1) if len(scale.shape) == 2 else 0
    if packed.shape != want or scale.shape[0] != N or group not in (16, 32) or K % group or scale.shape[-1] * group != K:
        raise BadCheckpoint(f"{place.stem}: {kind} {list(packed.shape)} and scales {list(scale.shape)} do not fit {[N, K]}")
    parts = {"packed": packed, "scales": scale}
    if group == 32:
        if scale.stored.dtype not in ("U8", "F8_E8M0"):
            raise BadCheckpoint(f"{place.stem}: scales per 32 are {scale.stored.dtype}, MXFP4 has E8M0")
        return Reading("mxfp4", 4, shape, parts, mx_floats, mx_codes, "mxfp4")
    overall = next(((k, f) for k, f in OVERALL if k in place.parts), None)
    if overall is None or scale.stored.dtype != "F8_E4M3":
        raise BadCheckpoint(f"{place.stem}: NVFP4 needs E4M3 scales per 16 and weight_global_scale or weight_scale_2")
    key, turn = overall
    if int(np.prod(place.parts[key].shape)) != 1:
        raise BadCheckpoint(f"{place.stem}.{key}: shape {list(place.parts[key].shape)}, one number expected")

    def dequantize(p: Parts) -> np.ndarray:
        scales = to_f32(p["scales"], "F8_E4M3") * turn(np.float32(p["overall"].reshape(-1)[0]))
        return (nibbles(p["packed"], np.float32).reshape(N, -1, 16) * scales[:, :, None]).reshape(N, K)

    def exact(p: Parts) -> Codes:
        return Codes("nvfp4", p["packed"], p["scales"], {"overall": turn(np.float32(p["overall"].reshape(-1)[0])).reshape(1)}, True)

    return Reading("nvfp4", 4, shape, parts | {"overall": place.parts[key]}, dequantize, exact, "nvfp4")


OVERALL: tuple[tuple[str, Callable[[np.float32], np.float32]], ...] = (
    ("weight_global_scale", lambda v: np.float32(1) / v), ("weight_scale_2", lambda v: v))


def mx_floats(p: Parts) -> np.ndarray:
    N = p["packed"].shape[0]
    return (nibbles(p["packed"].reshape(N, -1), np.float32).reshape(N, -1, 32) * E8M0[p["scales"]][:, :, None]).reshape(N, -1)


def mx_codes(p: Parts) -> Codes:
    return Codes("mxfp4", p["packed"].reshape(p["packed"].shape[0], -1), p["scales"], {}, True)
