"""The GPU's side of the handoff, in Triton: post a layer's inputs into pinned host memory and raise a flag, spin on the answer's flag and take it.

Flags are 32-bit words in host memory mapped into the GPU. They are only loaded and stored, never modified atomically: a GPU has no atomics on host
memory. Order is the PTX memory model's: st.release.sys after a barrier of the block, ld.acquire.sys before one. Knows no layer and no expert.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero.arch.spec import Router
from hetero.gpu.launch import early, follow
from hetero.gpu.router import constants, pick


@triton.jit
def raise_flag(address):
    """Thread 0 stores 1; what the block wrote before its last barrier is visible to whoever sees it."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p fence.acq_rel.sys;
        @p st.release.sys.global.u32 [$1], 1;
        mov.u32 $0, 0;
        }
        """, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_flag(address, polls, error):
    """Thread 0 loads until it sees 1; after `polls` loads it gives up and stores 1 at `error`. The caller's barrier follows."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p, q; .reg .u32 t, v, n;
        mov.u32 n, $2;
        mov.u32 t, %tid.x;
        setp.ne.u32 p, t, 0;
        @p bra DONE;
        LOOP:
        ld.acquire.sys.global.u32 v, [$1];
        setp.eq.u32 p, v, 1;
        @p bra DONE;
        sub.u32 n, n, 1;
        setp.ne.u32 q, n, 0;
        @q bra LOOP;
        mov.u32 v, 1;
        st.relaxed.sys.global.u32 [$3], v;
        DONE:
        mov.u32 $0, 0;
        }
        """, "=r,l,r,l", [address, polls, error], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["flag", "T"])
def _post(x, ids, weights, logits, correction, live, to_x, to_ids, to_weights, arrived, slots, asked, own_ids, own_slots, own_weights, flag, T, E,
          PER, scale, H: tl.constexpr, BH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FLAG: tl.constexpr, CACHED: tl.constexpr,
          PICK: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr, TOP_GROUPS: tl.constexpr,
          TOP2: tl.constexpr, CORRECTION: tl.constexpr, RENORMALIZE: tl.constexpr, EARLY: tl.constexpr):
    """Program t posts token t; the last one to arrive raises the flag. PICK: ids and weights come from the router's logits, here.

    Tokens from live[0] on are padding: their ids become -1. CACHED: the host is told what was asked, and experts that have a slot stay here."""
    t = tl.program_id(0)
    o = tl.arange(0, BH)
    k = tl.arange(0, BK)
    follow(EARLY)
    tl.store(to_x + t * H + o, tl.load(x + t * H + o, mask=o < H), mask=o < H)
    if PICK:
        e, w = pick(logits, correction, t, E, PER, scale, SCORE, GROUPS, BG, BE, K, BK, TOP_GROUPS, TOP2, CORRECTION, RENORMALIZE)
    else:
        e = tl.load(ids + t * K + k, mask=k < K, other=-1)
        w = tl.load(weights + t * K + k, mask=k < K, other=0.0)
    e = tl.where((t < tl.load(live)) & (k < K), e, -1)
    if CACHED:
        slot = tl.load(slots + e, mask=e >= 0, other=-1)
        tl.store(asked + t * K + k, e, mask=k < K)
        tl.store(own_ids + t * K + k, e, mask=k < K)
        tl.store(own_slots + t * K + k, slot, mask=k < K)
        tl.store(own_weights + t * K + k, w, mask=k < K)
        e = tl.where(slot >= 0, -1, e)
    tl.store(to_ids + t * K + k, e, mask=k < K)
    tl.store(to_weights + t * K + k, w, mask=k < K)
    if FLAG:
        tl.debug_barrier()
        if T == 1:
            raise_flag(flag)
        else:
            before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
            if before == T - 1:
                tl.store(arrived, 0)
                raise_flag(flag)


@triton.jit(do_not_specialize=["flag", "error", "polls"])
def _take(answer, shared, gate, hits, x, weight, bias, total, out, flag, error, polls, eps, scale, H: tl.constexpr, BH: tl.constexpr,
          SPIN: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, HITS: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
          BIAS: tl.constexpr, EARLY: tl.constexpr):
    """Token t's answer and what the GPU adds to it; with NORM all of it is added to the residual x, and normed as in `norm`."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BH)
    inside = o < H
    follow(EARLY)
    if SHARED:                                               # what is here is read while the answer is awaited
        beside = tl.load(shared + t * H + o, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            beside *= 1.0 / (1.0 + tl.exp(-tl.load(gate + t).to(tl.float32)))
    if HITS:
        mine = tl.load(hits + t * H + o, mask=inside, other=0.0)
    if NORM:
        r = tl.load(x + t * H + o, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + o, mask=inside, other=0.0).to(tl.float32)
    if SPIN:
        await_flag(flag, polls, error)
        tl.debug_barrier()
    v = tl.load(answer + t * H + o, mask=inside, other=0.0, volatile=True)
    if HITS:
        v += mine
    v = v.to(out.dtype.element_ty).to(tl.float32)            # rounded where the kernels of an eager step round: the two are equal
    if SHARED:
        v = (v + beside).to(out.dtype.element_ty).to(tl.float32)
    if NORM:
        v = (r + scale * v).to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + t * H + o, v.to(total.dtype.element_ty), mask=inside)
        if CENTER:
            v = tl.where(inside, v - tl.sum(v, 0) / H, 0.0)
        v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / H + eps)) * w
        if BIAS:
            v += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * H + o, v.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["flag"])
