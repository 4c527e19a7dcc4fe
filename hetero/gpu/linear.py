"""Dense matrices on the GPU in Triton: matrix-vector products for decode, 8-bit weights at any size, the gate in between; knows no layer.

8-bit is weight-only: int8 codes with one float32 scale per row and 128 columns, largest magnitude / 127, multiplied in 16 bits with float32 sums.
"""

import torch
import triton
import triton.language as tl

from hetero.arch.spec import Act
from hetero.gpu.launch import early, follow

GROUP = 128                              # columns that share a scale
AT_ONCE = 1 << 24                        # weights that are quantized at a time
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}


@triton.jit
def activated(g, KIND: tl.constexpr, alpha):
    """kind(alpha * g) / alpha in float32."""
    z = g * alpha
    if KIND == 0:
        y = z / (1.0 + tl.exp(-z))
    elif KIND == 1:
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif KIND == 2:
        y = z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    else:
        y = tl.where(z > 0, z * z, 0.0)
    return y / alpha


@triton.jit
def _glu(gate_up, out, alpha, limit, shift, I, KIND: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < I
    g = tl.load(gate_up + t * 2 * I + o, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + t * 2 * I + I + o, mask=inside, other=0.0).to(tl.float32)
    if LIMIT:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
    tl.store(out + t * I + o, (activated(g, KIND, alpha) * (u + shift)).to(out.dtype.element_ty), mask=inside)


def glu(act: Act, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I], gate | up -> [T, I]."""
    T, I = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(T, I, dtype=gate_up.dtype, device=gate_up.device)
    _glu[(T, triton.cdiv(I, 1024))](gate_up, out, act.alpha, act.limit or 0.0, act.up_shift, I, KIND=KINDS[act.kind], LIMIT=act.limit is not None,
                                    BLOCK=1024, num_warps=4, **early(gate_up))
    return out


@triton.jit
def _gemv(x, w, scales, bias, out, N, K, BN: tl.constexpr, BG: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
          EARLY: tl.constexpr):
    """Program (block of rows, token): BN rows of W times one token, BG groups of columns at a time; weights float or int8 with scales."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.arange(0, BG)
    k = tl.arange(0, GROUP)
    groups = tl.cdiv(K, GROUP)
    row = w + n.to(tl.int64)[:, None, None] * K + k[None, None, :]
    live = (n < N)[:, None, None]
    acc = tl.zeros((BN, BG, GROUP), tl.float32)
    at = g[None, :, None] * GROUP
    ahead = tl.load(row + at, mask=live & (at + k[None, None, :] < K), other=0)
    follow(EARLY)                                            # the first weights are on their way before x is there
    for first in range(0, groups, BG):
        at = (first + g)[None, :, None] * GROUP
        inside = at + k[None, None, :] < K
        v = ahead
        ahead = tl.load(row + at + BG * GROUP, mask=live & (at + BG * GROUP + k[None, None, :] < K), other=0)
        if CODES:
            v = v.to(x.dtype.element_ty)                     # int8 to 16 bits is a byte permutation, to float32 a slow conversion
        v = v.to(tl.float32)
        y = tl.load(x + t * K + at + k[None, None, :], mask=inside, other=0.0).to(tl.float32)
        if CODES:
            s = tl.load(scales + n[:, None] * groups + (first + g)[None, :], mask=(n < N)[:, None] & (first + g < groups)[None, :], other=0.0)
            acc += v * y * s[:, :, None]
        else:
            acc += v * y
    r = tl.sum(tl.sum(acc, 2), 1)
    if BIAS:
        r += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + t * N + n, r.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _gemm(x, w, scales, bias, out, T, N, K, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
          EARLY: tl.constexpr, PRECISE: tl.constexpr):
    """int8 weights times many tokens; one group of columns per round, so that a scale multiplies a whole partial product."""
    follow(EARLY)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, GROUP)
    groups = tl.cdiv(K, GROUP)
    acc = tl.zeros((BN, BM), tl.float32)
    for g in range(groups):
        at = g * GROUP + k
        a = tl.load(x + m[None, :].to(tl.int64) * K + at[:, None], mask=(m < T)[None, :] & (at < K)[:, None], other=0.0)
        b = tl.load(w + n[:, None].to(tl.int64) * K + at[None, :], mask=(n < N)[:, None] & (at < K)[None, :], other=0).to(a.dtype)
        s = tl.load(scales + n * groups + g, mask=n < N, other=0.0)
        acc += tl.dot(b, a, input_precision=PRECISE) * s[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], acc.to(out.dtype.element_ty), mask=(m < T)[None, :] & (n < N)[:, None])


