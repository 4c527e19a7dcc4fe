"""Row norms in Triton: RMSNorm or LayerNorm, with the residual add before it folded in; knows no layer and no cache."""

import torch
import triton
import triton.language as tl

from hetero.gpu.launch import early, follow


@triton.jit
def _norm(x, delta, weight, bias, total, out, eps, scale, H, BH: tl.constexpr, ADD: tl.constexpr, CENTER: tl.constexpr, BIAS: tl.constexpr,
          EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    o = tl.arange(0, BH)
    inside = o < H
    follow(EARLY)
    v = tl.load(x + row + o, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += scale * tl.load(delta + row + o, mask=inside, other=0.0).to(tl.float32)
        v = v.to(total.dtype.element_ty).to(tl.float32)      # what later layers read is what is normed
        tl.store(total + row + o, v.to(total.dtype.element_ty), mask=inside)
    if CENTER:
        v = tl.where(inside, v - tl.sum(v, 0) / H, 0.0)
    y = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / H + eps)) * tl.load(weight + o, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + o, y.to(out.dtype.element_ty), mask=inside)


def _warps(width: int) -> int:
    return 4 if width <= 1024 else 8 if width <= 4096 else 16


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, center: bool = False) -> torch.Tensor:
    """x [..., H] -> same shape and dtype: x / rms(x) * weight (Zhang & Sennrich 2019), or LayerNorm with `center`; computed in float32."""
    x = x.contiguous()
    out, H = torch.empty_like(x), x.shape[-1]
    _norm[(x.numel() // H,)](x, x, weight, weight if bias is None else bias, x, out, eps, 1.0, H, BH=triton.next_power_of_2(H), ADD=False,
                             CENTER=center, BIAS=bias is not None, num_warps=_warps(H), **early(x))
    return out


def add_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, center: bool = False,
             scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """x, delta [T, H] -> (x + scale * delta, norm of that sum), both in x's dtype; one kernel."""
    total, out, H = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _norm[(x.numel() // H,)](x, delta, weight, weight if bias is None else bias, total, out, eps, scale, H, BH=triton.next_power_of_2(H), ADD=True,
                             CENTER=center, BIAS=bias is not None, num_warps=_warps(H), **early(x))
    return total, out


@triton.jit
def _add(x, delta, gate, out, scale, H, BLOCK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < H
    size = scale
    if GATED:
        size = 1.0 / (1.0 + tl.exp(-tl.load(gate + t).to(tl.float32)))
    y = tl.load(x + t * H + o, mask=inside, other=0.0).to(tl.float32) + size * tl.load(delta + t * H + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * H + o, y.to(out.dtype.element_ty), mask=inside)


def add(x: torch.Tensor, delta: torch.Tensor, scale: float = 1.0, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x, delta [T, H] -> x + scale * delta, or with `gate` [T, 1] x + sigmoid(gate) * delta."""
    T, H = x.shape
    out = torch.empty_like(x)
    _add[(T, triton.cdiv(H, 1024))](x, delta, x if gate is None else gate, out, scale, H, BLOCK=1024, GATED=gate is not None, num_warps=4, **early(x))
    return out
