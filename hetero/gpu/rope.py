"""What lies between the projections and attention, in one Triton kernel: norm of q and k, clip, rotary embedding, k and v into their pages.

Knows no attention. float8 pages hold e4m3 codes made and read by integer arithmetic, so that cards without float8 instructions agree with those
that have them (format: Micikevicius et al. 2022, "FP8 formats for deep learning").
"""

import torch
import triton
import triton.language as tl

from hetero.arch.spec import GQA
from hetero.gpu.launch import early, follow
from hetero.gpu.ops import KV, LatentKV, Step

FP8_MAX = 448.0


@triton.jit
def to_e4m3(v):
    """float32 within ±448 -> the e4m3 code as uint8, to nearest, ties to even."""
    a = tl.abs(v)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (a * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(a < 0.015625, tiny, normal)
    return (code | tl.where(v < 0, 128, 0)).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """e4m3 code as uint8 -> its value times 2^-8 as float16, exactly (the caller's scale makes up for the 256)."""
    c = code.to(tl.int16)
    return (((c & 0x80) << 8) | ((c & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def put_row(y, row, scale_at, out, scales, at, mask, FP8: tl.constexpr):
    """Store one vector at out[row + at], as it is or as e4m3 with its own scale."""
    if FP8:
        s = tl.max(tl.where(mask, tl.abs(y), 0.0), 0) / 448.0
        s = tl.where(s > 0, s, 1.0)
        tl.store(scales + scale_at, s)
        tl.store(out + row + at, to_e4m3(tl.minimum(tl.maximum(y / s, -448.0), 448.0)), mask=mask)
    else:
        tl.store(out + row + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place(qkv, q_out, keys, values, key_scales, value_scales, cos, sin, positions, slots, q_norm, k_norm, full, eps, clip, HEADS, KV_HEADS, PAGE,
           D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, FP8: tl.constexpr,
           EARLY: tl.constexpr):
    follow(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    mask = d < D
    in_q = d < tl.where(h < HEADS, D, 0)                     # whose norm weight a lane reads
    in_k = d < tl.where(h < HEADS, 0, D)
    src = qkv + (t * (HEADS + 2 * KV_HEADS) + h) * D
    x = tl.load(src + d, mask=mask, other=0.0).to(tl.float32)
    is_q = h < HEADS
    is_v = h >= HEADS + KV_HEADS
    kh = h - HEADS
    if R > 0:
        turned = d < R
        if INTERLEAVED:
            mate = tl.where(turned, d ^ 1, d)
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
            f = d // 2
        else:
            mate = tl.where(d < R // 2, d + R // 2, tl.where(turned, d - R // 2, d))
            sign = tl.where(d < R // 2, -1.0, 1.0)
            f = d % (R // 2)
        y = tl.load(src + mate, mask=mask, other=0.0).to(tl.float32)
    else:
        mate = d
        y = x
    if is_v == 0:
        if NORM == 1 or NORM == 3:                           # 1: each head before rope, 3: the whole row before rope
            if NORM == 1:
                r = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
                off = 0
            else:
                r = tl.load(full + t * 2 + tl.where(is_q, 0, 1))
                off = tl.where(is_q, h, kh) * D
            w = tl.where(is_q, tl.load(q_norm + off + d, mask=in_q, other=0.0).to(tl.float32),
                         tl.load(k_norm + off + d, mask=in_k, other=0.0).to(tl.float32))
            x = x * r * w
            if R > 0:
                wm = tl.where(is_q, tl.load(q_norm + off + mate, mask=in_q, other=0.0).to(tl.float32),
                              tl.load(k_norm + off + mate, mask=in_k, other=0.0).to(tl.float32))
                y = y * r * wm
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
        y = tl.minimum(tl.maximum(y, -clip), clip)
    if is_v == 0:
        if R > 0:
            p = tl.load(positions + t).to(tl.int64)
            c = tl.load(cos + p * (R // 2) + f, mask=turned, other=1.0)
            s = tl.load(sin + p * (R // 2) + f, mask=turned, other=0.0)
            x = x * c + sign * y * s
        if NORM == 2:                                        # each head after rope
            r = 1.0 / tl.sqrt(tl.sum(tl.where(mask, x * x, 0.0), 0) / D + eps)
            w = tl.where(is_q, tl.load(q_norm + d, mask=in_q, other=0.0).to(tl.float32),
                         tl.load(k_norm + d, mask=in_k, other=0.0).to(tl.float32))
            x = x * r * w
    if is_q:
        tl.store(q_out + (t * HEADS + h) * D + d, x.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + t)
        if slot >= 0:
            n = tl.where(is_v, kh - KV_HEADS, kh)
            at = ((slot // PAGE) * KV_HEADS + n) * PAGE + slot % PAGE
            if is_v:
                put_row(x, at * D, at, values, value_scales, d, mask, FP8)
            else:
                put_row(x, at * D, at, keys, key_scales, d, mask, FP8)


@triton.jit
def _row_rms(qkv, full, eps, NQ, NK, STRIDE, BQ: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    t = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BQ)
    q = tl.load(qkv + t * STRIDE + o, mask=o < NQ, other=0.0).to(tl.float32)
    tl.store(full + t * 2, 1.0 / tl.sqrt(tl.sum(q * q, 0) / NQ + eps))
    o = tl.arange(0, BK)
    k = tl.load(qkv + t * STRIDE + NQ + o, mask=o < NK, other=0.0).to(tl.float32)
    tl.store(full + t * 2 + 1, 1.0 / tl.sqrt(tl.sum(k * k, 0) / NK + eps))


def codes(pages: torch.Tensor) -> torch.Tensor:
    """float8 pages as uint8, other dtypes as they are."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


_NORMS = {"none": 0, "head": 1, "rotated": 2, "full": 3}


def place(part: GQA, eps: float, qkv: torch.Tensor, kv: KV, step: Step, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor,
          k_norm: torch.Tensor) -> torch.Tensor:
    """qkv [T, (heads + 2 kv_heads) * D] -> q [T, heads, D], normed and rotated; k and v go to step.slots of `kv` (a slot below 0 writes nothing).

    cos, sin [positions, rope.dim / 2] float32 with the scaling's size in them; any tensor serves where the part has no rope or no norm."""
    T, D, kind = qkv.shape[0], part.head_dim, _NORMS[part.qk_norm]
    q = torch.empty(T, part.heads, D, dtype=qkv.dtype, device=qkv.device)
    full = torch.empty(T, 2, dtype=torch.float32, device=qkv.device) if kind == 3 else cos
    if kind == 3:
        nq, nk = part.heads * D, part.kv_heads * D
        _row_rms[(T,)](qkv, full, eps, nq, nk, qkv.shape[1], BQ=triton.next_power_of_2(nq), BK=triton.next_power_of_2(nk), **early(qkv))
    fp8 = kv.key_scales is not None
    _place[(T, part.heads + 2 * part.kv_heads)](
        qkv, q, codes(kv.keys), codes(kv.values), kv.key_scales if fp8 else cos, kv.value_scales if fp8 else cos, cos, sin, step.positions,
        step.slots, q_norm, k_norm, full, eps, part.clip or 0.0, part.heads, part.kv_heads, kv.keys.shape[2], D=D, BD=triton.next_power_of_2(D),
        R=part.rope.dim if part.rope else 0, INTERLEAVED=bool(part.rope and part.rope.interleaved), NORM=kind, CLIP=part.clip is not None, FP8=fp8,
        num_warps=1, **early(qkv))
    return q


@triton.jit
def _place_latent(latent, q, pages, scales, cos, sin, positions, slots, norm, eps, HEADS, QD, RANK: tl.constexpr, BR: tl.constexpr,
                  NOPE: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr):
    """Program (t, h): h < HEADS rotates the rope part of q's head in place; h == HEADS norms and rotates the latent and stores it."""
    follow(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, R)
    if INTERLEAVED:
        mate = i ^ 1
        sign = tl.where(i % 2 == 0, -1.0, 1.0)
        f = i // 2
    else:
        mate = (i + R // 2) % R
        sign = tl.where(i < R // 2, -1.0, 1.0)
        f = i % (R // 2)
    p = tl.load(positions + t).to(tl.int64) * (R // 2)
    c = tl.load(cos + p + f)
    s = tl.load(sin + p + f)
    if h < HEADS:
        at = q + (t * HEADS + h) * QD + NOPE
        a = tl.load(at + i).to(tl.float32)
        b = tl.load(at + mate).to(tl.float32)
        tl.debug_barrier()                                   # every lane has read before one writes
        tl.store(at + i, (a * c + sign * b * s).to(q.dtype.element_ty))
    else:
        o = tl.arange(0, BR)
        inside = o < RANK
        src = latent + t * (RANK + R)
        x = tl.load(src + o, mask=inside, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)) * tl.load(norm + o, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(src + RANK + i).to(tl.float32) * c + sign * tl.load(src + RANK + mate).to(tl.float32) * s
        slot = tl.load(slots + t)
        if slot >= 0:
            row = slot * (RANK + R)
            if FP8:
                m = tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(k), 0)) / 448.0
                m = tl.where(m > 0, m, 1.0)
                tl.store(scales + slot, m)
                tl.store(pages + row + o, to_e4m3(tl.minimum(tl.maximum(x / m, -448.0), 448.0)), mask=inside)
                tl.store(pages + row + RANK + i, to_e4m3(tl.minimum(tl.maximum(k / m, -448.0), 448.0)))
            else:
                tl.store(pages + row + o, x.to(pages.dtype.element_ty), mask=inside)
                tl.store(pages + row + RANK + i, k.to(pages.dtype.element_ty))


def place_latent(q: torch.Tensor, latent: torch.Tensor, kv: LatentKV, step: Step, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor,
                 eps: float, nope: int, interleaved: bool) -> None:
    """q [T, heads, nope + rope]: its rope part is rotated in place; latent [T, rank + rope]: normed, rotated, stored at step.slots."""
    T, heads, qd = q.shape
    rank, rope = norm.shape[0], qd - nope
    fp8 = kv.scales is not None
    _place_latent[(T, heads + 1)](latent, q, codes(kv.latent), kv.scales if fp8 else cos, cos, sin, step.positions, step.slots, norm, eps, heads, qd,
                                  RANK=rank,
                                  BR=triton.next_power_of_2(rank), NOPE=nope, R=rope, INTERLEAVED=interleaved, FP8=fp8, num_warps=1,
                                  **early(q))
