"""`Linear`: a dense matrix in any of the formats times rows of activations, shared out to a team. Knows no model and no device.

One job: activations into the format's partner or, float32 and several tokens, into panels; then tasks of up to four row blocks for one token,
of row blocks times panels, or of one row block for up to sixteen tokens of codes. A token's result is the same bits whatever the other tokens
and the number of threads are.
"""

from typing import Any

import numpy as np
from numba import carray

from . import cpu, ffn, lanes, pack, plain, rows
from .atoms import add, peek, poke
from .ffn import MOST_TOKENS, peek32, poke32
from .formats import COLS, ROWS, Format, format_of, padded
from .jit import kernel
from .jobs import barrier, claims, share
from .operands import f32, ready
from .rows import panel
from .store import aligned
from .team import Prepared, Team

Array = np.ndarray[Any, Any]
_walk, _take = lanes.invoke(4), lanes.invoke(4)
_REAL = lanes.vec(lanes.F32, 16)
_copy16 = lanes.op(2, lambda b, to, of: lanes.store(b, lanes.load(b, of, _REAL, 0, 4), to, 0, 4))
_add16 = lanes.op(2, lambda b, to, of: lanes.store(b, b.fadd(lanes.load(b, to, _REAL, 0, 4), lanes.load(b, of, _REAL, 0, 4)), to, 0, 4))
# a thread's block: streams' addresses of this task and the next (64 B), activations' addresses, 32 float32 of input, sums
_WHERE, _ACTS, _VALUES, _SUMS = 0, 64, 64 + 8 * MOST_TOKENS, 192 + 8 * MOST_TOKENS
SPARE_NBYTES = _SUMS + 64 * 2 * MOST_TOKENS
TASK_NBYTES = 256 << 10                              # of weights, which stay in L2 while panels pass
WALKS = ((1, 1), (4, 1), (1, rows.MANY))             # (streams, tokens)

# words of the operands, behind that of the reals
(X, T, K_, N_, OUT, BASE, ROW, TILES, BIAS, ACTS, STEP, SPARE, TAKE, ONE1, ONE4, MANY, PANELS, PANEL, BLOCKS,
 AHEAD) = (8 * i for i in range(1, 21))


@kernel(inner=True)
def take_inputs(a: int, tid: int, threads: int, spare: int) -> None:
    """This thread's share of the activation blocks of x."""
    x, K, tiles, step = peek(a + X), peek(a + K_), peek(a + TILES), peek(a + STEP)
    lo, hi = share(peek(a + T) * tiles, tid, threads)
    for i in range(lo, hi):
        t = i // tiles
        for g in range(2):
            ffn.load32(x + 4 * t * K, 0, (i - t * tiles) * COLS + 32 * g, K, spare + _VALUES)
            _take(peek(a + TAKE), spare + _VALUES, spare + _VALUES + 64, peek(a + ACTS) + i * step, g)


@kernel(inner=True)
def take_panels(a: int, tid: int, threads: int) -> None:
    """This thread's share of x as panels: PANELS words (first token | tokens << 32), PANEL their number."""
    K, tiles, count = peek(a + K_), peek(a + TILES), peek(a + PANEL)
    width = tiles * COLS
    lo, hi = share(count * tiles, tid, threads)
    for i in range(lo, hi):
        which = i // tiles
        word = peek(peek(a + PANELS) + 8 * which)
        t, tokens, at = word & 0xFFFFFFFF, word >> 32, (i - which * tiles) * COLS
        to = carray(f32(peek(a + ACTS) + 4 * (t * width + at * tokens)), COLS * tokens)
        here = max(0, min(COLS, K - at))
        for j in range(tokens):
            x = carray(f32(peek(a + X) + 4 * ((t + j) * K + at)), COLS)
            for c in range(here):
                to[c * tokens + j] = x[c]
            for c in range(here, COLS):
                to[c * tokens + j] = np.float32(0)


@kernel(inner=True)
def give(a: int, t: int, block: int, sums: int) -> None:
    """16 sums of row block `block`, with the bias, to token t's row of the output."""
    N, bias = peek(a + N_), peek(a + BIAS)
    first = ROWS * block
    out = peek(a + OUT) + 4 * (t * N + first)
    if bias != 0:
        _add16(sums, bias + 4 * first)
    if first + ROWS <= N:
        _copy16(out, sums)
    else:
        for i in range(N - first):
            poke32(out + 4 * i, peek32(sums + 4 * i))


@kernel(inner=True)
def multiply(a: int, first: int, count: int, t: int, tokens: int, after: int, spare: int) -> None:
    """`count` row blocks from `first` on (1 or 4) for one token, or one for up to MOST_TOKENS."""
    row, tiles, base = peek(a + ROW), peek(a + TILES), peek(a + BASE)
    stride = tiles * peek(a + STEP)
    for s in range(count):
        poke(spare + _WHERE + 8 * s, base + (first + s) * row)
        poke(spare + _WHERE + 32 + 8 * s, base + (after + s) * row)
    for i in range(max(count, tokens)):
        poke(spare + _ACTS + 8 * i, peek(a + ACTS) + (t + min(i, tokens - 1)) * stride)
    code = MANY if tokens > 1 else ONE1 if count == 1 else ONE4
    _walk(peek(a + code), spare + _WHERE, spare + _ACTS, spare + _SUMS, tiles | tokens << 32 if tokens > 1 else tiles)
    for i in range(max(count, tokens)):
        give(a, t + i if tokens > 1 else t, first + i if count > 1 else first, spare + _SUMS + 64 * i)


