"""Numpy twins of every format, of the expert FFN and of the routed layer, in float64. Slow, obvious, and what the kernels are tested against.

Knows the bytes of a tile (as the files of `rows/` document them) but no instruction set and no thread.
"""
import math
from typing import Any

import numpy as np

from . import codes as coded
from .formats import COLS, GROUP, ROWS, Format, formats_of, padded

Array = np.ndarray[Any, Any]
ZERO_INT4 = 8


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bits of bfloat16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """float32 -> uint16 bits of bfloat16, rounded to nearest even (finite values)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def as_f32(x: Array, dtype: str) -> Array:
    """Any float matrix by its tag ("f32", "f16", "bf16" as uint16) -> float32."""
    return bf16_to_f32(x) if dtype == "bf16" else np.asarray(x, np.float32)


# ---- tiles -------------------------------------------------------------------------------------------------------------------

def _tiles(x: Array, rows: int, cols: int, fill: int | float = 0) -> Array:
    """[rows, cols] -> [rows/16, cols/64, 16, 64], padded with `fill`."""
    full = np.full((padded(rows, ROWS), padded(cols, COLS)), fill, x.dtype)
    full[:rows, :cols] = x
    return full.reshape(-1, ROWS, full.shape[1] // COLS, COLS).transpose(0, 2, 1, 3)


def scale_bits(format: Format, scales: Array) -> Array:
    """float scales -> uint16 bits as stored; ValueError when the format's scale type does not hold them exactly."""
    bits = scales.astype(np.float16).view(np.uint16) if format.scale == "f16" else f32_to_bf16(scales)
    back = scale_values(format, bits)
    if not np.array_equal(back, scales.astype(np.float32)):
        raise ValueError(f"scales: {format.name} keeps {format.scale} scales, and these are not exactly that")
    return bits


def scale_values(format: Format, bits: Array) -> Array:
    """uint16 bits as stored -> float32."""
    return bits.view(np.float16).astype(np.float32) if format.scale == "f16" else bf16_to_f32(bits)


