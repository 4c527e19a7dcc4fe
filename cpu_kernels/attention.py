"""Attention over KV pages as jobs of a team: grouped queries with windows and sinks, and MLA in its latent space.

Keys and values are in their pages already (`heads`). A token's result is the same bits alone, in any chunk, among any neighbours and for any
number of threads; `pages` says why. Knows addresses and counts; no norm, no rotation and no model.
"""

import functools
from typing import Any

import numpy as np

from . import cpu, lanes
from . import pages as paged
from .atoms import add, load32, peek, peek_f32, peek_f64, poke, poke_f32
from .jit import address as machine_code
from .jit import kernel
from .jobs import barrier, claims, share
from .operands import ready
from .spans import F32_KIND, ROWS, spans
from .team import Prepared

MOST_ROWS = 32                                       # of a tile of several tokens: queries that share widened pages

# operands of both jobs, behind the address of the reals: where the step's tokens stand, then how the pages lie
(_Q, _STRIDE, _TOKENS, _SEQUENCES, _AT, _STARTS, _LENGTHS, _TABLE, _TABLE_WIDTH, _PAGE_SIZE, _KEYS, _VALUES, _KEY_SCALES, _VALUE_SCALES, _KIND,
 _OUT, _SCRATCH, _CODE, _HEADS, _GROUPS, _DIM, _WINDOW, _SINKS) = (8 * i for i in range(1, 24))
_NOPE, _RANK = _GROUPS, _DIM                         # what these are in MLA, whose operands go on
_ROPE, _V_DIM, _UP, _UP_KIND = (8 * i for i in range(24, 28))