@kernel(inner=True)
def task(a: int, number: int, blocks: int, each: int, spare: int) -> None:
    """Row blocks number * each .. of all tokens: the weights of a block stay near while tokens pass."""
    tokens = peek(a + T)
    first = number * each
    last = min(first + each, blocks)
    after = last if last + each <= blocks else max(blocks - each, 0)
    if tokens == 1:
        while first < last:
            count = 4 if last - first >= 4 else 1
            multiply(a, first, count, 0, 1, min(after, blocks - count), spare)
            first += count
        return
    for block in range(first, last):
        for t in range(0, tokens, MOST_TOKENS):
            multiply(a, block, 1, t, min(MOST_TOKENS, tokens - t), min(block + 1, blocks - 1), spare)


@kernel(inner=True)
def task_of_panels(a: int, number: int, blocks: int, each: int, spare: int) -> None:
    """Row blocks number * each .. times all panels: weights stay near while panels pass."""
    row, tiles, base, at_once = peek(a + ROW), peek(a + TILES), peek(a + BASE), peek(a + BLOCKS)
    first = number * each
    last = min(first + each, blocks)
    beyond = last if last < blocks else first
    for i in range(peek(a + PANEL)):
        word = peek(peek(a + PANELS) + 8 * i)
        t, tokens = word & 0xFFFFFFFF, word >> 32
        x = peek(a + ACTS) + 4 * COLS * tiles * t
        for block in range(first, last, at_once):
            after = block + at_once if block + at_once < last else beyond
            for s in range(at_once):
                here, then = base + min(block + s, blocks - 1) * row, base + min(after + s, blocks - 1) * row
                panel.aim(spare + _WHERE + 8 * s, here, then, i > 0, tiles, peek(a + AHEAD), row // tiles)
            _walk(peek(a + MANY), spare + _WHERE, x, spare + _SUMS, tiles | tokens << 32)
            for s in range(min(at_once, last - block)):
                for j in range(tokens):
                    give(a, t + j, block + s, spare + _SUMS + 64 * (s * tokens + j))


def blocks_at_once(blocks: int, threads: int) -> int:
    """Row blocks of one task."""
    return 4 if blocks >= 8 * threads else 1


_blocks_at_once = kernel(blocks_at_once, inner=True)


@kernel(inner=True)
def _blocks_of_panels(blocks: int, threads: int, at_once: int, row_nbytes: int) -> int:
    """Row blocks of one task of panels: enough tasks for a fair share, few enough bytes for L2."""
    fair = blocks // (4 * threads * at_once)
    near = TASK_NBYTES // (row_nbytes * at_once)
    return at_once * max(1, min(fair, near))


@kernel(inner=True)
def job(control: int, tid: int, threads: int, a: int) -> int:
    spare = peek(a + SPARE) + tid * SPARE_NBYTES
    in_panels = peek(a + PANEL) != 0
    if in_panels:
        take_panels(a, tid, threads)
    elif peek(a + TAKE) != 0:
        take_inputs(a, tid, threads, spare)
    if (in_panels or peek(a + TAKE) != 0) and not barrier(control, tid, threads):
        return 0
    blocks = (peek(a + N_) + ROWS - 1) // ROWS
    each = _blocks_of_panels(blocks, threads, peek(a + BLOCKS), peek(a + ROW)) if in_panels else _blocks_at_once(blocks, threads)
    n = (blocks + each - 1) // each
    for k in range(threads):
        owner = (tid + k) % threads
        lo, hi = share(n, owner, threads)
        counter = claims(control, tid, owner, 0)
        t = lo + add(counter, 1)
        while t < hi:
            if in_panels:
                task_of_panels(a, t, blocks, each, spare)
            else:
                task(a, t, blocks, each, spare)
            t = lo + add(counter, 1)
    return 0


class Linear:
    """W [rows, cols] packed in `format`. `buffer`: uint8 of at least `nbytes`, 64 B aligned; without one the matrix allocates. `exact`: activations
    stay float32 whatever the format's partner is."""

    def __init__(self, format: str | Format, rows_: int, cols: int, buffer: Array | None = None, exact: bool = False, isa: str | None = None) -> None:
        self.format, self.rows, self.cols, self.exact = format_of(format), rows_, cols, exact
        for name, n in (("rows", rows_), ("cols", cols)):
            if n < 1:
                raise ValueError(f"{name}: {n}, at least 1 is needed")
        self.nbytes = self.format.nbytes(rows_, cols)
        self.data = aligned(self.nbytes) if buffer is None else buffer[:self.nbytes]
        if self.data.dtype != np.uint8 or self.data.nbytes < self.nbytes or self.data.ctypes.data % 64:
            raise ValueError(f"buffer: {self.data.nbytes} B of {self.data.dtype}; {self.nbytes} B of uint8 at a multiple of 64 are needed")
        self.body = lanes.body_of(cpu.isa(isa))
        self.step = rows.block_nbytes(self.format, exact)
        self.direct = rows.is_plain(self.format, exact) and cols % COLS == 0      # rows of x already are activation blocks
        self._walks = [0] * len(WALKS)
        self._take = 0 if self.direct else ffn.take(self.format.name, self.body, exact)

    def put(self, w: Array, dtype: str | None = None) -> None:
        """Quantizes a float matrix [rows, cols] in place: float32, float16, or uint16 with dtype="bf16"."""
        if w.shape != (self.rows, self.cols):
            raise ValueError(f"w: shape {w.shape}, expected {(self.rows, self.cols)}")
        tag = dtype or {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}.get(w.dtype, "")
        if tag not in ("f32", "f16", "bf16"):
            raise TypeError(f"w: dtype {w.dtype} with tag {dtype!r}; float32, float16, or uint16 with dtype=\"bf16\" are taken")
        if not pack.into(self.format, w, tag, self.data[:self.nbytes]):
            raise ValueError("w: NaN or infinity in the weights")

    def dequantize(self) -> Array:
        """float64 [rows, cols]: what the kernels multiply by."""
        return plain.dequantize(self.format, self.data, self.rows, self.cols)

    def room_nbytes(self, tokens: int, threads: int) -> int:
        """Bytes that a job works in: any that nobody else uses while it runs, at a multiple of 64."""
        acts = 4 * COLS if self._panels(tokens) else 0 if self.direct else self.step
        return threads * SPARE_NBYTES + tokens * (padded(self.cols, COLS) // COLS) * acts

    def _panels(self, tokens: int) -> bool:
        return tokens > 1 and rows.is_float(self.format, self.exact)

    def prepared(self, x: int, tokens: int, out: int, threads: int, room: int, bias: int = 0, keep: Any = None) -> Prepared:
        """y = x W^T + bias as a job over addresses: x float32 [tokens, cols], out float32 [tokens, rows], room of `room_nbytes`, bias float32
        [rows padded to 16] or 0."""
        if self._panels(tokens):
            return self._by_panels(x, tokens, out, threads, room, bias, keep)
        most = blocks_at_once(padded(self.rows, ROWS) // ROWS, threads)
        for i, (streams, m) in enumerate(WALKS):
            used = streams <= most if tokens == 1 else m == rows.MANY or (streams == 1 and tokens % MOST_TOKENS == 1)
            if used and not self._walks[i]:
                self._walks[i] = rows.walk(self.format.name, self.body, self.exact, streams, m)
        tiles = padded(self.cols, COLS) // COLS
        acts = x if self.direct else room + threads * SPARE_NBYTES
        base = int(self.data.__array_interface__["data"][0])
        return ready(job, [x, tokens, self.cols, self.rows, out, base, tiles * self.format.tile_nbytes, tiles, bias, acts, self.step, room,
                           self._take, *self._walks, 0, 0, 0, 0], keep=(self, keep))

    def _by_panels(self, x: int, tokens: int, out: int, threads: int, room: int, bias: int, keep: Any) -> Prepared:
        tiles, at, words = padded(self.cols, COLS) // COLS, 0, []
        for n in panel.panels(self.body, tokens):
            words.append(at | n << 32)
            at += n
        table = np.array(words, np.int64)
        base = int(self.data.__array_interface__["data"][0])
        return ready(job, [x, tokens, self.cols, self.rows, out, base, tiles * self.format.tile_nbytes, tiles, bias,
                           room + threads * SPARE_NBYTES, 0, room, 0, 0, 0, panel.walk(self.format.name, self.body), table.ctypes.data, len(table),
                           panel.blocks(self.body), panel.ahead_of(self.format)], keep=(self, table, keep))

    def run(self, x: Array, out: Array, team: Team, bias: Array | None = None) -> None:
        """x float32 [T, cols], out float32 [T, rows], bias float32 [rows padded to a multiple of 16]; all C-contiguous."""
        for name, a, shape in (("x", x, (x.shape[0], self.cols)), ("out", out, (x.shape[0], self.rows)),
                               ("bias", bias, (padded(self.rows, ROWS),))):
            if a is not None and (a.dtype != np.float32 or a.shape != shape or not a.flags.c_contiguous):
                raise ValueError(f"{name}: {a.dtype} {a.shape}, expected contiguous float32 {shape}")
        if x.shape[0]:
            room = aligned(self.room_nbytes(x.shape[0], team.threads))
            team.run(self.prepared(x.ctypes.data, x.shape[0], out.ctypes.data, team.threads, room.ctypes.data,
                                   0 if bias is None else bias.ctypes.data, (x, out, bias, room)))
