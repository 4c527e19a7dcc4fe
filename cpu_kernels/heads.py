"""What attention does before it attends: norm, clip and rotate the heads of q and k, and store k and v (or MLA's latent) in their pages.

A token's arithmetic never depends on its neighbours or the threads. Knows no scores and no model.
"""

from typing import Any

import numpy as np
from numba import carray

from .atoms import peek
from .jit import kernel
from .jobs import share
from .operands import f32, f64, i32, i64, rms, u8, u16, u32

KV_TYPES = {"f32": 0, "bf16": 1, "fp8": 2, "fp16": 3}
QK_NORMS = {"none": 0, "head": 1, "full": 2, "rotated": 3}


@kernel(inner=True)
def bf16_of(bits: int) -> int:
    """The bf16 nearest to a float32, both as bits; ties to even, NaN stays NaN."""
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@kernel(inner=True)
def rounded(mantissa: int, shift: int) -> int:
    """A 24-bit mantissa without its lowest `shift` (at least 1) bits, rounded to the nearest, ties to even."""
    if shift > 24:
        return 0
    half, whole, rest = 1 << (shift - 1), mantissa >> shift, mantissa & ((1 << shift) - 1)
    return whole + 1 if rest > half or (rest == half and whole & 1) else whole


@kernel(inner=True)
def f16_of(bits: int) -> int:
    """The float16 nearest to a float32, both as bits; ties to even, too large becomes infinity, NaN stays NaN."""
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return sign | 0x7E00
    if size >= 0x477FF000:                               # 65520
        return sign | 0x7C00
    if size < 0x38800000:                                # below 2^-14: steps of 2^-24
        return sign | rounded((size & 0x7FFFFF) | 0x800000, 126 - (size >> 23))
    return sign | (((size + 0xFFF + ((size >> 13) & 1)) >> 13) - 0x1C000)


