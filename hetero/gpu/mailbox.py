"""The GPU's side of the handoff, in Triton: post a layer's inputs into pinned host memory and raise a flag, spin on the answer's flag and take it.

Flags are 32-bit words in host memory mapped into the GPU. They are only loaded and stored, never modified atomically: a GPU has no atomics on host
memory. Order is the PTX memory model's: st.release.sys after a barrier of the block, ld.acquire.sys before one. Knows no layer and no expert.
"""

import torch
import triton
import triton.language as tl


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
def _post(x, ids, weights, live, to_x, to_ids, to_weights, arrived, flag, T, H: tl.constexpr, BH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
          FLAG: tl.constexpr):
    """Program t copies token t; the last one to arrive raises the flag. Tokens from live[0] on are padding: their ids become -1."""
    t = tl.program_id(0)
    o = tl.arange(0, BH)
    tl.store(to_x + t * H + o, tl.load(x + t * H + o, mask=o < H), mask=o < H)
    k = tl.arange(0, BK)
    real = t < tl.load(live)
    tl.store(to_ids + t * K + k, tl.where(real, tl.load(ids + t * K + k, mask=k < K, other=-1), -1), mask=k < K)
    tl.store(to_weights + t * K + k, tl.load(weights + t * K + k, mask=k < K, other=0.0), mask=k < K)
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
def _take(answer, out, flag, error, polls, H: tl.constexpr, BH: tl.constexpr, SPIN: tl.constexpr):
    t = tl.program_id(0)
    if SPIN:
        await_flag(flag, polls, error)
        tl.debug_barrier()
    o = tl.arange(0, BH)
    y = tl.load(answer + t * H + o, mask=o < H, other=0.0, volatile=True)
    tl.store(out + t * H + o, y.to(out.dtype.element_ty), mask=o < H)


@triton.jit(do_not_specialize=["flag"])
def _end(flag):
    raise_flag(flag)


def post(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, live: torch.Tensor, to: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
         arrived: torch.Tensor, flag: int) -> None:
    """x [T, H], ids [T, k] int32, weights [T, k] f32 into `to` (pinned, the same shapes and dtypes); then 1 into the word at `flag`, 0: no flag.

    live [1] int32: how many tokens are real. arrived [1] int32 on the device, zero."""
    (T, H), k = x.shape, ids.shape[1]
    _post[(T,)](x, ids, weights, live, *to, arrived, flag, T, H=H, BH=triton.next_power_of_2(H), K=k, BK=triton.next_power_of_2(k), FLAG=flag != 0,
                num_warps=4)


def take(answer: torch.Tensor, out: torch.Tensor, flag: int, error: int, polls: int) -> torch.Tensor:
    """Waits for 1 in the word at `flag` (0: somebody else has waited), then answer [T, H] f32 (pinned) -> out [T, H]. Gives up after `polls` looks
    and stores 1 at `error`."""
    T, H = out.shape
    _take[(T,)](answer, out, flag, error, polls, H=H, BH=triton.next_power_of_2(H), SPIN=flag != 0, num_warps=8)
    return out


def end(flag: int) -> None:
    """1 into the word at `flag`, once all that was enqueued before has run."""
    _end[(1,)](flag, num_warps=1)
