"""Routed experts on the GPU in Triton: a grouped product that reads the CPU kernels' packed tiles; knows not where they came from.

Rows are (token, expert) pairs sorted by expert, so that a program works on BM rows of one expert. Everything is decided on the device from the
router's ids: nothing waits for the host, and a step can be captured. The tiles are those of `cpu_kernels.rows`: 16 rows x 64 columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cpu_kernels.formats import expert_nbytes, formats_of, is_ordered, order_at
from hetero.arch.spec import Act
from hetero.gpu.linear import KINDS, activated


@triton.jit
def _f32(p, live):
    """float32 at bytes that are a multiple of 4."""
    return tl.load(p.to(tl.pointer_type(tl.float32)), mask=live, other=0.0)


@triton.jit
def _f16(p, live):
    return tl.load(p.to(tl.pointer_type(tl.float16)), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _u8(p, live):
    return tl.load(p, mask=live, other=0).to(tl.int32)


@triton.jit
def _e4m3(code):
    """E4M3 bytes as int32 -> float32; the exponent's bias differs by 120."""
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(code >= 128, -size, size)


@triton.jit
def _coded(base, n, k, live, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """Columns 32 HALF + k of rows n of a tile of `cpu_kernels.formats.Coded` at base [BN]: float32 [BN, 32]."""
    r = n % 16
    m = live[:, None]
    j = k // 4
    byte = base[:, None] + r[:, None] * 4 + k % 4
    if FORMAT >= 9 and FORMAT <= 12:                          # bytes
        at: tl.constexpr = 96 if FORMAT == 11 else 64
        c = _u8(byte + at + 64 * j + 512 * HALF, m)
        if FORMAT == 12:
            return _e4m3(c) * _f32(base + 4 * r, live)[:, None]
        q = tl.where(c >= 128, c - 256, c)
        if FORMAT == 9:
            return q.to(tl.float32) * _f16(base + 32 * HALF + 2 * r, live)[:, None]
        if FORMAT == 11:
            z = _u8(base + 64 + r, live)
            q -= tl.where(z >= 128, z - 256, z)[:, None]
        return q.to(tl.float32) * _f32(base + 4 * r, live)[:, None]
    else:
        lines: tl.constexpr = (32, 96, 96, 160, 0, 0, 0, 0, 128, 128, 96, 0, 128, 128, 64, 64, 0, 64)[FORMAT - 5]
        q = (_u8(byte + lines + 64 * j, m) >> (4 * HALF)) & 15
        if FORMAT <= 6:                                       # E2M1, doubled: 0 1 2 3 4 6 8 12
            v = q & 7
            v = tl.where(v == 7, 12, tl.where(v >= 5, 2 * v - 4, v))
            v = tl.where(q >= 8, -v, v).to(tl.float32)
            if FORMAT == 5:
                return v * (_u8(base + 16 * HALF + r, live) << 23).to(tl.float32, bitcast=True)[:, None]
            s = _e4m3(_u8(base[:, None] + 32 * HALF + 16 * (k // 16) + r[:, None], m)) * _f32(base + 64, live)[:, None]
            return v * s
        if FORMAT == 7:
            return (q - _u8(base + 64 + r, live)[:, None]).to(tl.float32) * _f32(base + 4 * r, live)[:, None]
        if FORMAT == 8:
            return (q - _u8(base + 128 + 16 * HALF + r, live)[:, None]).to(tl.float32) * _f32(base + 64 * HALF + 4 * r, live)[:, None]
        if FORMAT == 22:
            q |= ((_u8(byte + 576 + 64 * HALF, m) >> j) & 1) << 4
            return (q - 16).to(tl.float32) * _f16(base + 32 * HALF + 2 * r, live)[:, None]
        if FORMAT == 21:
            q = (_u8(byte + 192 + 64 * (j % 4), m) >> (4 * HALF + 2 * (j // 4))) & 3
            at16 = base[:, None] + 32 * HALF + 16 * (k // 16) + r[:, None]
            s = _u8(at16, m).to(tl.float32) * _f16(base + 128 + 2 * r, live)[:, None]
            return q.to(tl.float32) * s - _u8(at16 + 64, m).to(tl.float32) * _f16(base + 160 + 2 * r, live)[:, None]
        if FORMAT >= 19:                                      # ggml's sixteen values, by their differences
            v = tl.zeros_like(q) - 127
            for i in tl.static_range(15):
                v += tl.where(q > i, (23, 21, 18, 16, 14, 13, 12, 11, 12, 12, 13, 15, 16, 20, 24)[i], 0)
            if FORMAT == 19:
                return v.to(tl.float32) * _f16(base + 32 * HALF + 2 * r, live)[:, None]
            s = _u8(base + 16 * HALF + r, live)
            return v.to(tl.float32) * (tl.where(s >= 128, s - 256, s).to(tl.float32) * _f16(base + 32 + 2 * r, live))[:, None]
        if FORMAT == 17 or FORMAT == 18:
            if FORMAT == 18:
                q |= ((_u8(byte + 640 + 64 * HALF, m) >> j) & 1) << 4
            return q.to(tl.float32) * _f16(base + 32 * HALF + 2 * r, live)[:, None] + _f16(base + 64 + 32 * HALF + 2 * r, live)[:, None]
        if FORMAT == 16:
            q = ((_u8(byte + 96 + 64 * (j % 4), m) >> (4 * HALF + 2 * (j // 4))) & 3) | (((_u8(byte + 352 + 64 * HALF, m) >> j) & 1) << 2)
            s = _u8(base[:, None] + 32 * HALF + 16 * (k // 16) + r[:, None], m)
            return (q - 4).to(tl.float32) * (tl.where(s >= 128, s - 256, s).to(tl.float32) * _f16(base + 64 + 2 * r, live)[:, None])
        if FORMAT == 15:
            q |= ((_u8(byte + 608 + 128 * HALF + 64 * (j // 4), m) >> (2 * (j % 4))) & 3) << 4
            s = _u8(base[:, None] + 32 * HALF + 16 * (k // 16) + r[:, None], m)
            s = tl.where(s >= 128, s - 256, s).to(tl.float32) * _f16(base + 64 + 2 * r, live)[:, None]
            return (q - 32).to(tl.float32) * s
        if FORMAT == 14:
            q |= ((_u8(byte + 640 + 64 * HALF, m) >> j) & 1) << 4
        s = _u8(base + 16 * HALF + r, live).to(tl.float32) * _f16(base + 64 + 2 * r, live)
        least = _u8(base + 32 + 16 * HALF + r, live).to(tl.float32) * _f16(base + 96 + 2 * r, live)
        return q.to(tl.float32) * s[:, None] - least[:, None]


@triton.jit
def halves(tiles, n, KT, kt, live, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Columns 64 kt .. + 31 and + 32 .. + 63 of rows n [BN] as two [BN, 32] of `dtype`; `tiles` is the matrix's first byte."""
    k = tl.arange(0, 32)[None, :]
    at = (n // 16) * KT + kt
    r = (n % 16)[:, None]
    m = live[:, None]
    if FORMAT > 4:
        size: tl.constexpr = (544, 608, 608, 672, 1088, 1088, 1120, 1088, 640, 768, 864, 480, 640, 768, 576, 576, 448, 704)[FORMAT - 5]
        base = tiles + at * size
        lo = _coded(base, n, k, live, 0, FORMAT)
        hi = _coded(base, n, k, live, 1, FORMAT)
    elif FORMAT == 4:
        h = (tiles + at * 2048)[:, None].to(tl.pointer_type(tl.float16)) + k * 16 + r
        lo = tl.load(h, mask=m, other=0.0)
        hi = tl.load(h + 512, mask=m, other=0.0)
    elif FORMAT == 3:
        base = tiles + at * 576
        s = base.to(tl.pointer_type(tl.float16)) + n % 16
        s0 = tl.load(s, mask=live, other=0.0).to(tl.float32)[:, None]
        s1 = tl.load(s + 16, mask=live, other=0.0).to(tl.float32)[:, None]
        b = tl.load(base[:, None] + 64 + (k // 4) * 64 + r * 4 + k % 4, mask=m, other=0).to(tl.int32)
        lo = (((b & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0) * s0     # 2^23 + code: no integer is converted
        hi = (((b >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0) * s1
    elif FORMAT == 2:
        base = tiles + at * 1088
        s = base.to(tl.pointer_type(tl.uint16)) + n % 16
        s0 = (tl.load(s, mask=live, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
        s1 = (tl.load(s + 16, mask=live, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
        q = base[:, None].to(tl.pointer_type(tl.int8)) + 64 + (k // 4) * 64 + r * 4 + k % 4
        lo = tl.load(q, mask=m, other=0).to(tl.float32) * s0
        hi = tl.load(q + 512, mask=m, other=0).to(tl.float32) * s1
    elif FORMAT == 1:
        w = (tiles + at * 2048)[:, None].to(tl.pointer_type(tl.uint16)) + (k // 2) * 32 + r * 2 + k % 2
        lo = (tl.load(w, mask=m, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        hi = (tl.load(w + 512, mask=m, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        f = (tiles + at * 4096)[:, None].to(tl.pointer_type(tl.float32)) + k * 16 + r
        lo = tl.load(f, mask=m, other=0.0)
        hi = tl.load(f + 512, mask=m, other=0.0)
    return lo.to(dtype), hi.to(dtype)


@triton.jit
def _place(starts, tiles, first, count, i, BM: tl.constexpr):
    """(expert, its first row, end of its rows) of tile i, which is one of experts first .. first + count - 1."""
    lo = first
    hi = first + count
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if tl.load(tiles + mid) <= i:
            lo = mid
        else:
            hi = mid
    return lo, tl.load(starts + lo) + (i - tl.load(tiles + lo)) * BM, tl.load(starts + lo + 1)


@triton.jit
def _up(x, tokens, pair_weights, records, slots, starts, tiles, gate_bias, up_bias, h, first, count, RECORD, UP, H, I, KT, alpha, limit, shift, top_k,
        BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, SLOTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
        LIMIT: tl.constexpr, WEIGH: tl.constexpr, ORDER: tl.constexpr):
    """h[row, i] = act(gate) * up for the rows of one expert: both products share the activations, which are gathered by token."""
    for i in range(tl.program_id(1) + tl.load(tiles + first), tl.load(tiles + first + count), tl.num_programs(1)):
        e, row, end = _place(starts, tiles, first, count, i, BM)
        m = row + tl.arange(0, BM)
        ok = m < end
        pair = tl.load(tokens + m, mask=ok, other=0)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live = n < I
        slot = tl.load(slots + e) if SLOTS else e - first
        base = records + slot.to(tl.int64) * RECORD + tl.zeros((BN,), tl.int64)
        k = tl.arange(0, 32)[:, None]
        xp = x + (pair // top_k).to(tl.int64)[None, :] * H
        order = (records + slot.to(tl.int64) * RECORD + ORDER).to(tl.pointer_type(tl.int32))
        up = tl.zeros((BN, BM), tl.float32)
        gate = tl.zeros((BN, BM), tl.float32)
        for kt in range(KT):
            c = kt * 64 + k
            c0 = tl.load(order + c, mask=c < H, other=0) if ORDER else c
            c1 = tl.load(order + c + 32, mask=c + 32 < H, other=0) if ORDER else c + 32
            x0 = tl.load(xp + c0, mask=ok[None, :] & (c < H), other=0.0)
            x1 = tl.load(xp + c1, mask=ok[None, :] & (c + 32 < H), other=0.0)
            w0, w1 = halves(base + UP, n, KT, kt, live, x0.dtype, FORMAT)
            up = tl.dot(w1, x1, tl.dot(w0, x0, up, input_precision="ieee"), input_precision="ieee")
            if GATED:
                g0, g1 = halves(base, n, KT, kt, live, x0.dtype, FORMAT)
                gate = tl.dot(g1, x1, tl.dot(g0, x0, gate, input_precision="ieee"), input_precision="ieee")
        if WEIGH:
            w = tl.load(pair_weights + pair, mask=ok, other=0.0)[None, :]
            up *= w
            gate *= w
        if BIAS:
            up += tl.load(up_bias + e * I + n, mask=live, other=0.0)[:, None]
            if GATED:
                gate += tl.load(gate_bias + e * I + n, mask=live, other=0.0)[:, None]
        if GATED:
            if LIMIT:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
            y = activated(gate, KIND, alpha) * (up + shift)
        else:
            y = activated(up, KIND, alpha)
        tl.store(h + m.to(tl.int64)[None, :] * I + n[:, None], y.to(h.dtype.element_ty), mask=ok[None, :] & live[:, None])


@triton.jit
def _down(h, records, slots, starts, tiles, bias, y, first, count, RECORD, DOWN, H, I, KT, BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr,
          SLOTS: tl.constexpr, BIAS: tl.constexpr):
    """y[row, :] = h[row, :] W_down^T + bias."""
    for i in range(tl.program_id(1) + tl.load(tiles + first), tl.load(tiles + first + count), tl.num_programs(1)):
        e, row, end = _place(starts, tiles, first, count, i, BM)
        m = row + tl.arange(0, BM)
        ok = m < end
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live = n < H
        slot = tl.load(slots + e) if SLOTS else e - first
        base = records + slot.to(tl.int64) * RECORD + DOWN + tl.zeros((BN,), tl.int64)
        k = tl.arange(0, 32)[:, None]
        hp = h + m.to(tl.int64)[None, :] * I + k
        acc = tl.zeros((BN, BM), tl.float32)
        for kt in range(KT):
            c = kt * 64 + k
            h0 = tl.load(hp + kt * 64, mask=ok[None, :] & (c < I), other=0.0)
            h1 = tl.load(hp + kt * 64 + 32, mask=ok[None, :] & (c + 32 < I), other=0.0)
            w0, w1 = halves(base, n, KT, kt, live, h0.dtype, FORMAT)
            acc = tl.dot(w1, h1, tl.dot(w0, h0, acc, input_precision="ieee"), input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + e * H + n, mask=live, other=0.0)[:, None]
        tl.store(y + m.to(tl.int64)[None, :] * H + n[:, None], acc.to(y.dtype.element_ty), mask=ok[None, :] & live[:, None])


@triton.jit
def _combine(y, place, weights, ids, out, H, K: tl.constexpr, BLOCK: tl.constexpr, WEIGH: tl.constexpr):
    """out[t] = sum over the token's experts in the router's order; pairs that are nobody's (-1) add nothing."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < H
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(K):
        if tl.load(ids + t * K + i) >= 0:
            row = tl.load(place + t * K + i).to(tl.int64)
            v = tl.load(y + row * H + o, mask=inside, other=0.0).to(tl.float32)
            acc += v * tl.load(weights + t * K + i) if WEIGH else v
    tl.store(out + t * H + o, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _count_tiles(starts, tiles, E, BE: tl.constexpr, BM: tl.constexpr):
    """tiles[e] = blocks of BM rows of the experts before e, from the first rows `starts`."""
    e = tl.arange(0, BE)
    rows = tl.load(starts + e + 1, mask=e < E, other=0) - tl.load(starts + e, mask=e < E, other=0)
    blocks = (rows + BM - 1) // BM
    tl.store(tiles + e + 1, tl.cumsum(tl.where(e < E, blocks, 0), 0), mask=e < E)
    tl.store(tiles + e, tl.zeros((BE,), tl.int32), mask=e == 0)


@dataclass(frozen=True)
class Shape:
    """One layer's experts as the kernels see them; `format` as `formats_of` reads it. Biases f32 on the device: [E, I] (gate may be None), [E, H]."""

    format: str
    experts: int
    hidden: int
    inter: int
    gated: bool
    act: Act
    weight_on: str = "output"
    biases: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None

    @property
    def record_nbytes(self) -> int:
        return expert_nbytes(self.format, self.hidden, self.inter, self.gated)

    @property
    def section_nbytes(self) -> int:
        """Bytes of gate, and of up: rows padded to 64."""
        return formats_of(self.format)[0].nbytes(-(-self.inter // 64) * 64, self.hidden)

    @property
    def codes(self) -> tuple[int, int]:
        """Of the format of gate and up, and of that of down."""
        first, down = formats_of(self.format)
        return first.code, down.code

    @property
    def order_at(self) -> int:
        """Where a record's order of inputs begins; 0: it has none."""
        return order_at(self.format, self.hidden, self.inter, self.gated) if is_ordered(self.format) else 0


@dataclass(frozen=True)
class Groups:
    """Pairs of one step sorted by expert. pairs [n] int32: pair index t * k + j by row; place [n] int32: the row of a pair; starts, tiles [E + 1]."""

    ids: torch.Tensor
    weights: torch.Tensor
    pairs: torch.Tensor
    place: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    block: int


class Block(NamedTuple):
    """Of a product kernel: rows of the weights per program, warps, stages."""

    rows: int
    warps: int
    stages: int


def blocks(tokens: int, dtype: torch.dtype) -> Block:
    """By the tokens of a tile. 8 warps on 64 rows would unpack every weight twice, which is 3.6 times slower; cards that have no bfloat16 take them,
    as they multiply element by element."""
    if dtype == torch.float32:
        return Block(32, 4 if tokens <= 32 else 8, 1)
    return Block(64, 4, 4) if dtype == torch.bfloat16 or tokens <= 32 else Block(64, 8, 3)


def block_for(pairs: int, experts: int) -> int:
    """Rows of a tile: as many as an expert can be expected to have."""
    return 16 if pairs <= 12 * experts else 32 if pairs <= 24 * experts else 64 if pairs <= 96 * experts else 128


def group(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> Groups:
    """ids [T, k] int32 (-1: nobody's), weights [T, k] f32. Sorted by expert, stable, without asking the device anything."""
    flat = ids.flatten()
    keys, order = torch.sort(torch.where(flat < 0, experts, flat), stable=True)
    starts = torch.searchsorted(keys, torch.arange(experts + 1, dtype=torch.int32, device=ids.device), out_int32=True)
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.shape[0], dtype=torch.int32, device=ids.device)
    tiles = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    block = block_for(flat.shape[0], experts)
    _count_tiles[(1,)](starts, tiles, experts, BE=triton.next_power_of_2(experts), BM=block, num_warps=4)
    return Groups(ids, weights, order.int(), place, starts, tiles, block)


class Product:
    """The experts' FFN of one step, some experts at a time; `out` joins what was run. Buffers for all pairs live until then."""

    def __init__(self, shape: Shape, x: torch.Tensor, groups: Groups) -> None:
        self.shape, self.x, self.groups = shape, x, groups
        n = groups.pairs.shape[0]
        self.h = torch.empty(n, shape.inter, dtype=x.dtype, device=x.device)
        self.y = torch.empty(n, shape.hidden, dtype=x.dtype, device=x.device)

    def run(self, records: torch.Tensor, first: int, count: int, slots: torch.Tensor | None = None) -> None:
        """Experts first .. first + count - 1; their records lie one after another at `records` (uint8), or at number `slots[e]` (int32 [E])."""
        s, g, x = self.shape, self.groups, self.x
        n, (BN, warps, stages) = g.pairs.shape[0], blocks(g.block, x.dtype)
        kt_h, kt_i = -(-s.hidden // 64), -(-s.inter // 64)
        record, section = s.record_nbytes, s.section_nbytes
        gate_bias, up_bias, down_bias = s.biases or (None, x, x)
        table = g.starts if slots is None else slots
        tiles = min(n, 2 * n * count // (s.experts * g.block) + count)           # a program takes another tile when an expert is in great demand
        first_code, down_code = s.codes
        common = {"BM": g.block, "SLOTS": slots is not None, "BN": BN, "num_warps": warps, "num_stages": stages}
        _up[(triton.cdiv(s.inter, BN), tiles)](
            x, g.pairs, g.weights, records, table, g.starts, g.tiles, x if gate_bias is None else gate_bias, up_bias, self.h, first, count,
            record, section * s.gated, s.hidden, s.inter, kt_h, s.act.alpha, s.act.limit or 0.0, s.act.up_shift, g.ids.shape[1],
            FORMAT=first_code, GATED=s.gated, BIAS=s.biases is not None, KIND=KINDS[s.act.kind],
            LIMIT=s.act.limit is not None, WEIGH=s.weight_on == "input", ORDER=s.order_at, **common)
        _down[(triton.cdiv(s.hidden, BN), tiles)](
            self.h, records, table, g.starts, g.tiles, down_bias, self.y, first, count, record, section * (1 + s.gated), s.hidden,
            s.inter, kt_i, FORMAT=down_code, BIAS=s.biases is not None, **common)

    def out(self) -> torch.Tensor:
        """[T, H] in x's dtype: the weighted sum over each token's experts."""
        s, g = self.shape, self.groups
        T, k = g.ids.shape
        out = torch.empty_like(self.x)
        _combine[(T, triton.cdiv(s.hidden, 1024))](self.y, g.place, g.weights, g.ids, out, s.hidden, K=k, BLOCK=1024, WEIGH=s.weight_on == "output",
                                                   num_warps=4)
        return out