@kernel(inner=True)
def e4m3_of(bits: int) -> int:
    """The float8 e4m3 nearest to a float32 of magnitude at most 448, as bits; ties to even; NaN becomes 0x7F."""
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return 0x7F
    if size < 0x3C800000:                                # below 2^-6: steps of 2^-9
        return sign | rounded((size & 0x7FFFFF) | 0x800000, 141 - (size >> 23))
    return sign | (((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960)


@kernel(inner=True)
def rotate(x: Any, cos: Any, sin: Any, half: int, interleaved: int) -> None:
    """In place: the first 2 * half of one head's dimensions, pairs side by side (interleaved) or half apart."""
    if interleaved:
        for i in range(half):
            a, b = x[2 * i], x[2 * i + 1]
            x[2 * i], x[2 * i + 1] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
    else:
        for i in range(half):
            a, b = x[i], x[half + i]
            x[i], x[half + i] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@kernel(inner=True)
def keep(x: int, n: int, pages: int, scales: int, place: int, kind: int) -> None:
    """Stores n float32 at address x as vector number `place` of the pages, in their type; fp8 with one scale."""
    if kind == 0:
        source, target = carray(f32(x), n), carray(f32(pages + 4 * n * place), n)
        for i in range(n):
            target[i] = source[i]
        return
    bits = carray(u32(x), n)
    if kind == 1 or kind == 3:
        short = carray(u16(pages + 2 * n * place), n)
        for i in range(n):
            short[i] = bf16_of(np.int64(bits[i])) if kind == 1 else f16_of(np.int64(bits[i]))
        return
    source = carray(f32(x), n)
    most = np.float32(0)
    for i in range(n):
        most = max(most, abs(source[i]))
        if source[i] != source[i]:
            most = source[i]
            break
    scale = max(most, np.float32(1e-12)) / np.float32(448)
    carray(f32(scales + 4 * place), 1)[0] = scale
    codes = carray(u8(pages + n * place), n)
    for i in range(n):
        source[i] /= scale
        codes[i] = e4m3_of(np.int64(bits[i]))


@kernel(inner=True)
def heads_in(control: int, tid: int, threads: int, arguments: int) -> int:
    """Clip, norm and rotate q and k, store k and v. q stays in qkv; k and v there become scratch.

    operands: qkv [T, (heads + 2 kv_heads) D], T, heads, kv_heads, D, q_norm, k_norm, norm kind, cos, sin [positions, half] or 0, half, interleaved,
    positions i32 [T], slots i64 [T], page size, keys, values, key scales, value scales, page type; reals: eps, clip (0: none)."""
    reals = carray(f64(peek(arguments)), 2)
    eps, clip = reals[0], np.float32(reals[1])
    base, T, heads, kv_heads, D = (peek(arguments + 8), peek(arguments + 16), peek(arguments + 24), peek(arguments + 32), peek(arguments + 40))
    q_norm, k_norm, norms = peek(arguments + 48), peek(arguments + 56), peek(arguments + 64)
    cos, sin, half, interleaved = peek(arguments + 72), peek(arguments + 80), peek(arguments + 88), peek(arguments + 96)
    positions, slots, size = carray(i32(peek(arguments + 104)), T), carray(i64(peek(arguments + 112)), T), peek(arguments + 120)
    keys, values, key_scales, value_scales, kind = (peek(arguments + 128), peek(arguments + 136), peek(arguments + 144), peek(arguments + 152),
                                                    peek(arguments + 160))
    width = (heads + 2 * kv_heads) * D
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        at = base + 4 * width * t
        row = carray(f32(at), width)
        if norms == 2:
            q = carray(f32(at), heads * D)
            k = carray(f32(at + 4 * heads * D), kv_heads * D)
            rms(q, carray(f32(q_norm), heads * D), heads * D, eps, q)
            rms(k, carray(f32(k_norm), kv_heads * D), kv_heads * D, eps, k)
        if clip > 0:
            for i in range(width):
                row[i] = min(max(row[i], -clip), clip)
        for h in range(heads + kv_heads):
            x, weight = carray(f32(at + 4 * h * D), D), carray(f32(q_norm if h < heads else k_norm), D)
            if norms == 1:
                rms(x, weight, D, eps, x)
            if cos != 0:
                p = positions[t] * half * 4
                rotate(x, carray(f32(cos + p), half), carray(f32(sin + p), half), half, interleaved)
            if norms == 3:
                rms(x, weight, D, eps, x)
        page, offset = slots[t] // size, slots[t] % size
        for h in range(kv_heads):
            place = (page * kv_heads + h) * size + offset
            keep(at + 4 * (heads + h) * D, D, keys, key_scales, place, kind)
            keep(at + 4 * (heads + kv_heads + h) * D, D, values, value_scales, place, kind)
    return 0


@kernel(inner=True)
def latent_in(control: int, tid: int, threads: int, arguments: int) -> int:
    """MLA: norms and rotates the latent and stores it; rotates q's last part in place. latent becomes scratch.

    operands: q [T, heads (nope + 2 half)], latent [T, rank + 2 half], T, heads, nope, rank, kv_norm, cos, sin, half, interleaved, positions, slots,
    pages, scales, page type; reals: eps."""
    eps = carray(f64(peek(arguments)), 1)[0]
    q, latent, T, heads, nope, rank = (peek(arguments + 8), peek(arguments + 16), peek(arguments + 24), peek(arguments + 32), peek(arguments + 40),
                                       peek(arguments + 48))
    cos, sin, half, interleaved = peek(arguments + 64), peek(arguments + 72), peek(arguments + 80), peek(arguments + 88)
    positions, slots = carray(i32(peek(arguments + 96)), T), carray(i64(peek(arguments + 104)), T)
    weight, width, head = carray(f32(peek(arguments + 56)), rank), rank + 2 * half, nope + 2 * half
    lo, hi = share(T, tid, threads)
    for t in range(lo, hi):
        p = positions[t] * half * 4
        c, s = carray(f32(cos + p), half), carray(f32(sin + p), half)
        at = latent + 4 * width * t
        x = carray(f32(at), rank)
        rms(x, weight, rank, eps, x)
        rotate(carray(f32(at + 4 * rank), 2 * half), c, s, half, interleaved)
        keep(at, width, peek(arguments + 112), peek(arguments + 120), slots[t], peek(arguments + 128))
        for h in range(heads):
            rotate(carray(f32(q + 4 * ((t * heads + h) * head + nope)), 2 * half), c, s, half, interleaved)
    return 0
