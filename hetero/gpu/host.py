"""The arithmetic of a decoder on the CPU, through cpu_kernels: float32 activations, weights in the kernels' formats, one team; knows no GPU.

Each part is one prepared job over tensors' memory, run at once or, inside `record`, written down: a recorded step runs as a single job later.
A row's arithmetic depends neither on its neighbours nor on the number of threads.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cpu_kernels import attention, heads, router, small
from cpu_kernels.linear import Linear
from cpu_kernels.operands import ready
from cpu_kernels.team import Prepared, Team
from hetero.arch import spec
from hetero.gpu.ops import KV, Addend, Delta, LatentKV, Matrix, Row, Step, settled
from hetero.gpu.plain import Plain
from hetero.gpu.room import Room
from hetero.gpu.tables import scale_of

KV_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


def at(x: Tensor | None) -> int:
    """The address of a contiguous tensor, 0 for none."""
    if x is None:
        return 0
    assert x.is_contiguous()
    return x.data_ptr()


class Host:
    """Ops on a team of CPU threads."""

    name = "host"
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, context: int, team: Team, isa: str) -> None:
        self.context, self.team, self.isa = context, team, isa
        self.tape: list[Prepared] | None = None
        self.room: Room | None = None                    # of the step that is being recorded
        self.plain, self.recordable = Plain(context), True
        self.scratch = attention.Scratch(team.threads, context)
        self.spent: dict[str, float] | None = None       # seconds by job's name since somebody made it a dict

    # -- running and recording ----------------------------------------------------------------------------------------------------------

    def play(self, job: Prepared) -> None:
        """Runs a job on the team, or writes it down."""
        if self.tape is not None:
            self.tape.append(job)
            return
        began = time.perf_counter()
        self.team.run(job)
        self.spend(job.name, time.perf_counter() - began)

    def spend(self, name: str, seconds: float) -> None:
        """Counts time that went to a job, while somebody asks where it goes."""
        if self.spent is not None:
            self.spent[name] = self.spent.get(name, 0.0) + seconds

    @property
    def recording(self) -> bool:
        return self.tape is not None

    def do(self, job: Any, operands: Sequence[int], reals: Sequence[float], keep: Any) -> None:
        self.play(ready(job, operands, reals, self.kept(keep)))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A part's result."""
        return torch.empty(shape, dtype=dtype) if self.room is None else self.room.empty(shape, dtype)

    def kept(self, tensors: Any) -> Any:
        """What a job must keep alive: nothing while a step is recorded, whose rows are shared (`room`) and whose weights the decoder holds."""
        return tensors if self.room is None else None

    @contextmanager
    def record(self) -> Iterator[tuple[list[Prepared], Room]]:
        """Parts called inside are not run but listed, with the memory they will use: it must live as long as the list."""
        self.tape, self.room = tape, room = list[Prepared](), Room()
        try:
            yield tape, room
        finally:
            self.tape = self.room = None

    def tell(self, part: str, kernel: str, format: str = "f32", nbytes: int = 0, note: str = "") -> Row:
        return Row(part, "cpu", kernel, format, nbytes, self.isa, self.team.threads, self.team.cores, note)

    # -- parts --------------------------------------------------------------------------------------------------------------------------

    def embed(self, weight: Tensor, scale: float = 1.0) -> "HostEmbed":
        return HostEmbed(self, weight, scale)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> "HostNorm":
        return HostNorm(self, weight, bias, eps)

    def attend(self, part: spec.GQA, eps: float, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
               sinks: Tensor | None = None) -> "HostAttend":
        if part.gate:
            self.recordable = False                      # what cuts and gates its rows is no job
        return HostAttend(self, part, eps, *(None if t is None else t.float().contiguous() for t in (q_norm, k_norm, sinks)))

    def matrix(self, weight: Tensor, bias: Tensor | None = None, format: str = "", logits: bool = False) -> Matrix:
        return HostMatrix(self, weight, bias, format)

    def latent_attend(self, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> "HostLatentAttend":
        return HostLatentAttend(self, part, eps, kv_norm.float().contiguous(), kv_b)

    def delta(self, part: spec.GatedDeltaNet, eps: float, conv: Tensor, dt_bias: Tensor, a_log: Tensor, norm: Tensor) -> Delta:
        self.recordable = False
        return self.plain.delta(part, eps, conv, dt_bias, a_log, norm)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        assert self.tape is None                         # a layer with a gate is not recorded
        return self.plain.gate(x, gate)

    def route(self, part: spec.Router, correction: Tensor | None = None) -> "HostRoute":
        return HostRoute(self, part, None if correction is None else correction.float().flatten().contiguous())

    def glu(self, act: spec.Act, gate_up: Tensor) -> Tensor:
        T, I = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.empty(T, I)
        self.do(small.gate, [at(gate_up), T, I, small.ACTS[act.kind], at(out)], [act.alpha, act.limit or 0.0, act.up_shift], (gate_up, out))
        return out

    def add(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
        self.do(small.add, [at(x), at(delta), 0, *x.shape], [scale], (x, delta))
        return x

    def join(self, routed: Addend, shared: Tensor, gate: Tensor | None) -> Tensor:
        x = settled(routed)
        self.do(small.add, [at(x), at(shared), at(gate), *x.shape], [1.0], (x, shared, gate))
        return x

    def rows(self, x: Tensor, wanted: Tensor) -> Tensor:
        out = self.empty(wanted.shape[0], x.shape[1])
        self.do(small.rows, [at(x), at(wanted), *out.shape, at(out)], [], (x, wanted, out))
        return out


class HostEmbed:
    def __init__(self, ops: Host, weight: Tensor, scale: float) -> None:
        self.ops, self.scale = ops, scale
        self.weight = (weight if weight.dtype in (torch.bfloat16, torch.float32) else weight.float()).contiguous()

    def __call__(self, tokens: Tensor) -> Tensor:
        T, H = tokens.shape[0], self.weight.shape[1]
        out = self.ops.empty(T, H)
        bf16 = int(self.weight.dtype == torch.bfloat16)
        self.ops.do(small.embed, [at(tokens), at(self.weight), bf16, T, H, at(out)], [self.scale], (tokens, self.weight, out))
        return out

    def row(self) -> Row:
        return self.ops.tell("embed", "small.embed", KV_NAMES[self.weight.dtype], self.weight.nbytes)


class HostMatrix:
    """A matrix in a packed format; bf16 weights meet float32 activations, so their products are exact."""

    def __init__(self, ops: Host, weight: Tensor, bias: Tensor | None, format: str) -> None:
        self.ops, (self.rows, self.cols) = ops, weight.shape
        self.linear = Linear(format or ("bf16" if weight.dtype == torch.bfloat16 else "f32"), self.rows, self.cols)
        if weight.dtype == torch.bfloat16:
            self.linear.put(weight.contiguous().view(torch.uint16).numpy(), "bf16")
        else:
            self.linear.put(weight.float().contiguous().numpy())
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(-(-self.rows // 16) * 16)
            self.bias[:self.rows] = bias

    def __call__(self, x: Tensor) -> Tensor:
        out = self.ops.empty(x.shape[0], self.rows)
        if T := x.shape[0]:
            threads = self.ops.team.threads
            room = self.ops.empty(self.linear.room_nbytes(T, threads) // 4)
            self.ops.play(self.linear.prepared(at(x), T, at(out), threads, at(room), at(self.bias), self.ops.kept((x, out, room, self.bias))))
        return out

    def row(self) -> Row:
        return self.ops.tell("linear", f"linear.{self.linear.format.name}", self.linear.format.name, self.linear.nbytes)


class HostNorm:
    def __init__(self, ops: Host, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.ops, self.weight, self.eps = ops, weight.float().contiguous(), eps
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, None, 1.0)

    def add(self, x: Tensor, delta: Addend, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x, self.run(x, settled(delta), scale)

    def run(self, x: Tensor, delta: Tensor | None, scale: float) -> Tensor:
        out = self.ops.empty(*x.shape)
        self.ops.do(small.norm, [at(x), at(delta), at(self.weight), at(self.bias), *x.shape, at(out)], [self.eps, scale],
                    (x, delta, self.weight, self.bias, out))
        return out


class HostRoute:
    def __init__(self, ops: Host, part: spec.Router, correction: Tensor | None) -> None:
        self.ops, self.part, self.correction = ops, part, correction

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p, T = self.part, logits.shape[0]
        ids, weights = self.ops.empty(T, p.top_k, dtype=torch.int32), self.ops.empty(T, p.top_k)
        room = self.ops.empty(T, 2 * p.experts + p.groups)
        self.ops.do(router.route, [at(logits), T, p.experts, p.top_k, router.SCORES[p.score], at(self.correction), p.groups, p.top_groups,
                                   int(p.group_score == "top2"), int(p.renormalize), at(ids), at(weights), at(room)],
                    [p.scale, p.jitter], (logits, self.correction, ids, weights, room))
        return ids, weights

    def row(self) -> Row:
        return self.ops.tell("router", "router.route")


class HostAttend:
    def __init__(self, ops: Host, part: spec.GQA, eps: float, q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None) -> None:
        self.ops, self.part, self.eps, self.q_norm, self.k_norm, self.sinks = ops, part, eps, q_norm, k_norm, sinks
        self.table = (None, None) if part.rope is None else ops.plain.table(part.rope)
        self.scale = scale_of(part)

    def prepare(self, qkv: Tensor, kv: KV, step: Step) -> None:
        """Norms, clips and rotates q and k within qkv, and stores k and v."""
        a, (cos, sin) = self.part, self.table
        half, interleaved = (0, 0) if a.rope is None else (a.rope.dim // 2, int(a.rope.interleaved))
        self.ops.do(heads.heads_in, [
            at(qkv), qkv.shape[0], a.heads, a.kv_heads, a.head_dim, at(self.q_norm), at(self.k_norm), heads.QK_NORMS[a.qk_norm],
            at(cos), at(sin), half, interleaved, at(step.positions), at(step.slots), kv.keys.shape[2], at(kv.keys), at(kv.values),
            at(kv.key_scales), at(kv.value_scales), heads.KV_TYPES[KV_NAMES[kv.keys.dtype]]], [self.eps, a.clip or 0.0], (qkv, step, kv))

    def __call__(self, qkv: Tensor, kv: KV, step: Step) -> Tensor:
        self.prepare(qkv, kv, step)
        a, T, out = self.part, qkv.shape[0], self.ops.empty(qkv.shape[0], self.part.heads * self.part.head_dim)
        assert step.pages.stride(1) == 1
        self.ops.play(attention.attend(
            at(qkv), qkv.shape[1], T, step.lengths.shape[0], at(step.positions), at(step.starts), at(step.lengths), step.pages.data_ptr(),
            step.pages.stride(0), kv.keys.shape[2], at(kv.keys), at(kv.values), at(kv.key_scales), at(kv.value_scales),
            heads.KV_TYPES[KV_NAMES[kv.keys.dtype]], at(out), a.heads, a.kv_heads, a.head_dim, a.window or 0, at(self.sinks), self.scale,
            self.ops.scratch, self.ops.kept((qkv, kv, step, out, self.sinks))))
        return out

    def row(self) -> Row:
        return self.ops.tell("attention", "attention.grouped", "")


class HostLatentAttend:
    """MLA absorbed; kv_b stays in bf16 where it arrives so."""

    def __init__(self, ops: Host, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> None:
        self.ops, self.part, self.eps, self.kv_norm = ops, part, eps, kv_norm
        self.up = (kv_b if kv_b.dtype == torch.bfloat16 else kv_b.float()).contiguous()
        self.table, self.scale = ops.plain.table(part.rope), scale_of(part)

    def __call__(self, q: Tensor, latent: Tensor, kv: LatentKV, step: Step) -> Tensor:
        a, (cos, sin), T = self.part, self.table, q.shape[0]
        out, kind, half = self.ops.empty(T, a.heads * a.v_dim), heads.KV_TYPES[KV_NAMES[kv.latent.dtype]], a.rope.dim // 2
        self.ops.do(heads.latent_in, [
            at(q), at(latent), T, a.heads, a.nope_dim, a.kv_rank, at(self.kv_norm), at(cos), at(sin), half, int(a.rope.interleaved),
            at(step.positions), at(step.slots), at(kv.latent), at(kv.scales), kind], [self.eps], (q, latent, step, kv))
        self.ops.play(attention.attend_latent(
            at(q), T, step.lengths.shape[0], at(step.positions), at(step.starts), at(step.lengths), step.pages.data_ptr(), step.pages.stride(0),
            kv.latent.shape[1], at(kv.latent), at(kv.scales), kind, at(out), a.heads, a.nope_dim, a.rope.dim, a.kv_rank, a.v_dim, at(self.up),
            heads.KV_TYPES[KV_NAMES[self.up.dtype]], self.scale, self.ops.scratch, self.ops.kept((q, kv, step, out, self.up))))
        return out

    def row(self) -> Row:
        return self.ops.tell("attention", "attention.latent", KV_NAMES[self.up.dtype], self.up.nbytes)
