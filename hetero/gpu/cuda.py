"""Ops on an NVIDIA GPU: each part made once from its weights, its arithmetic in Triton kernels and cuBLAS; knows no model, no engine, no graph.

Nothing here waits for the device or branches on data, so a decode step can be captured in a CUDA graph as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero.arch import spec
from hetero.errors import UnusableHardware
from hetero.gpu import attention, linear, norm, plain, rope, router
from hetero.gpu.delta import PlainDelta
from hetero.gpu.mailbox import Awaited
from hetero.gpu.ops import KV, Addend, LatentKV, Matrix, Row, Step, settled
from hetero.gpu.tables import rope_table, scale_of

FEW, NARROW = 16, 1024                   # up to so many tokens a matrix of so few rows is read once per token
MANY = 256                               # tokens from which 8-bit weights are unpacked for cuBLAS rather than in every block of a product
VOCABULARY = 32768                       # rows from which the product for many tokens is the faster one for a single token too


def capability(device: torch.device) -> str:
    """"sm_90", or "interpreted" where Triton's interpreter stands in for a GPU (tests)."""
    if device.type != "cuda":
        return "interpreted"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class Cuda:
    """Ops with Triton kernels. dtype bfloat16 (sm_80 and newer), float16 or float32; `context` is the longest position a rope table needs."""

    name = "cuda"

    def __init__(self, context: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.context, self.device, self.dtype = context, torch.device(device), dtype
        self.isa, self.cores, self.roomy, self.flash = capability(self.device), 1, False, False
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.cores, self.roomy = properties.multi_processor_count, properties.shared_memory_per_block_optin >= 161 << 10      # type: ignore[attr-defined]
            self.flash = properties.major >= 8 and dtype != torch.float32
            if dtype == torch.bfloat16 and properties.major < 8:
                raise UnusableHardware(f"{properties.name} ({self.isa}) has no bfloat16", "use --dtype float16 on cards before the 30 series")
        self._tables: dict[spec.Rope, tuple[Tensor, Tensor]] = {}
        self.nothing = torch.zeros(2, dtype=torch.float32, device=self.device)      # stands where a kernel wants a pointer it will not read

    def own(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(self.device, dtype or self.dtype).contiguous()

    def table(self, part: spec.Rope) -> tuple[Tensor, Tensor]:
        if part not in self._tables:
            cos, sin = rope_table(part, self.context)
            self._tables[part] = self.own(cos, torch.float32), self.own(sin, torch.float32)
        return self._tables[part]

    def row(self, part: str, kernel: str, format: str = "", nbytes: int = 0, note: str = "") -> Row:
        return Row(part, str(self.device), kernel, format, nbytes, self.isa, note=note)

    def embed(self, weight: Tensor, scale: float = 1.0) -> "CudaEmbed":
        return CudaEmbed(self, weight, scale)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> "CudaNorm":
        return CudaNorm(self.own(weight, torch.float32), None if bias is None else self.own(bias, torch.float32), eps)

    def matrix(self, weight: Tensor, bias: Tensor | None = None, format: str = "", logits: bool = False) -> Matrix:
        if format in ("int8", "int8_g32"):
            return CodedMatrix(self, weight, bias, logits)
        if format not in ("", "f32", "bf16", "float"):
            raise ValueError(f"format: {format!r}; a GPU's dense matrices are kept as they arrive, as f32, bf16 or int8")
        return FloatMatrix(self, weight, bias, torch.float32 if format == "f32" else self.dtype, logits)

    def attend(self, part: spec.GQA, eps: float, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
               sinks: Tensor | None = None) -> "CudaAttend":
        return CudaAttend(self, part, eps, q_norm, k_norm, sinks)

    def latent_attend(self, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> "CudaLatentAttend":
        return CudaLatentAttend(self, part, eps, kv_norm, kv_b)

    def delta(self, part: spec.GatedDeltaNet, eps: float, conv: Tensor, dt_bias: Tensor, a_log: Tensor, norm: Tensor) -> PlainDelta:
        made = PlainDelta(part, eps, *(self.own(t, torch.float32) for t in (conv, dt_bias, a_log, norm)))
        made.note = "torch operators; prompts sequence by sequence"
        return made

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def route(self, part: spec.Router, correction: Tensor | None = None) -> "CudaRoute":
        return CudaRoute(self, part, correction)

    def glu(self, act: spec.Act, gate_up: Tensor) -> Tensor:
        return linear.glu(act, gate_up)

    def add(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
        return norm.add(x, delta, scale)

    def join(self, routed: Addend, shared: Tensor, gate: Tensor | None) -> Addend:
        return routed.plus(shared, gate) if isinstance(routed, Awaited) else norm.add(settled(routed), shared, gate=gate)

    def rows(self, x: Tensor, wanted: Tensor) -> Tensor:
        return x.index_select(0, wanted)


class CudaEmbed:
    def __init__(self, ops: Cuda, weight: Tensor, scale: float) -> None:
        self.ops, self.weight, self.scale = ops, ops.own(weight), scale

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.weight.index_select(0, tokens)
        return x if self.scale == 1.0 else x * self.scale

    def row(self) -> Row:
        return self.ops.row("embed", "torch", str(self.weight.dtype)[6:], self.weight.nbytes)


class CudaNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm.norm(x, self.weight, self.eps, self.bias, self.bias is not None)

    def add(self, x: Tensor, delta: Addend, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        if isinstance(delta, Awaited):
            return delta.add_norm(x, self.weight, self.eps, self.bias, scale)
        return norm.add_norm(x, settled(delta), self.weight, self.eps, self.bias, self.bias is not None, scale)


class FloatMatrix:
    """Float weights: a Triton product for a few tokens, cuBLAS for more."""

    def __init__(self, ops: Cuda, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, logits: bool) -> None:
        self.ops, self.weight, self.bias = ops, ops.own(weight, dtype), None if bias is None else ops.own(bias, dtype)
        self.out = torch.float32 if logits else ops.dtype
        self.rows, self.cols = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 or (x.shape[0] <= FEW and self.rows <= NARROW):
            return linear.gemv(x.contiguous(), self.weight, None, self.bias, self.out)
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.out)

    def row(self) -> Row:
        return self.ops.row("linear", "triton.gemv for one token, cublas for more", str(self.weight.dtype)[6:], self.weight.nbytes)


class CodedMatrix:
    """8-bit weights, see `linear`."""

    def __init__(self, ops: Cuda, weight: Tensor, bias: Tensor | None, logits: bool) -> None:
        self.ops = ops
        self.codes, self.scales = linear.quantize(weight, ops.device)
        self.bias = None if bias is None else ops.own(bias)
        self.out = torch.float32 if logits else ops.dtype
        self.rows, self.cols = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.shape[0] == 1 and self.rows < VOCABULARY:
            return linear.gemv(x, self.codes, self.scales, self.bias, self.out)
        if x.shape[0] >= MANY and self.rows < VOCABULARY:
            return F.linear(x, linear.expand(self.codes, self.scales, x.dtype), self.bias).to(self.out)
        return linear.gemm(x, self.codes, self.scales, self.bias, self.out)

    def row(self) -> Row:
        return self.ops.row("linear", f"triton.gemv for one token, triton.gemm for more, cublas from {MANY}", "int8",
                            self.codes.nbytes + self.scales.nbytes)


class CudaAttend:
    def __init__(self, ops: Cuda, part: spec.GQA, eps: float, q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None) -> None:
        self.ops, self.part, self.eps, self.scale = ops, part, eps, scale_of(part)
        self.q_norm, self.k_norm, sink = (ops.nothing if t is None else ops.own(t, torch.float32) for t in (q_norm, k_norm, sinks))
        self.sinks = None if sinks is None else sink
        self.whole = ops.flash and sinks is None and part.window is None
        self.cos, self.sin = (ops.nothing, ops.nothing) if part.rope is None else ops.table(part.rope)

    def __call__(self, qkv: Tensor, kv: KV, step: Step) -> Tensor:
        part = self.part
        q = rope.place(part, self.eps, qkv, kv, step, self.cos, self.sin, self.q_norm, self.k_norm)
        if step.before >= 0 and q.shape[0] >= MANY and self.whole and kv.key_scales is None:
            return attention.attend_alone(q, kv, step, self.scale).flatten(1)
        reach = step.pages.shape[1] * kv.keys.shape[2]
        splits = 1 if step.longest > 1 else attention.splits_for(q.shape[0] * part.kv_heads, min(reach, part.window or reach), self.ops.cores)
        return attention.attend(q, kv, step, self.scale, part.window, self.sinks, splits, self.ops.roomy).flatten(1)

    def row(self) -> Row:
        return self.ops.row("attention", "triton.paged_gqa", note=f"torch's own for {MANY} tokens and more of a sequence alone" if self.whole else "")


class CudaLatentAttend:
    """MLA absorbed: queries go into the latent space and results come out of it by batched products, one per head."""

    def __init__(self, ops: Cuda, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> None:
        if ops.isa.startswith("sm_7"):
            raise UnusableHardware(f"latent attention needs 68 KiB of shared memory per block, {ops.isa} has 64", "--device cpu, or a newer card")
        self.ops, self.part, self.eps, self.scale = ops, part, eps, scale_of(part)
        self.kv_norm = ops.own(kv_norm, torch.float32)
        key_up, value_up = ops.own(kv_b).unflatten(0, (part.heads, -1)).split([part.nope_dim, part.v_dim], 1)
        self.key_up, self.value_up = key_up.contiguous(), value_up.transpose(1, 2).contiguous()      # [heads, nope, rank], [heads, rank, v]
        self.cos, self.sin = ops.table(part.rope)

    def __call__(self, q: Tensor, latent: Tensor, kv: LatentKV, step: Step) -> Tensor:
        a, T = self.part, q.shape[0]
        q = q.view(T, a.heads, a.nope_dim + a.rope.dim)
        rope.place_latent(q, latent, kv, step, self.cos, self.sin, self.kv_norm, self.eps, a.nope_dim, a.rope.interleaved)
        inside = torch.empty(T, a.heads, a.kv_rank + a.rope.dim, dtype=q.dtype, device=q.device)
        inside[..., :a.kv_rank] = torch.bmm(q[..., :a.nope_dim].transpose(0, 1), self.key_up).transpose(0, 1)
        inside[..., a.kv_rank:] = q[..., a.nope_dim:]
        blocks = T * -(-a.heads // 16)
        splits = 1 if step.longest > 1 else attention.splits_for(blocks, step.pages.shape[1] * kv.latent.shape[1], self.ops.cores)
        y = attention.attend_latent(inside, kv, step, a.kv_rank, self.scale, splits)
        return torch.bmm(y.transpose(0, 1), self.value_up).transpose(0, 1).reshape(T, a.heads * a.v_dim)

    def row(self) -> Row:
        return self.ops.row("attention", "triton.paged_mla", str(self.key_up.dtype)[6:], self.key_up.nbytes + self.value_up.nbytes)


class CudaRoute:
    def __init__(self, ops: Cuda, part: spec.Router, correction: Tensor | None) -> None:
        self.ops, self.part = ops, part
        self.correction = None if correction is None else ops.own(correction, torch.float32).flatten()
        self.fused = part.score in router.SCORES

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            return router.route(self.part, logits, self.correction)
        return plain.select(self.part, logits, self.correction)

    def row(self) -> Row:
        return self.ops.row("router", "triton.route" if self.fused else "torch", note="" if self.fused else f"no kernel for {self.part.score}")