class Scratch:
    """Memory that attention jobs of one team work in, one job at a time; jobs hold its address and find what it has grown to.

    `context`: the longest sequence; beyond it, long sequences are not split over threads."""

    def __init__(self, threads: int, context: int) -> None:
        self.threads, self.context = threads, context
        self.words = np.zeros(4, np.int64)           # per thread: address, bytes; partial results: address, bytes
        self.address = int(self.words.ctypes.data)
        self._keep: list[Any] = [None, None]

    def fit(self, rows: int, key_width: int, value_width: int, page_size: int) -> None:
        """Room for tiles of that size; never less than it was."""
        splits = 2 * self.threads * -(-self.context // paged.block_tokens(page_size)) if self.threads > 1 else 0
        one = paged.tile_bytes(rows, paged.padded(key_width), paged.padded(value_width), page_size)
        for i, each, count in ((0, one, self.threads), (1, paged.partial_bytes(rows, paged.padded(value_width)), splits)):
            have = self.words[2 * i + 1] if i == 0 else 0
            size = each * count
            if (i == 0 and each > have) or (i == 1 and size > self.words[3]):
                memory = np.zeros(size + 64, np.uint8)
                self._keep[i] = memory
                self.words[2 * i:2 * i + 2] = memory.ctypes.data + (-memory.ctypes.data % 64), each if i == 0 else size


@kernel(inner=True)
def tiles_of(arguments: int, many: int) -> int:
    """Tiles of `many` tokens in all sequences."""
    starts = peek(arguments + _STARTS)
    if peek(arguments + _TOKENS) == peek(arguments + _SEQUENCES):
        return peek(arguments + _TOKENS)
    tiles = 0
    for s in range(peek(arguments + _SEQUENCES)):
        tiles += (load32(starts + 4 * s + 4) - load32(starts + 4 * s) + many - 1) // many
    return tiles


@kernel(inner=True)
def longest(arguments: int) -> int:
    length = 0
    for s in range(peek(arguments + _SEQUENCES)):
        length = max(length, load32(peek(arguments + _LENGTHS) + 4 * s))
    return length


@kernel(inner=True)
def place(arguments: int, tile: int, number: int, many: int) -> tuple[int, int]:
    """Points a tile at the pages of the sequence that tile `number` belongs to. Returns its first token's row, and its tokens."""
    starts = peek(arguments + _STARTS)
    s = 0
    if peek(arguments + _TOKENS) == peek(arguments + _SEQUENCES):
        s, number = number, 0
    else:
        tiles = (load32(starts + 4) - load32(starts) + many - 1) // many
        while number >= tiles:
            number -= tiles
            s += 1
            tiles = (load32(starts + 4 * s + 4) - load32(starts + 4 * s) + many - 1) // many
    first = load32(starts + 4 * s) + number * many
    poke(tile + paged.TABLE, peek(arguments + _TABLE) + 4 * s * peek(arguments + _TABLE_WIDTH))
    poke(tile + paged.CODE, peek(arguments + _CODE))
    poke(tile + paged.KEYS, peek(arguments + _KEYS))
    poke(tile + paged.VALUES, peek(arguments + _VALUES))
    poke(tile + paged.KEY_SCALES, peek(arguments + _KEY_SCALES))
    poke(tile + paged.VALUE_SCALES, peek(arguments + _VALUE_SCALES))
    poke(tile + paged.KIND, peek(arguments + _KIND))
    poke(tile + paged.WINDOW, peek(arguments + _WINDOW))
    poke_f32(tile + paged.SCALE, np.float32(peek_f64(peek(arguments))))
    return first, min(many, load32(starts + 4 * s + 4) - first)


@kernel(inner=True)
def foresee(arguments: int, tile: int, sequence: int, head: int) -> None:
    """Names the first pages of another sequence's step as those that will be read after this tile's."""
    size, window = peek(arguments + _PAGE_SIZE), peek(arguments + _WINDOW)
    length, span = load32(peek(arguments + _LENGTHS) + 4 * sequence), paged.span_of(size)
    first = (max(0, length - window) if window > 0 else 0) // span * span
    poke(tile + paged.NEXT_TABLE, peek(arguments + _TABLE) + 4 * (sequence * peek(arguments + _TABLE_WIDTH) + first // size))
    poke(tile + paged.NEXT_HEAD, head)
    poke(tile + paged.NEXT_PAGES, (min(span, length - first) + size - 1) // size)


@functools.cache
def grouped(body: str) -> Any:
    """The job of grouped-query attention for one instruction set."""
    widen = spans(body).widen
    _, join, whole = paged.sweep(body)

    @kernel(key=body, inner=True)
    def load(arguments: int, tile: int, task: int, many: int) -> int:
        """Fills a tile with the queries of task number `task`: some tokens of one sequence, one kv head. Returns the first token's row."""
        kv_heads, dim = peek(arguments + _GROUPS), peek(arguments + _DIM)
        group, wide = peek(arguments + _HEADS) // kv_heads, (dim + 15) & -16
        paged.lay(tile, (many * group + ROWS - 1) // ROWS * ROWS, wide, wide, peek(arguments + _PAGE_SIZE))
        first, count = place(arguments, tile, task // kv_heads, many)
        kv_head = task % kv_heads
        poke(tile + paged.HEADS, kv_heads)
        poke(tile + paged.HEAD, kv_head)
        poke(tile + paged.KEY_WIDTH, dim)
        poke(tile + paged.VALUE_WIDTH, dim)
        poke(tile + paged.COUNT, count * group)
        for t in range(count):
            source = peek(arguments + _Q) + 4 * ((first + t) * peek(arguments + _STRIDE) + kv_head * group * dim)
            for g in range(group):
                row = t * group + g
                poke(peek(tile + paged.POSITIONS) + 8 * row, load32(peek(arguments + _AT) + 4 * (first + t)))
                widen(source + 4 * g * dim, peek(tile + paged.QUERIES) + 4 * row * wide, dim, F32_KIND)
        return first

    @kernel(key=body, inner=True)
    def answer(arguments: int, tile: int, task: int, first: int) -> None:
        heads, dim, kv_head = peek(arguments + _HEADS), peek(arguments + _DIM), task % peek(arguments + _GROUPS)
        group, sinks = heads // peek(arguments + _GROUPS), peek(arguments + _SINKS)
        for row in range(peek(tile + paged.COUNT)):
            head = kv_head * group + row % group
            out = peek(arguments + _OUT) + 4 * ((first + row // group) * heads + head) * dim
            paged.finish(tile, row, out, dim, sinks + 4 * head if sinks != 0 else 0)

    @kernel(key=body, inner=True)
    def joined(arguments: int, tile: int, task: int, many: int, blocks: int, room: int) -> None:
        """One task from the partial results of its blocks."""
        first = load(arguments, tile, task, many)
        paged.reset(tile, peek(tile + paged.RUNNING), peek(tile + paged.RUNNING) + peek(tile + paged.ROOM))
        low, high = paged.blocks_of(tile)
        for number in range(low, high):
            partial = peek(peek(arguments + _SCRATCH) + 16) + (task * blocks + number) * room
            join(tile, partial, partial + peek(tile + paged.ROOM))
        answer(arguments, tile, task, first)

    @kernel(key=body, inner=True)
    def attend(control: int, tid: int, threads: int, arguments: int) -> int:
        """Every task by whoever is free: whole, or block by block when tasks are few and long."""
        scratch, kv_heads = peek(arguments + _SCRATCH), peek(arguments + _GROUPS)
        tile, group = peek(scratch) + tid * peek(scratch + 8), peek(arguments + _HEADS) // kv_heads
        size = peek(arguments + _PAGE_SIZE)
        many = 1 if peek(arguments + _TOKENS) == peek(arguments + _SEQUENCES) else max(1, MOST_ROWS // group)
        per = paged.block_of(size)
        tasks, blocks = tiles_of(arguments, many) * kv_heads, (longest(arguments) + per - 1) // per
        room = paged.partial_bytes((many * group + ROWS - 1) // ROWS * ROWS, (peek(arguments + _DIM) + 15) & -16)
        split = threads > 1 and blocks > 1 and tasks < 2 * threads and tasks * blocks * room <= peek(scratch + 24)
        items = tasks * blocks if split else tasks
        for k in range(threads):
            owner = (tid + k) % threads
            lo, hi = share(items, owner, threads)
            counter = claims(control, tid, owner, 0)
            item = lo + add(counter, 1)
            while item < hi:
                if split:
                    load(arguments, tile, item // blocks, many)
                    low, high = paged.blocks_of(tile)
                    if low <= item % blocks < high:
                        poke(tile + paged.STATE, peek(scratch + 16) + item * room)
                        poke(tile + paged.SUMS, peek(tile + paged.STATE) + peek(tile + paged.ROOM))
                        paged.run_block(peek(tile + paged.CODE), tile, item % blocks)
                else:
                    first = load(arguments, tile, item, many)
                    if many == 1 and item + 1 < hi:
                        foresee(arguments, tile, (item + 1) // kv_heads, (item + 1) % kv_heads)
                    whole(tile)
                    answer(arguments, tile, item, first)
                item = lo + add(counter, 1)
        if split:
            if not barrier(control, tid, threads):
                return 0
            lo, hi = share(tasks, tid, threads)
            for task in range(lo, hi):
                joined(arguments, tile, task, many, blocks, room)
        return 0

    return attend


@functools.cache
def _grouped() -> tuple[Any, int]:
    body = lanes.body_of(cpu.isa())
    return grouped(body), machine_code(paged.sweep(body).block, 2)


def attend(q: int, stride: int, tokens: int, sequences: int, positions: int, starts: int, lengths: int, table: int, table_width: int,
           page_size: int, keys: int, values: int, key_scales: int, value_scales: int, kind: int, out: int, heads: int, kv_heads: int, dim: int,
           window: int, sinks: int, scale: float, scratch: Scratch, keep: Any = None) -> Prepared:
    """Grouped-query attention, prepared: addresses and counts.

    q float32: token t's heads start at q + 4 * t * stride; positions int32 [T]; starts int32 [S + 1]; lengths int32 [S], tokens of a sequence
    after this step; table int32 [S, table_width]; keys, values [pages, kv_heads, page_size, dim] of `kind` (heads.KV_TYPES), scales
    float32 [pages, kv_heads, page_size] or 0; out float32 [T, heads * dim]; window: tokens seen, 0 for all; sinks float32 [heads] or 0."""
    if heads % kv_heads or page_size % 2:
        raise ValueError(f"heads: {heads} for {kv_heads} kv heads" if heads % kv_heads else f"page_size: {page_size} is odd")
    group = heads // kv_heads
    scratch.fit(-(-max(1, MOST_ROWS // group) * group // ROWS) * ROWS, dim, dim, page_size)
    job, code = _grouped()
    return ready(job, [
        q, stride, tokens, sequences, positions, starts, lengths, table, table_width, page_size, keys, values, key_scales, value_scales, kind,
        out, scratch.address, code, heads, kv_heads, dim, window, sinks], [scale], (scratch, keep))


@functools.cache
def latent(body: str) -> Any:
    """The job of MLA for one instruction set: queries go into the latent space, results come out of it, pages are read as they are."""
    widen, mix1, dot = spans(body).widen, spans(body).mix1, spans(body).dot
    _, _, whole = paged.sweep(body)

    @kernel(key=body, inner=True)
    def into_latent(arguments: int, tile: int, head: int, source: int, to: int, count: int, step: int) -> None:
        """For `count` tokens: query in latent space := q (nope) times one head's upper projection of keys. source, to: of the first token,
        `step` rows of the tile apart."""
        nope, rank, up = peek(arguments + _NOPE), peek(arguments + _RANK), peek(arguments + _UP)
        item = 4 if peek(arguments + _UP_KIND) == F32_KIND else 2
        weights = up + item * head * (nope + peek(arguments + _V_DIM)) * rank
        width, words, size = peek(tile + paged.PAD_KEY), peek(tile + paged.WORDS), peek(tile + paged.PAGE_SIZE)
        for t in range(count):
            for i in range(width):
                poke_f32(to + 4 * (t * step * width + i), np.float32(0))
        for first in range(0, nope, size):
            many = min(size, nope - first)
            for j in range(many):
                widen(weights + item * (first + j) * rank, peek(tile + paged.WIDE_KEYS) + 4 * j * width, rank, peek(arguments + _UP_KIND))
            for t in range(count):
                poke(words, 0)
                poke(words + 8, many)
                poke(words + 16, (rank + 15) & -16)
                poke(words + 24, 4 * width)
                poke(words + 32, to + 4 * t * step * width)
                poke(words + 40, peek(tile + paged.ONES))
                mix1(source + 4 * (t * peek(arguments + _STRIDE) + first), peek(tile + paged.WIDE_KEYS), words)

    @kernel(key=body, inner=True)
    def out_of_latent(arguments: int, tile: int, head: int, row: int, out: int, count: int, step: int) -> None:
        """For `count` tokens, `step` rows apart from row `row`: out := one head's upper projection of values times the result in latent space."""
        nope, rank, v_dim = peek(arguments + _NOPE), peek(arguments + _RANK), peek(arguments + _V_DIM)
        item = 4 if peek(arguments + _UP_KIND) == F32_KIND else 2
        weights = peek(arguments + _UP) + item * (head * (nope + v_dim) + nope) * rank
        width, wide = peek(tile + paged.PAD_KEY), peek(arguments + _HEADS) * v_dim
        for t in range(count):
            paged.finish(tile, row + t * step, peek(tile + paged.QUERIES) + 4 * (row + t * step) * width, rank, 0)
        for v in range(v_dim):
            widen(weights + item * v * rank, peek(tile + paged.WIDE_KEYS), rank, peek(arguments + _UP_KIND))
            for t in range(count):
                poke_f32(out + 4 * (t * wide + v), dot(peek(tile + paged.WIDE_KEYS), peek(tile + paged.QUERIES) + 4 * (row + t * step) * width, rank))

    @kernel(key=body, inner=True)
    def task_of(arguments: int, tile: int, number: int, many: int, head: int, heads: int) -> None:
        """Some tokens of one sequence, `heads` heads from `head` on."""
        nope, rope, rank = peek(arguments + _NOPE), peek(arguments + _ROPE), peek(arguments + _RANK)
        paged.lay(tile, (many * heads + ROWS - 1) // ROWS * ROWS, (rank + rope + 15) & -16, (rank + 15) & -16, peek(arguments + _PAGE_SIZE))
        first, count = place(arguments, tile, number, many)
        poke(tile + paged.HEADS, 1)
        poke(tile + paged.HEAD, 0)
        poke(tile + paged.KEY_WIDTH, rank + rope)
        poke(tile + paged.VALUE_WIDTH, rank)
        poke(tile + paged.COUNT, count * heads)
        width = peek(tile + paged.PAD_KEY)
        for h in range(heads):
            source = peek(arguments + _Q) + 4 * (first * peek(arguments + _STRIDE) + (head + h) * (nope + rope))
            to = peek(tile + paged.QUERIES) + 4 * h * width
            into_latent(arguments, tile, head + h, source, to, count, heads)
            for t in range(count):
                poke(peek(tile + paged.POSITIONS) + 8 * (t * heads + h), load32(peek(arguments + _AT) + 4 * (first + t)))
                for i in range(rope):
                    poke_f32(to + 4 * (t * heads * width + rank + i), peek_f32(source + 4 * (t * peek(arguments + _STRIDE) + nope + i)))
        whole(tile)
        for h in range(heads):
            out = peek(arguments + _OUT) + 4 * (first * peek(arguments + _HEADS) + head + h) * peek(arguments + _V_DIM)
            out_of_latent(arguments, tile, head + h, h, out, count, heads)

    @kernel(key=body, inner=True)
    def attend(control: int, tid: int, threads: int, arguments: int) -> int:
        scratch, heads = peek(arguments + _SCRATCH), peek(arguments + _HEADS)
        tile = peek(scratch) + tid * peek(scratch + 8)
        many, each = (1, MOST_ROWS) if peek(arguments + _TOKENS) == peek(arguments + _SEQUENCES) else (MOST_ROWS // ROWS, ROWS)
        while each > ROWS and tiles_of(arguments, many) * ((heads + each - 1) // each) < 2 * threads:
            each //= 2
        groups = (heads + each - 1) // each
        tasks = tiles_of(arguments, many) * groups
        for k in range(threads):
            owner = (tid + k) % threads
            lo, hi = share(tasks, owner, threads)
            counter = claims(control, tid, owner, 0)
            task = lo + add(counter, 1)
            while task < hi:
                head = task % groups * each
                task_of(arguments, tile, task // groups, many, head, min(each, heads - head))
                task = lo + add(counter, 1)
        return 0

    return attend


@functools.cache
def _latent() -> tuple[Any, int]:
    body = lanes.body_of(cpu.isa())
    return latent(body), machine_code(paged.sweep(body).block, 2)


def attend_latent(q: int, tokens: int, sequences: int, positions: int, starts: int, lengths: int, table: int, table_width: int, page_size: int,
                  pages: int, scales: int, kind: int, out: int, heads: int, nope: int, rope: int, rank: int, v_dim: int, up: int, up_kind: int,
                  scale: float, scratch: Scratch, keep: Any = None) -> Prepared:
    """MLA, prepared. q float32 [T, heads * (nope + rope)], rotated; pages [pages, page_size, rank + rope], normed latent | rotated key, of
    `kind`, scales float32 [pages, page_size] or 0; up [heads * (nope + v_dim), rank] float32 or bf16 (up_kind), per head nope rows, then v
    rows; out float32 [T, heads * v_dim]. The rest as in `attend`."""
    if page_size % 2:
        raise ValueError(f"page_size: {page_size} is odd")
    scratch.fit(MOST_ROWS, rank + rope, rank, page_size)
    job, code = _latent()
    return ready(job, [q, heads * (nope + rope), tokens, sequences, positions, starts, lengths, table, table_width, page_size, pages, 0, scales,
                       scales, kind, out, scratch.address, code, heads, nope, rank, 0, 0, rope, v_dim, up, up_kind], [scale], (scratch, keep))
