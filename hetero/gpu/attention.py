"""Paged attention in Triton for grouped-query and latent (absorbed) layers, decode and prefill by one kernel each; knows no model.

Online softmax over blocks of positions (Milakov & Gimelshein 2018; Dao et al. 2022), long contexts split over programs and joined by a second
kernel (Dao et al. 2023, "Flash-Decoding"). A program owns a block of queries (tokens × heads that share keys) and a share of the positions.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention.bias import causal_lower_right

from hetero.gpu.launch import early, follow
from hetero.gpu.ops import KV, LatentKV, Step
from hetero.gpu.rope import codes, from_e4m3

LOG2E = 1.4426950408889634


@triton.jit
def _own_sequence(starts, b, S, BQ: tl.constexpr, ONE: tl.constexpr):
    """(sequence, its first query) of block b; sequence s owns blocks from starts[s] // BQ + s on, or block s alone when all have one query."""
    if ONE:
        s = b
        i0 = 0
    else:
        lo = 0
        hi = S
        while lo < hi:
            mid = (lo + hi) // 2
            if tl.load(starts + mid) // BQ + mid <= b:
                lo = mid + 1
            else:
                hi = mid
        s = lo - 1
        i0 = (b - (tl.load(starts + s) // BQ + s)) * BQ
    return s, i0


@triton.jit
def _share(first, last, split, SPLITS: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr):
    """The positions [lo, hi) of one split: whole blocks of BN, at least LEAST of them, so that short contexts use few splits."""
    span = tl.cdiv(tl.cdiv(last - first, SPLITS), BN) * BN
    span = tl.maximum(span, LEAST * BN)
    lo = first + split * span
    return lo, tl.minimum(lo + span, last)


@triton.jit
def _look(qv, keys, values, key_scales, value_scales, pages, top, total, acc, p, start, end, scale, h, KV_HEADS, WINDOW, BN: tl.constexpr,
          D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr, PRECISE: tl.constexpr):
    """The positions start .. end - 1 added to a running softmax in powers of two. Not MASKED: whole blocks that every query sees."""
    d = tl.arange(0, BD)
    k = tl.arange(0, BN)
    for at in range(start, end, BN):
        pos = at + k
        if MASKED:
            ok = pos < end
            page = tl.load(pages + pos // PAGE, mask=ok, other=0).to(tl.int64)
            ok = ok & (page >= 0)
        else:
            page = tl.load(pages + pos // PAGE).to(tl.int64)
        cell = (page * KV_HEADS + h) * PAGE + pos % PAGE
        if MASKED:
            kt = tl.load(keys + cell[None, :] * D + d[:, None], mask=ok[None, :] & (d < D)[:, None], other=0)
            v = tl.load(values + cell[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0)
        elif D == BD:
            kt = tl.load(keys + cell[None, :] * D + d[:, None])
            v = tl.load(values + cell[:, None] * D + d[None, :])
        else:
            kt = tl.load(keys + cell[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0)
            v = tl.load(values + cell[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0)
        if FP8:
            kt = from_e4m3(kt).to(qv.dtype)
            v = from_e4m3(v).to(qv.dtype)
        x = tl.dot(qv, kt.to(qv.dtype), input_precision=PRECISE) * scale
        if FP8:
            x *= tl.load(key_scales + cell, mask=pos < end, other=0.0)[None, :] * 256.0
        if MASKED:
            x = tl.where(ok[None, :] & (pos[None, :] <= p[:, None]) & (pos[None, :] > p[:, None] - WINDOW), x, float("-inf"))
        peak = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
        e = tl.exp2(x - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(e, 1)
        if FP8:
            e *= tl.load(value_scales + cell, mask=pos < end, other=0.0)[None, :] * 256.0
        acc = acc * shrink[:, None]
        acc = tl.dot(e.to(qv.dtype), v.to(qv.dtype), acc, input_precision=PRECISE)
        top = peak
    return top, total, acc


@triton.jit
def _attend(q, keys, values, key_scales, value_scales, pages, starts, lengths, sinks, out, part, lse, scale, S, P, HEADS, KV_HEADS, WINDOW,
            G: tl.constexpr, BG: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, D: tl.constexpr,
            BD: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FP8: tl.constexpr, SINKS: tl.constexpr,
            WINDOWED: tl.constexpr, EARLY: tl.constexpr, PRECISE: tl.constexpr):
    """`scale` is in powers of two: scores are multiplied with it, and exponentials are taken to base 2."""
    follow(EARLY)
    b = tl.num_programs(0) - 1 - tl.program_id(0)            # the longest first: what is left at the end is short
    h = tl.program_id(1)
    split = tl.program_id(2)
    s, i0 = _own_sequence(starts, b, S, BQ, ONE)
    row0 = tl.load(starts + s)
    n = tl.load(starts + s + 1) - row0
    if i0 < n:
        length = tl.load(lengths + s)
        m = tl.arange(0, BM)
        i = i0 + m // BG
        g = m % BG
        mine = (i < n) & (g < G) & (m < BQ * BG)
        head = h * G + g
        p = length - n + i                                   # position of each query row
        row = (row0 + i).to(tl.int64) * HEADS + head
        d = tl.arange(0, BD)
        qv = tl.load(q + row[:, None] * D + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0)
        last = tl.minimum(length, length - n + i0 + BQ)
        first = tl.maximum(length - n + i0 - WINDOW + 1, 0)
        lo, hi = _share(first, last, split, SPLITS, BN, LEAST)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        table = pages + s.to(tl.int64) * P
        whole = lo
        if not WINDOWED:
            whole = lo + tl.maximum(tl.minimum(hi, length - n + i0 + 1) - lo, 0) // BN * BN
            top, total, acc = _look(qv, keys, values, key_scales, value_scales, table, top, total, acc, p, lo, whole, scale, h, KV_HEADS, WINDOW,
                                    BN, D, BD, PAGE, FP8, False, PRECISE)
        top, total, acc = _look(qv, keys, values, key_scales, value_scales, table, top, total, acc, p, whole, hi, scale, h, KV_HEADS, WINDOW,
                                BN, D, BD, PAGE, FP8, True, PRECISE)
        if SPLITS == 1:
            if SINKS:
                sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
                total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
            y = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + row[:, None] * D + d[None, :], y.to(out.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])
        else:
            y = acc / tl.where(total > 0, total, 1.0)[:, None]
            told = tl.where(total > 0, top * 0.6931471805599453 + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
            tl.store(lse + row * SPLITS + split, told, mask=mine)
            if lo < hi:
                tl.store(part + (row * SPLITS + split)[:, None] * D + d[None, :], y, mask=mine[:, None] & (d < D)[None, :])


@triton.jit
def _join(part, lse, sinks, out, HEADS, SPLITS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr):
    """Program (t, h): the weighted mean of the splits' results; weights from their log sums, the sink adding to the denominator alone."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    w = tl.load(lse + row * SPLITS + i)
    peak = tl.max(w, 0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    w = tl.exp(w - peak)
    total = tl.sum(w, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    v = tl.load(part + (row * SPLITS + i)[:, None] * D + d[None, :], mask=(w > 0)[:, None] & (d < D)[None, :], other=0.0)
    y = tl.sum(v * w[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _attend_latent(q, latent, scales, pages, starts, lengths, out, part, lse, scale, S, P, HEADS, BH: tl.constexpr, BQ: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
                   SPLITS: tl.constexpr, LEAST: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr, PRECISE: tl.constexpr):
    """As _attend, for one latent that all heads share: keys are latent | rope, values are the latent again (DeepSeek-V2, absorbed form)."""
    follow(EARLY)
    b = tl.program_id(0)
    split = tl.program_id(2)
    s, i0 = _own_sequence(starts, b, S, BQ, ONE)
    row0 = tl.load(starts + s)
    n = tl.load(starts + s + 1) - row0
    if i0 < n:
        length = tl.load(lengths + s)
        m = tl.arange(0, BM)
        i = i0 + m // BH
        head = tl.program_id(1) * BH + m % BH
        mine = (i < n) & (head < HEADS)
        p = length - n + i
        row = (row0 + i).to(tl.int64) * HEADS + head
        r = tl.arange(0, BR)
        c = tl.arange(0, R)
        ql = tl.load(q + row[:, None] * (RANK + R) + r[None, :], mask=mine[:, None] & (r < RANK)[None, :], other=0.0)
        qr = tl.load(q + row[:, None] * (RANK + R) + RANK + c[None, :], mask=mine[:, None], other=0.0)
        lo, hi = _share(0, tl.minimum(length, length - n + i0 + BQ), split, SPLITS, BN, LEAST)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BR), tl.float32)
        k = tl.arange(0, BN)
        for at in range(lo, hi, BN):
            pos = at + k
            ok = pos < hi
            page = tl.load(pages + s.to(tl.int64) * P + pos // PAGE, mask=ok, other=0).to(tl.int64)
            ok = ok & (page >= 0)
            cell = page * PAGE + pos % PAGE
            lat = tl.load(latent + cell[:, None] * (RANK + R) + r[None, :], mask=ok[:, None] & (r < RANK)[None, :], other=0)
            kr = tl.load(latent + cell[None, :] * (RANK + R) + RANK + c[:, None], mask=ok[None, :], other=0)
            if FP8:
                lat = from_e4m3(lat)
                kr = from_e4m3(kr)
            lat = lat.to(ql.dtype)
            x = tl.dot(ql, tl.trans(lat), input_precision=PRECISE)
            x = tl.dot(qr, kr.to(ql.dtype), x, input_precision=PRECISE) * scale
            if FP8:
                size = tl.load(scales + cell, mask=ok, other=0.0)[None, :] * 256.0
                x *= size
            x = tl.where(ok[None, :] & (pos[None, :] <= p[:, None]), x, float("-inf"))
            peak = tl.maximum(top, tl.max(x, 1))
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            e = tl.exp(x - safe[:, None])
            shrink = tl.exp(top - safe)
            total = total * shrink + tl.sum(e, 1)
            if FP8:
                e *= size
            acc = acc * shrink[:, None] + tl.dot(e.to(ql.dtype), lat, input_precision=PRECISE)
            top = peak
        y = acc / tl.where(total > 0, total, 1.0)[:, None]
        if SPLITS == 1:
            tl.store(out + row[:, None] * RANK + r[None, :], y.to(out.dtype.element_ty), mask=mine[:, None] & (r < RANK)[None, :])
        else:
            tl.store(lse + row * SPLITS + split, tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")), mask=mine)
            if lo < hi:
                tl.store(part + (row * SPLITS + split)[:, None] * RANK + r[None, :], y, mask=mine[:, None] & (r < RANK)[None, :])


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"      # tf32 is ignored for 16-bit operands


def blocks(rows: int, width: int, dtype: torch.dtype, roomy: bool) -> tuple[int, int, int, int]:
    """(query rows, positions, warps, stages) of a program for sequences of up to `rows` query rows of `width`; `roomy`: blocks may take 161 KiB of
    shared memory."""
    if dtype != torch.bfloat16 or rows < 64 or width > 128:      # cards that have no bfloat16 multiply element by element
        return (32 if rows > 16 else 16), 32 if dtype == torch.float32 or width > 128 else 64, 4, 2
    return (128, 128, 8, 2) if roomy and rows >= 128 else (64, 64, 4, 2)


def splits_for(programs: int, context_tokens: int, cores: int) -> int:
    """How many splits fill `cores` multiprocessors twice over, a power of two within the context's blocks of 128."""
    wanted = max(1, 2 * cores // max(1, programs))
    return min(64, triton.next_power_of_2(min(wanted, max(1, context_tokens // 128))))


def attend(q: torch.Tensor, kv: KV, step: Step, scale: float, window: int | None, sinks: torch.Tensor | None, splits: int,
           roomy: bool = False) -> torch.Tensor:
    """q [T, heads, D] against pages of `kv` -> [T, heads, D]. splits (a power of two) > 1 is for decode: float32 partial results per split."""
    T, heads, D = q.shape
    kv_heads, page = kv.keys.shape[1], kv.keys.shape[2]
    G = heads // kv_heads
    BG, BD = triton.next_power_of_2(G), triton.next_power_of_2(D)
    long, fp8 = step.longest > 1, kv.key_scales is not None
    BM, BN, warps, stages = blocks(step.longest * BG, BD, q.dtype, roomy and not fp8)
    BM = max(BM, BG)
    BQ = max(1, BM // BG) if long else 1
    S = step.lengths.shape[0]
    out = torch.empty_like(q)
    part, lse = out, out
    if splits > 1:
        part = torch.empty(T, heads, splits, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(T, heads, splits, dtype=torch.float32, device=q.device)
    nothing = step.lengths
    _attend[(T // BQ + S if long else T, kv_heads, splits)](
        q, codes(kv.keys), codes(kv.values), kv.key_scales if fp8 else nothing, kv.value_scales if fp8 else nothing, step.pages, step.starts,
        step.lengths, nothing if sinks is None else sinks, out, part, lse, scale * LOG2E, S, step.pages.shape[1], heads, kv_heads,
        1 << 30 if window is None else window, G=G, BG=BG, BQ=BQ, BM=BM, BN=BN, ONE=not long, D=D, BD=BD, PAGE=page, SPLITS=splits, LEAST=128 // BN,
        FP8=fp8, SINKS=sinks is not None, WINDOWED=window is not None, PRECISE=_precision(q.dtype), num_warps=warps, num_stages=stages, **early(q))
    if splits > 1:
        _join[(T, heads)](part, lse, nothing if sinks is None else sinks, out, heads, SPLITS=splits, D=D, BD=BD, SINKS=sinks is not None, num_warps=4,
                          **early(q))
    return out


def attend_alone(q: torch.Tensor, kv: KV, step: Step, scale: float) -> torch.Tensor:
    """The same for the only sequence of a step (step.before tells its past), without window, sinks and scales: its pages are gathered, and torch's
    own attention runs over them, which for thousands of queries is the faster kernel on every card that has FlashAttention."""
    length = step.before + q.shape[0]
    rows = step.pages[0, :-(-length // kv.keys.shape[2])].long()
    k, v = (pages.index_select(0, rows).transpose(0, 1).flatten(1, 2)[None, :, :length].to(q.dtype) for pages in (kv.keys, kv.values))
    mask = causal_lower_right(q.shape[0], length)
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def attend_latent(q: torch.Tensor, kv: LatentKV, step: Step, rank: int, scale: float, splits: int) -> torch.Tensor:
    """q [T, heads, rank + rope], already multiplied into the latent space -> [T, heads, rank], to be multiplied out of it."""
    T, heads, wide = q.shape
    long = step.longest > 1
    BH = min(16, max(1, triton.next_power_of_2(heads)))
    BM = 16
    BQ = BM // BH if long else 1
    BH = BH if long else 16
    S = step.lengths.shape[0]
    out = torch.empty(T, heads, rank, dtype=q.dtype, device=q.device)
    part, lse = out, out
    if splits > 1:
        part = torch.empty(T, heads, splits, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(T, heads, splits, dtype=torch.float32, device=q.device)
    fp8 = kv.scales is not None
    BN = 16                                                  # a block of 32 needs 100 KB of shared memory, more than consumer cards have
    _attend_latent[(T // BQ + S if long else T, triton.cdiv(heads, BH), splits)](
        q, codes(kv.latent), kv.scales if fp8 else step.lengths, step.pages, step.starts, step.lengths, out, part, lse, scale, S,
        step.pages.shape[1], heads,
        BH=BH, BQ=BQ, BM=BM, BN=BN, ONE=not long, RANK=rank, BR=triton.next_power_of_2(rank), R=wide - rank,
        PAGE=kv.latent.shape[1], SPLITS=splits,
        LEAST=128 // BN, FP8=fp8, PRECISE=_precision(q.dtype), num_warps=4, num_stages=2 if fp8 else 1, **early(q))
    if splits > 1:
        _join[(T, heads)](part, lse, step.lengths, out, heads, SPLITS=splits, D=rank, BD=triton.next_power_of_2(rank), SINKS=False, num_warps=4,
                          **early(q))
    return out
