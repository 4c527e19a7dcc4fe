"""Numpy twins, in float64, of attention over pages: norms, rotation, grouped queries. Slow and obvious."""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def norm(x: Array, weight: Array, eps: float, bias: Array | None = None) -> Array:
    """RMSNorm over the last dimension; LayerNorm where there is a bias."""
    x = x.astype(np.float64)
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """x [..., D], cos and sin [..., dim / 2]: turns the first dim numbers."""
    dim = 2 * cos.shape[-1]
    out = x.astype(np.float64)
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attend(q: Array, k: Array, v: Array, positions: Array, scale: float, window: int | None = None, sinks: Array | None = None) -> Array:
    """q [T, heads, D] at positions [T]; k [L, kv_heads, D], v [L, kv_heads, D'] at 0..L-1 -> [T, heads, D']. A sink weighs nothing."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for t, at in enumerate(positions):
        first = 0 if window is None else max(0, at - window + 1)
        for h in range(q.shape[1]):
            scores = k[first:at + 1, h // group].astype(np.float64) @ q[t, h] * scale
            top = scores.max() if sinks is None else max(scores.max(), sinks[h])
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[h] - top))
            out[t, h] = weights @ v[first:at + 1, h // group] / total
    return out