def pack(format: Format, values: Array, scales: Any = None) -> Array:
    """Bytes [rows/16, cols/64, tile] of a matrix [rows, cols]; scales are fields by name for the formats of `codes`.

    f32: float32 values. f16: float16. bf16: uint16 bits. int8_g32: int8 codes. int4_g32: uint8 codes 0..15 with zero point 8.
    Scales [rows, ceil(cols/32)].
    """
    if format.coded:
        return coded.pack(format, values, scales)
    rows, cols = values.shape
    t: Any
    if format.name == "f16":                                          # [k][n] float16
        t = _tiles(values, rows, cols).transpose(0, 1, 3, 2)
        return np.ascontiguousarray(t).view(np.uint8).reshape(*t.shape[:2], -1)
    if format.name == "f32":                                          # [k][n] float32
        t = _tiles(values.astype(np.float32), rows, cols).transpose(0, 1, 3, 2)
        return np.ascontiguousarray(t).view(np.uint8).reshape(*t.shape[:2], -1)
    if format.name == "bf16":                                         # [k/2][n][k%2] uint16
        full = _tiles(values, rows, cols)
        t = full.reshape(*full.shape[:2], ROWS, COLS // 2, 2).transpose(0, 1, 3, 2, 4)
        return np.ascontiguousarray(t).view(np.uint8).reshape(*t.shape[:2], -1)
    assert scales is not None
    nb, kb = padded(rows, ROWS) // ROWS, padded(cols, COLS) // COLS
    sc = np.zeros((nb * ROWS, 2 * kb), np.uint16)
    sc[:rows, :scales.shape[1]] = scale_bits(format, scales)
    s = np.ascontiguousarray(sc.reshape(nb, ROWS, kb, 2).transpose(0, 2, 3, 1)).view(np.uint8).reshape(nb, kb, COLS)
    if format.name == "int8_g32":                                     # [k/4][n][k%4] int8
        t = _tiles(values.astype(np.int8), rows, cols).reshape(nb, kb, ROWS, 16, 4).transpose(0, 1, 3, 2, 4)
        q = np.ascontiguousarray(t).view(np.uint8).reshape(nb, kb, -1)
    else:                                                             # [j][n][k%4], k = 4j + kk | 32 + 4j + kk
        t = _tiles(values.astype(np.uint8), rows, cols, ZERO_INT4).reshape(nb, kb, ROWS, 2, 8, 4).transpose(0, 1, 3, 4, 2, 5)
        q = (t[:, :, 0] | t[:, :, 1] << 4).reshape(nb, kb, -1)
    return np.concatenate([s, q], axis=2)


def unpack(format: Format, data: Array, rows: int, cols: int) -> tuple[Array, Any]:
    """The inverse of `pack`: (values [rows, cols], float32 scales [rows, ceil(cols/32)], fields or None)."""
    if format.coded:
        return coded.unpack(format, data, rows, cols)
    nb, kb = padded(rows, ROWS) // ROWS, padded(cols, COLS) // COLS
    t = np.ascontiguousarray(data).view(np.uint8).reshape(nb, kb, format.tile_nbytes)
    v: Any
    if format.name == "f32":
        v = t.view(np.float32).reshape(nb, kb, COLS, ROWS).transpose(0, 3, 1, 2)
        return v.reshape(nb * ROWS, kb * COLS)[:rows, :cols], None
    if format.name == "f16":
        v = t.view(np.float16).reshape(nb, kb, COLS, ROWS).transpose(0, 3, 1, 2)
        return v.reshape(nb * ROWS, kb * COLS)[:rows, :cols], None
    if format.name == "bf16":
        v = t.view(np.uint16).reshape(nb, kb, COLS // 2, ROWS, 2).transpose(0, 3, 1, 2, 4)
        return v.reshape(nb * ROWS, kb * COLS)[:rows, :cols], None
    s = np.ascontiguousarray(t[:, :, :64]).view(np.uint16).reshape(nb, kb, 2, ROWS).transpose(0, 3, 1, 2).reshape(nb * ROWS, kb * 2)
    scales = scale_values(format, np.ascontiguousarray(s[:rows, :-(-cols // GROUP)]))
    q = t[:, :, 64:]
    if format.name == "int8_g32":
        v = q.reshape(nb, kb, 16, ROWS, 4).transpose(0, 3, 1, 2, 4).reshape(nb * ROWS, kb * COLS).view(np.int8)
    else:
        j = q.reshape(nb, kb, 8, ROWS, 4)
        v = np.stack([j & 15, j >> 4], axis=2).transpose(0, 4, 1, 2, 3, 5).reshape(nb * ROWS, kb * COLS)
    return v[:rows, :cols], scales


def dequantize(format: Format, data: Array, rows: int, cols: int) -> Array:
    """Packed bytes -> float64 [rows, cols]."""
    v, scales = unpack(format, data, rows, cols)
    if format.coded:
        return coded.values(format, v, scales)
    if format.name in ("f32", "f16"):
        return v.astype(np.float64)
    if scales is None:
        return bf16_to_f32(np.ascontiguousarray(v)).astype(np.float64)
    zero = ZERO_INT4 if format.name == "int4_g32" else 0
    return (v.astype(np.float64) - zero) * np.repeat(scales.astype(np.float64), GROUP, axis=1)[:, :cols]


def quantize(format: Format, w: Array) -> tuple[Array, Any]:
    """float32 [rows, cols] -> what `pack` takes, as the packing kernels choose it. int8: largest magnitude / 127. int4: for each row and
    32 columns, of eight scales around the one that maps the largest magnitude to −8, the one with the smallest least-squares error, to five
    significant bits, and the nearest codes for it."""
    if format.name == "f32":
        return w.astype(np.float32), None
    if format.name == "f16":
        return np.clip(w, -65504, 65504).astype(np.float16), None
    if format.name == "bf16":
        return f32_to_bf16(w), None
    if format.coded:
        return coded.quantize(format, w)
    rows, cols = w.shape
    full = np.zeros((rows, padded(cols, GROUP)), np.float32)
    full[:, :cols] = w
    g = full.reshape(rows, -1, GROUP)
    top = np.take_along_axis(g, np.abs(g).argmax(-1, keepdims=True), -1)
    top = np.where(np.abs(top) > 1e-30, top, 0)
    if format.name == "int8_g32":
        scales = bf16_to_f32(f32_to_bf16(np.abs(top) / np.float32(127)))
        codes = np.clip(np.rint(g / np.where(scales == 0, 1, scales) * (scales != 0)), -127, 127)
        return codes.astype(np.int8).reshape(rows, -1)[:, :cols], scales[..., 0]
    best, codes, scales = np.full((*g.shape[:2], 1), -1.0), np.zeros_like(g), np.zeros((*g.shape[:2], 1), np.float32)
    for c in (-8.0, -9.2, -8.6, -7.4, -6.8, -6.2, 7.4, 6.6):
        q = np.clip(np.rint(g * (np.float32(c) / np.where(top == 0, np.inf, top))), -8, 7)
        xq, qq = (g * q).sum(-1, keepdims=True), np.maximum((q * q).sum(-1, keepdims=True), 1)
        better = xq * xq / qq > best
        best, codes, scales = np.where(better, xq * xq / qq, best), np.where(better, q, codes), np.where(better, xq / qq, scales)
    scales = ((scales.astype(np.float32).view(np.uint32) + np.uint32(1 << 18)) & np.uint32(0xFFF80000)).view(np.float32)
    codes = np.where(scales == 0, codes, np.clip(np.rint(g * (np.float32(1) / np.where(scales == 0, 1, scales))), -8, 7))
    scales = np.clip(scales, -65504, 65504).astype(np.float16).astype(np.float32)
    return (codes + ZERO_INT4).astype(np.uint8).reshape(rows, -1)[:, :cols], scales[..., 0]


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """float32 [..., K] -> (int8 codes [..., K], float32 scales [..., ceil(K/32)]), as the kernels do it: rint(x · (127 / max|x|)).
    A group that holds NaN or infinity has codes 0 and scale NaN."""
    x = np.asarray(x, np.float32)
    k = x.shape[-1]
    g = np.zeros((*x.shape[:-1], padded(k, GROUP)), np.float32)
    g[..., :k] = x
    g = g.reshape(*x.shape[:-1], -1, GROUP)
    top = np.abs(g).max(-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        q = np.rint(g * np.where(top > 0, np.float32(127) / top, 0).astype(np.float32)[..., None])
        scale = np.where(np.isfinite(top), top * np.float32(1 / 127), np.nan).astype(np.float32)
    q = np.where(np.isfinite(scale)[..., None], q, 0).astype(np.int8)
    return q.reshape(*g.shape[:-2], -1)[..., :k], scale


def rounded_activations(format: Format, x: Array) -> Array:
    """What the format's kernels really multiply: float64 [..., K]."""
    if format.partner == "f32":
        return np.asarray(x, np.float64)
    q, s = quantize_activations(x)
    return q.astype(np.float64) * np.repeat(s.astype(np.float64), GROUP, axis=-1)[..., :q.shape[-1]]


# ---- the expert FFN and the routed layer ---------------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])


def activate(kind: str, alpha: float, limit: float | None, up_shift: float, gate: Array, up: Array | None) -> Array:
    """act(gate) · (up + up_shift); ungated (up None): act(gate). `limit` clamps gate from above and up on both sides."""
    g = gate if limit is None or up is None else np.minimum(gate, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "silu":
            a = g / (1 + np.exp(-alpha * g))
        elif kind == "gelu":
            a = 0.5 * g * (1 + _erf(g / math.sqrt(2)))
        elif kind == "gelu_tanh":
            a = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g ** 3)))
        elif kind == "relu2":
            a = np.where(g < 0, 0, g) ** 2
        else:
            raise ValueError(f"act kind {kind!r}")
        if up is None:
            return a
        return a * ((up if limit is None else np.clip(up, -limit, limit)) + up_shift)


def ffn(form: str | Format, x: Array, gate: Array | None, up: Array, down: Array, act: tuple[str, float, float | None, float],
        biases: tuple[Any, Any, Any] = (None, None, None), scale: float = 1.0, rounded: bool = False) -> Array:
    """One expert on x [T, H] in float64. `rounded`: activations become the format's partner before each product, as in the kernels.
    `scale` multiplies the input (weight_on="input")."""
    first, last = formats_of(form)

    def take(v: Array, format: Format) -> Array:
        return rounded_activations(format, v.astype(np.float32)) if rounded else v.astype(np.float64)
    xs = take(x, first) * scale
    u = xs @ up.T + (0 if biases[1] is None else biases[1])
    if gate is None:
        h = activate(*act, u, None)
    else:
        h = activate(*act, xs @ gate.T + (0 if biases[0] is None else biases[0]), u)
    return take(h, last) @ down.T + (0 if biases[2] is None else biases[2])


def moe(form: str | Format, x: Array, ids: Array, weights: Array, matrices: Any, act: tuple[str, float, float | None, float],
        biases: Any = None, weight_on: str = "output", rounded: bool = False, orders: Array | None = None) -> Array:
    """The routed layer in float64: x [T, H]; ids, weights [T, k]; `matrices(e)` -> (gate | None, up, down) float64. ids of −1 are skipped.
    orders: of a store."""
    out = np.zeros(x.shape, np.float64)
    for t in range(x.shape[0]):
        for e, w in sorted(zip(ids[t].tolist(), weights[t].tolist(), strict=True), key=lambda p: p[0]):
            if e < 0:
                continue
            b: Any = [None if m is None else m[e].astype(np.float64) for m in biases or (None, None, None)]
            gate, up, down = matrices(e)
            mine = x[t:t + 1] if orders is None else x[t:t + 1, orders[e]]
            y = ffn(form, mine, gate, up, down, act, b, w if weight_on == "input" else 1.0, rounded)[0]
            out[t] += y if weight_on == "input" else w * y
    return out