@triton.jit
def _expand(w, scales, out, K, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block of columns, row): the row's codes times their scales."""
    n = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(scales + n * groups + k // GROUP, mask=k < K, other=0.0)
    v = tl.load(w + n * K + k, mask=k < K, other=0).to(tl.float32) * s
    tl.store(out + n * K + k, v.to(out.dtype.element_ty), mask=k < K)


def expand(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K] in `dtype`, for as long as the caller holds it: cheaper than to unpack it again for every block of many tokens."""
    N, K = codes.shape
    out = torch.empty(N, K, dtype=dtype, device=codes.device)
    _expand[(triton.cdiv(K, 2048), N)](codes, scales, out, K, scales.shape[1], GROUP=GROUP, BLOCK=2048, num_warps=4)
    return out


def quantize(w: torch.Tensor, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float -> (int8 [N, K], float32 scales [N, ceil(K / 128)]) on `device` (None: where w is), some rows at a time: a card that is nearly
    full has no room for a head in float32."""
    (N, K), device = w.shape, w.device if device is None else device
    codes = torch.empty(N, K, dtype=torch.int8, device=device)
    scales = torch.empty(N, -(-K // GROUP), device=device)
    rows = max(1, AT_ONCE // K)
    for at in range(0, N, rows):
        part = w[at:at + rows].to(device).float()
        g = torch.nn.functional.pad(part, (0, -K % GROUP)).view(len(part), -1, GROUP)
        s = g.abs().amax(-1) / 127
        scales[at:at + rows] = s
        codes[at:at + rows] = (g / s.clamp(min=1e-30)[..., None]).round_().view(len(part), -1)[:, :K].to(torch.int8)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The twin of what the kernels multiply with: float32 [N, K]."""
    return codes.float() * scales.repeat_interleave(GROUP, 1)[:, :codes.shape[1]]


def gemv_blocks(rows: int, cols: int, itemsize: int) -> tuple[int, int, int]:
    """(rows, groups of columns, warps) of a program: the best of a sweep over 5120 x 2048, 2048 x 4096 and 151936 x 2048."""
    most = triton.next_power_of_2(triton.cdiv(cols, GROUP))
    if itemsize == 1:
        return 1, min(8, most), 2
    return (2 if itemsize == 2 and rows <= 32768 else 4 if itemsize == 2 else 1), min(8 if itemsize == 2 else 16, most), 4


def gemv(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] (few tokens: each reads W again) times w [N, K] (float, or int8 with scales) -> [T, N] of `dtype`, float32 sums."""
    T, (N, K) = x.shape[0], w.shape
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    BN, BG, warps = gemv_blocks(N, K, w.element_size())
    _gemv[(triton.cdiv(N, BN), T)](x, w, x if scales is None else scales, x if bias is None else bias, out, N, K, BN=BN, BG=BG,
                                   CODES=scales is not None, BIAS=bias is not None, GROUP=GROUP, num_warps=warps, **early(x))
    return out


def gemm(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] times int8 codes [N, K] with scales -> [T, N] of `dtype`."""
    T, (N, K) = x.shape[0], codes.shape
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    BM, BN = (16, 32) if T <= 16 else (32, 32) if T <= 32 else (64, 64) if x.dtype == torch.float32 or T <= 64 else (128, 64)
    warps, stages = (2, 4) if BM == 16 else (4, 4) if BM < 128 else (8, 3)
    if N <= 4096 and BM <= 32:
        BN, warps, stages = 16, 4, 5                         # few rows: more programs
    _gemm[(triton.cdiv(N, BN), triton.cdiv(T, BM))](x, codes, scales, x if bias is None else bias, out, T, N, K, BM=BM, BN=BN, BIAS=bias is not None,
                                                    GROUP=GROUP, PRECISE="ieee" if x.dtype == torch.float32 else "tf32",
                                                    num_warps=warps, num_stages=stages if x.element_size() == 2 else 1, **early(x))
    return out