def _end(flag, EARLY: tl.constexpr):
    follow(EARLY)
    raise_flag(flag)


@dataclass(frozen=True)
class Slots:
    """Where experts of one layer that live on the GPU are found, and what a step leaves behind. All int32 but weights."""

    table: Tensor                        # [E] on the device: slot of an expert, -1: none
    asked: Tensor                        # [tokens, k] pinned: ids as the router chose them, -1 for padding
    ids: Tensor                          # [tokens, k] on the device, and of each its slot and its weight (f32)
    slots: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Choice:
    """Ids and weights not yet made: the router's logits [T, E] f32 and what picks from them."""

    part: Router
    logits: Tensor
    correction: Tensor | None


def post(x: Tensor, chosen: tuple[Tensor, Tensor] | Choice, live: Tensor, to: tuple[Tensor, Tensor, Tensor], arrived: Tensor, flag: int,
         slots: Slots | None = None) -> None:
    """x [T, H] and the chosen (ids [T, k] int32, weights [T, k] f32) into `to` (pinned: x, ids, weights), then 1 into the word at `flag`, 0: no flag.

    live [1] int32: how many tokens are real. arrived [1] int32 on the device, zero."""
    (T, H), k = x.shape, to[1].shape[1]
    if isinstance(chosen, Choice):
        part, logits, corrected = chosen.part, chosen.logits, chosen.correction is not None
        correction = chosen.correction if chosen.correction is not None else logits
        ids, weights, E, per, scale, how = logits, logits, part.experts, part.experts // part.groups, part.scale, constants(part, corrected)
    else:
        (ids, weights), E, per, scale = chosen, 1, 1, 1.0
        logits = correction = weights
        how = {**dict.fromkeys(("SCORE", "GROUPS", "BG", "BE", "TOP_GROUPS"), 1), **dict.fromkeys(("TOP2", "CORRECTION", "RENORMALIZE"), False),
               "K": k, "BK": triton.next_power_of_2(k)}
    kept = (ids,) * 5 if slots is None else (slots.table, slots.asked, slots.ids, slots.slots, slots.weights)
    _post[(T,)](x, ids, weights, logits, correction, live, *to, arrived, *kept, flag, T, E, per, scale, H=H, BH=triton.next_power_of_2(H),
                FLAG=flag != 0, CACHED=slots is not None, PICK=isinstance(chosen, Choice), **how, num_warps=1 if E <= 128 else 4, **early(x))


@dataclass(frozen=True)
class Awaited:
    """A layer's answer that is not there yet, and what is to be added to it: whoever needs the sum waits, in the kernel that makes it.

    answer [T, H] f32 pinned; 1 in the word at `flag` says that it is there (0: somebody else has waited); a kernel gives up after `polls` looks and
    stores 1 at `error`. shared [T, H], gate [T, 1] before its sigmoid; hits [T, H] f32."""

    answer: Tensor
    flag: int
    error: int
    polls: int
    device: torch.device
    dtype: torch.dtype
    hits: Tensor | None = None
    shared: Tensor | None = None
    gate: Tensor | None = None

    def plus(self, shared: Tensor, gate: Tensor | None = None) -> "Awaited":
        return replace(self, shared=shared, gate=gate)

    def take(self) -> Tensor:
        """[T, H]"""
        out = torch.empty(self.answer.shape, dtype=self.dtype, device=self.device)
        self._launch(out, None, out, out, None, 0.0, 1.0)
        return out

    def add_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (x + scale * the sum, that normed); a bias makes it a LayerNorm."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._launch(x, weight, total, out, bias, eps, scale)
        return total, out

    def _launch(self, x: Tensor, weight: Tensor | None, total: Tensor, out: Tensor, bias: Tensor | None, eps: float, scale: float) -> None:
        T, H = out.shape
        shared, gate, hits = (out if t is None else t for t in (self.shared, self.gate, self.hits))
        _take[(T,)](self.answer, shared, gate, hits, x, out if weight is None else weight, out if bias is None else bias, total, out, self.flag,
                    self.error, self.polls, eps, scale, H=H, BH=triton.next_power_of_2(H), SPIN=self.flag != 0, SHARED=self.shared is not None,
                    GATED=self.gate is not None, HITS=self.hits is not None, NORM=weight is not None, CENTER=bias is not None, BIAS=bias is not None,
                    num_warps=8, **early(out))


def end(flag: int, like: Tensor) -> None:
    """1 into the word at `flag`, once all that was enqueued before has run. `like`: any tensor of the device."""
    _end[(1,)](flag, num_warps=1, **early(like))
