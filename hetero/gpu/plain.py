"""The arithmetic of a decoder in plain torch: the twin that every fast kernel is tested against; simple loops, any device, no speed."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.delta import PlainDelta
from hetero.gpu.ops import KV, Addend, LatentKV, Route, Row, Step, settled
from hetero.gpu.tables import rope_table, scale_of

FP8_MAX = 448.0                          # largest float8_e4m3fn

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu2": lambda x: F.relu(x).square()}


def activate(act: spec.Act, gate: Tensor) -> Tensor:
    """kind(alpha * gate) / alpha, gate clamped from above by `limit`."""
    if act.limit is not None:
        gate = gate.clamp(max=act.limit)
    return KINDS[act.kind](gate * act.alpha) / act.alpha


def glu(act: spec.Act, gate: Tensor, up: Tensor) -> Tensor:
    """activate(gate) * (up + up_shift), up clamped on both sides by `limit`."""
    if act.limit is not None:
        up = up.clamp(-act.limit, act.limit)
    return activate(act, gate) * (up + act.up_shift)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32; the result in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D]; cos, sin [T, dim / 2] for each token's position: rotates the first `dim` of D."""
    dim = 2 * cos.shape[-1]
    turned, rest = x[..., :dim].float(), x[..., dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    p, q = a * cos - b * sin, b * cos + a * sin
    out = torch.stack([p, q], -1).flatten(-2) if interleaved else torch.cat([p, q], -1)
    return torch.cat([out.to(x.dtype), rest], -1)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes float8_e4m3fn [..., D], scales f32 [...]: one scale per vector, its largest magnitude / 448."""
    scales = x.float().abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    return (x.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def write_pages(pages: Tensor, scales: Tensor | None, slots: Tensor, x: Tensor) -> None:
    """Stores x[t] (KV: [T, kv_heads, D]; latent: [T, D]) at page slots[t] // page_size, offset slots[t] % page_size."""
    size = pages.shape[-2]
    page, offset = slots // size, slots % size
    if scales is None:
        values = x.to(pages.dtype)
    else:
        values, factors = to_fp8(x)
        if x.dim() == 3:
            scales[page, :, offset] = factors
        else:
            scales[page, offset] = factors
    raw, codes = (pages.view(torch.uint8), values.view(torch.uint8)) if scales is not None else (pages, values)   # indexing knows no float8
    if x.dim() == 3:
        raw[page, :, offset] = codes
    else:
        raw[page, offset] = codes


def read_pages(pages: Tensor, scales: Tensor | None, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one sequence, float32: [length, kv_heads, D] or [length, D]; pages given back read as page 0 (masked later)."""
    size = pages.shape[-2]
    at = table[:-(-length // size)].long().clamp(min=0)
    if scales is None:
        x = pages[at].float()
    else:
        x = pages.view(torch.uint8)[at].view(pages.dtype).float() * scales[at][..., None]
    return (x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x.flatten(0, 1))[:length]


def seen(positions: Tensor, length: int, window: int | None) -> Tensor:
    """[T, length] bool: which of a sequence's tokens the tokens at `positions` see."""
    distance = positions[:, None].long() - torch.arange(length, device=positions.device)
    return (distance >= 0) & (distance < (window or length + 1))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """q [T, heads, D], k and v [L, kv_heads, D'], mask [T, L] -> [T, heads, D'], all float32. A sink is one more logit that weighs nothing."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    v = torch.where(mask.any(0)[:, None, None], v, 0.0)            # a page given back may hold anything
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :k.shape[0]], v)


def sequences(step: Step) -> list[tuple[int, int, int]]:
    """(first row, row after the last, length) of each sequence."""
    starts = step.starts.tolist()
    return [(a, b, n) for a, b, n in zip(starts[:-1], starts[1:], step.lengths.tolist(), strict=True)]


def paged_attention(q: Tensor, kv: KV, step: Step, window: int | None, scale: float, sinks: Tensor | None) -> Tensor:
    """q [T, heads, D], normed and rotated -> [T, heads, D]; the step's own k and v are in the pages already."""
    out = torch.empty_like(q)
    for s, (a, b, length) in enumerate(sequences(step)):
        keys, values = read_pages(kv.keys, kv.key_scales, step.pages[s], length), read_pages(kv.values, kv.value_scales, step.pages[s], length)
        out[a:b] = attention(q[a:b].float(), keys, values, seen(step.positions[a:b], length, window), scale, sinks).to(q.dtype)
    return out


def select(part: spec.Router, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The router: logits [T, E] -> ids [T, k] int32, weights [T, k] f32. Equal scores go to the lower id."""
    logits = logits.float()
    if part.score == "sparsemixer":
        ids, weights = sparsemixer(logits, part.jitter, part.top_k)
        return ids, weights * part.scale
    score = logits.softmax(-1) if part.score == "softmax" else logits.sigmoid() if part.score == "sigmoid" else logits
    pick = score if correction is None else score + correction.float().flatten()
    if part.groups > 1:
        grouped = pick.unflatten(-1, (part.groups, -1))
        best = grouped.amax(-1) if part.group_score == "max" else grouped.topk(2, -1)[0].sum(-1)
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top(best, part.top_groups), True)
        pick = grouped.masked_fill(~keep[..., None], -math.inf).flatten(-2)
    ids = top(pick, part.top_k)
    weights = score.gather(-1, ids)
    if part.score == "topk_softmax":
        weights = weights.softmax(-1)
    if part.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * part.scale


def sparsemixer(logits: Tensor, jitter: float, k: int) -> tuple[Tensor, Tensor]:
    """Top-1 taken k times, each weighed by a softmax over the logits close to the best one left (arXiv 2409.12136, inference)."""
    ids, weights, left = [], [], logits
    for _ in range(k):
        best, id = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        ids.append(id)
        weights.append(left.masked_fill(far, -math.inf).softmax(-1).gather(-1, id))
        left = left.scatter(-1, id, -math.inf)
    return torch.cat(ids, -1).int(), torch.cat(weights, -1)


def top(x: Tensor, k: int) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True)[1][..., :k]


class Plain:
    """Ops in torch. dtype float32 is the oracle; others round after each part as a plain torch model would."""

    name = "plain"

    def __init__(self, context: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.context, self.device, self.dtype = context, torch.device(device), dtype
        self._tables: dict[spec.Rope, tuple[Tensor, Tensor]] = {}

    def own(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(self.device, dtype or self.dtype)

    def table(self, rope: spec.Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._tables:
            cos, sin = rope_table(rope, self.context)
            self._tables[rope] = self.own(cos, torch.float32), self.own(sin, torch.float32)
        return self._tables[rope]

    def embed(self, weight: Tensor, scale: float = 1.0) -> "PlainEmbed":
        return PlainEmbed(self, self.own(weight), scale)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> "PlainNorm":
        return PlainNorm(self.own(weight, torch.float32), None if bias is None else self.own(bias, torch.float32), eps)

    def matrix(self, weight: Tensor, bias: Tensor | None = None, format: str = "", logits: bool = False) -> "PlainMatrix":
        if format not in ("", "f32", "bf16"):
            raise ValueError(f"plain arithmetic has no format {format!r}: it multiplies floats")
        dtype = torch.float32 if format == "f32" else None
        return PlainMatrix(self.own(weight, dtype), None if bias is None else self.own(bias, dtype), logits)

    def attend(self, part: spec.GQA, eps: float, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
               sinks: Tensor | None = None) -> "PlainAttend":
        return PlainAttend(self, part, eps, *(None if t is None else self.own(t, torch.float32) for t in (q_norm, k_norm, sinks)))

    def latent_attend(self, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> "PlainLatentAttend":
        return PlainLatentAttend(self, part, eps, self.own(kv_norm, torch.float32), self.own(kv_b))

    def route(self, part: spec.Router, correction: Tensor | None = None) -> "PlainRoute":
        return PlainRoute(part, None if correction is None else self.own(correction, torch.float32), str(self.device))

    def delta(self, part: spec.GatedDeltaNet, eps: float, conv: Tensor, dt_bias: Tensor, a_log: Tensor, norm: Tensor) -> PlainDelta:
        return PlainDelta(part, eps, *map(self.own, (conv, dt_bias, a_log, norm)))

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def glu(self, act: spec.Act, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return glu(act, gate, up)

    def add(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
        return x + delta * scale

    def join(self, routed: Addend, shared: Tensor, gate: Tensor | None) -> Tensor:
        return settled(routed) + (shared if gate is None else shared * gate.sigmoid())

    def rows(self, x: Tensor, wanted: Tensor) -> Tensor:
        return x[wanted]


class PlainEmbed:
    def __init__(self, ops: Plain, weight: Tensor, scale: float) -> None:
        self.weight, self.scale, self.dtype = weight, scale, ops.dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.weight[tokens]
        return x if self.scale == 1.0 else x * self.scale

    def row(self) -> Row:
        return Row("embed", str(self.weight.device), "torch", str(self.dtype)[6:], self.weight.nbytes)


class PlainNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Addend, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x = x + settled(delta) * scale
        return x, self(x)


class PlainMatrix:
    def __init__(self, weight: Tensor, bias: Tensor | None, logits: bool) -> None:
        self.weight, self.bias, self.logits = weight, bias, logits
        self.rows, self.cols = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.float() if self.logits else y.to(x.dtype)

    def row(self) -> Row:
        return Row("linear", str(self.weight.device), "torch", str(self.weight.dtype)[6:], self.weight.nbytes)


class PlainAttend:
    def __init__(self, ops: Plain, part: spec.GQA, eps: float, q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None) -> None:
        self.part, self.eps, self.q_norm, self.k_norm, self.sinks = part, eps, q_norm, k_norm, sinks
        self.scale, self.device = scale_of(part), ops.device
        self.table = None if part.rope is None else ops.table(part.rope)

    def split(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D]: normed as a whole, clipped, normed by head, rotated, normed."""
        a = self.part
        q, k, v = qkv.split([a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim], -1)
        if self.q_norm is not None and self.k_norm is not None and a.qk_norm == "full":
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        if a.clip is not None:
            q, k, v = (t.clamp(-a.clip, a.clip) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, a.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and a.qk_norm == "head":
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        if a.rope is not None and self.table is not None:
            cos, sin = (t[positions.long()] for t in self.table)
            q, k = rotate(q, cos, sin, a.rope.interleaved), rotate(k, cos, sin, a.rope.interleaved)
        if self.q_norm is not None and self.k_norm is not None and a.qk_norm == "rotated":
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        return q, k, v

    def __call__(self, qkv: Tensor, kv: KV, step: Step) -> Tensor:
        q, k, v = self.split(qkv, step.positions)
        write_pages(kv.keys, kv.key_scales, step.slots, k)
        write_pages(kv.values, kv.value_scales, step.slots, v)
        return paged_attention(q, kv, step, self.part.window, self.scale, self.sinks).flatten(1)

    def row(self) -> Row:
        return Row("attention", str(self.device), "torch.paged_gqa")


class PlainLatentAttend:
    """MLA absorbed: queries go into the latent space and results come out of it, so that the cache is read as it is."""

    def __init__(self, ops: Plain, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> None:
        self.part, self.eps, self.kv_norm = part, eps, kv_norm
        self.key_up, self.value_up = kv_b.unflatten(0, (part.heads, -1)).split([part.nope_dim, part.v_dim], 1)   # [heads, nope | v, kv_rank]
        self.scale, self.table, self.device, self.nbytes = scale_of(part), ops.table(part.rope), ops.device, kv_b.nbytes

    def __call__(self, q: Tensor, latent: Tensor, kv: LatentKV, step: Step) -> Tensor:
        a = self.part
        cos, sin = (t[step.positions.long()] for t in self.table)
        q = q.unflatten(-1, (a.heads, -1))
        q_nope, q_rope = q[..., :a.nope_dim], rotate(q[..., a.nope_dim:], cos, sin, a.rope.interleaved)
        c, k_rope = latent.split([a.kv_rank, a.rope.dim], -1)
        k_rope = rotate(k_rope[:, None], cos, sin, a.rope.interleaved)[:, 0]
        write_pages(kv.latent, kv.scales, step.slots, torch.cat([rms_norm(c, self.kv_norm, self.eps), k_rope], -1))
        inside = torch.cat([torch.einsum("thn,hnr->thr", q_nope, self.key_up), q_rope], -1).float()
        out = q.new_empty(q.shape[0], a.heads, a.v_dim)
        for s, (lo, hi, length) in enumerate(sequences(step)):
            cached = read_pages(kv.latent, kv.scales, step.pages[s], length)[:, None]
            mask = seen(step.positions[lo:hi], length, None)
            y = attention(inside[lo:hi], cached, cached[..., :a.kv_rank], mask, self.scale)
            out[lo:hi] = torch.einsum("thr,hvr->thv", y.to(q.dtype), self.value_up)
        return out.flatten(1)

    def row(self) -> Row:
        return Row("attention", str(self.device), "torch.paged_mla", nbytes=self.nbytes)


class PlainRoute:
    def __init__(self, part: spec.Router, correction: Tensor | None, device: str) -> None:
        self.part, self.correction, self.device = part, correction, device

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return select(self.part, logits, self.correction)

    def row(self) -> Row:
        return Row("router", self.device, "torch")


class PlainExperts:
    """Routed experts as float tensors, one at a time: gate, up [E, I, H], down [E, H, I] with biases [E, I], [E, I], [E, H] or None."""

    def __init__(self, part: spec.MoE, gate: Tensor | None, up: Tensor, down: Tensor,
                 biases: tuple[Tensor | None, Tensor, Tensor] | None = None) -> None:
        self.part, self.gate, self.up, self.down, self.biases = part, gate, up, down, biases
        self.out = torch.zeros(0)

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            if e < 0:
                continue
            row, slot = (ids == e).nonzero(as_tuple=True)
            w = weights[row, slot, None].to(x.dtype)
            y = self.expert(e, x[row] * w) if self.part.weight_on == "input" else self.expert(e, x[row]) * w
            self.out.index_add_(0, row, y)

    def expert(self, e: int, x: Tensor) -> Tensor:
        bg, bu, bd = (None, None, None) if self.biases is None else (None if b is None else b[e] for b in self.biases)
        up = F.linear(x, self.up[e], bu)
        h = activate(self.part.act, up) if self.gate is None else glu(self.part.act, F.linear(x, self.gate[e], bg), up)
        return F.linear(h, self.down[e], bd)

    def begin(self, x: Tensor, logits: Tensor, route: Route) -> None:
        self.start(x, *route(logits))

    def finish(self) -> Tensor:
        return self.out

    def row(self) -> Row:
        return Row("experts", str(self.up.device), "torch", str(self.up.dtype)[6:], 3 * self.up.nbytes)
