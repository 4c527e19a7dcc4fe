"""Attention over KV pages for a tile of query rows: pages widened once, four rows at a time, blocks of positions folded in order.

Knows addresses of pages and rows of queries; no projection, no norm, no thread. A row's result depends on its own query, its position and
the pages alone: positions are walked in blocks of BLOCK from the sequence's start, so that a token gives the same bits alone, in a
chunk of any size, and whichever thread joins the blocks.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from .atoms import load32, peek, peek_f32, poke, poke_f32
from .jit import kernel
from .lanes import invoke
from .spans import F32_KIND, FP8_KIND, LOWEST, PAD, ROWS, spans

run_block = invoke(2)                                # (CODE of a tile, tile, block)
BLOCK = 256                                          # positions whose weights share one partial sum

# words of a tile: COUNT rows that share keys. POSITIONS: int64 [rows]; QUERIES: float32 [rows, PAD_KEY]; STATE and SUMS are one block's
# result, RUNNING (a state, then sums) that of all blocks so far; KEYS .. ONES say how the layer's pages lie
(COUNT, POSITIONS, QUERIES, HEAD, TABLE, WINDOW, SCALE, STATE, SUMS, RUNNING, KEY_PAGE, VALUE_PAGE, WEIGHTS, WORDS, PAD_KEY, PAD_VALUE,
 ROOM, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, KIND, PAGE_SIZE, HEADS, KEY_WIDTH, VALUE_WIDTH, ONES, CODE) = (8 * i for i in range(28))
STATE_BYTES = 48                                     # of four rows: maximum[4], sum[4], factor[4]


def padded(n: int) -> int:
    """A vector's width as the kernels want it."""
    return -(-n // PAD) * PAD

def tile_bytes(rows: int, key_width: int, value_width: int, page_size: int) -> int:
    """Scratch of one tile with what it points to; widths padded."""
    partial = rows // ROWS * STATE_BYTES + 4 * rows * value_width
    return 512 + 8 * rows + 4 * (rows * key_width + page_size * (key_width + value_width + ROWS + 1)) + 2 * partial + 16 * 64


@kernel(inner=True)
def lay(tile: int, rows: int, key_width: int, value_width: int, page_size: int) -> None:
    """Lays a tile of at most `rows` (a multiple of ROWS) queries out in memory of tile_bytes, 64 B aligned; widths padded."""
    at = tile + 512
    poke(tile + WORDS, tile + 256)
    poke(tile + PAGE_SIZE, page_size)
    poke(tile + ONES, at)
    for i in range(page_size):
        poke_f32(at + 4 * i, np.float32(1))
    at += (4 * page_size + 63) & -64
    poke(tile + PAD_KEY, key_width)
    poke(tile + PAD_VALUE, value_width)
    poke(tile + POSITIONS, at)
    at += (8 * rows + 63) & -64
    poke(tile + QUERIES, at)
    at += 4 * rows * key_width
    poke(tile + KEY_PAGE, at)
    at += 4 * page_size * key_width
    poke(tile + VALUE_PAGE, at)
    at += 4 * page_size * value_width
    poke(tile + WEIGHTS, at)
    at += (4 * page_size * ROWS + 63) & -64
    room = partial_bytes(rows, value_width)
    poke(tile + ROOM, rows // ROWS * STATE_BYTES)
    poke(tile + STATE, at)
    poke(tile + SUMS, at + rows // ROWS * STATE_BYTES)
    poke(tile + RUNNING, at + room)


def block_tokens(page_size: int) -> int:
    """Positions of one block: whole pages."""
    return max(1, BLOCK // page_size) * page_size


block_of = kernel(block_tokens, inner=True)


@kernel
def partial_bytes(rows: int, value_width: int) -> int:
    """A state, then sums."""
    return (rows // ROWS * STATE_BYTES + 4 * rows * value_width + 63) & -64


@kernel(inner=True)
def blocks_of(tile: int) -> tuple[int, int]:
    """The blocks that some row of the tile sees: first, end."""
    per = max(1, BLOCK // peek(tile + PAGE_SIZE)) * peek(tile + PAGE_SIZE)
    oldest, newest = bounds(tile)
    return oldest // per, newest // per + 1


@kernel(inner=True)
def bounds(tile: int) -> tuple[int, int]:
    """First and last position that some row sees."""
    positions, window = peek(tile + POSITIONS), peek(tile + WINDOW)
    oldest, newest = peek(positions), peek(positions)
    for i in range(1, peek(tile + COUNT)):
        oldest, newest = min(oldest, peek(positions + 8 * i)), max(newest, peek(positions + 8 * i))
    return (max(0, oldest - window + 1) if window > 0 else 0), newest


@kernel(inner=True)
def reset(tile: int, state: int, sums: int) -> None:
    """A result of no position."""
    rows = (peek(tile + COUNT) + ROWS - 1) // ROWS
    for group in range(rows):
        for r in range(ROWS):
            poke_f32(state + STATE_BYTES * group + 4 * r, np.float32(LOWEST))
            poke_f32(state + STATE_BYTES * group + 16 + 4 * r, np.float32(0))
    for i in range(0, 4 * rows * ROWS * peek(tile + PAD_VALUE), 8):
        poke(sums + i, 0)


class Sweep(NamedTuple):
    """block(tile, number): STATE and SUMS := the result of one block's positions. Called by its address (CODE of a tile), so that it is
    compiled once and not again into every caller.
    join(tile, state, sums): folds a block's result into RUNNING.
    whole(tile): RUNNING := the result of all positions."""

    block: Any
    join: Any
    whole: Any


@functools.cache
def sweep(body: str) -> Sweep:
    """The kernels for one instruction set."""
    made = spans(body)
    widen, scores, weigh, mix, mix_safe, fold = made.widen, made.scores, made.weigh, made.mix, made.mix_safe, made.fold

    @kernel(key=body, inner=True)
    def rows(source: int, to: int, first: int, end: int, width: int, wide: int, kind: int) -> None:
        to += 4 * first * wide
        if width == wide:
            widen(source, to, (end - first) * width, kind)
            return
        item = 4 if kind == F32_KIND else (1 if kind == FP8_KIND else 2)
        for j in range(end - first):
            widen(source + j * width * item, to + 4 * j * wide, width, kind)

    @kernel(key=body, inner=True)
    def take(tile: int, page: int, first: int, end: int) -> None:
        """Widens rows first..end of a page's keys and values."""
        kind, size, wk, wv = peek(tile + KIND), peek(tile + PAGE_SIZE), peek(tile + KEY_WIDTH), peek(tile + VALUE_WIDTH)
        item = 4 if kind == F32_KIND else (1 if kind == FP8_KIND else 2)
        at = (page * peek(tile + HEADS) + peek(tile + HEAD)) * size
        rows(peek(tile + KEYS) + (at + first) * wk * item, peek(tile + KEY_PAGE), first, end, wk, peek(tile + PAD_KEY), kind)
        if peek(tile + VALUES) != 0:
            rows(peek(tile + VALUES) + (at + first) * wv * item, peek(tile + VALUE_PAGE), first, end, wv, peek(tile + PAD_VALUE), kind)

    @kernel(key=body, inner=True)
    def page_of_group(tile: int, group: int, start: int, count: int, scale_at: int) -> None:
        """One page (positions start .. start + count) for the four rows of a group."""
        words, weights, positions = peek(tile + WORDS), peek(tile + WEIGHTS), peek(tile + POSITIONS)
        window, size = peek(tile + WINDOW), peek(tile + PAGE_SIZE)
        low, high, even = size, 0, True
        for r in range(ROWS):
            i = group * ROWS + r
            first, end = 0, 0
            if i < peek(tile + COUNT):
                at = peek(positions + 8 * i)
                first = max(0, at - window + 1 - start) if window > 0 else 0
                end = min(count, at + 1 - start)
            if first >= end:
                first, end = 0, 0
            else:
                low, high = min(low, first), max(high, end)
            poke(words + 24 + 8 * r, first)
            poke(words + 56 + 8 * r, end)
        if low >= high:
            return
        for r in range(ROWS):
            if group * ROWS + r < peek(tile + COUNT):
                even = even and peek(words + 24 + 8 * r) == low and peek(words + 56 + 8 * r) == high
        state = peek(tile + STATE) + STATE_BYTES * group
        fp8 = peek(tile + KIND) == FP8_KIND
        poke(words, peek(tile + KEY_SCALES) + 4 * scale_at if fp8 else peek(tile + ONES))
        poke(words + 8, peek(tile + VALUE_SCALES) + 4 * scale_at if fp8 else peek(tile + ONES))
        poke(words + 16, peek(tile + SCALE))
        poke(words + 96, high)
        poke(words + 104, weights)
        scores(peek(tile + QUERIES) + 4 * group * ROWS * peek(tile + PAD_KEY), peek(tile + KEY_PAGE), peek(tile + PAD_KEY), low, words + 96)
        weigh(weights, size, words, state)
        poke(words + 96, low)
        poke(words + 104, high)
        poke(words + 112, peek(tile + PAD_VALUE))
        poke(words + 128, peek(tile + SUMS) + 4 * group * ROWS * peek(tile + PAD_VALUE))
        poke(words + 136, state + 32)
        values = peek(tile + VALUE_PAGE)
        poke(words + 120, 4 * peek(tile + PAD_VALUE))
        if peek(tile + VALUES) == 0:
            values = peek(tile + KEY_PAGE)
            poke(words + 120, 4 * peek(tile + PAD_KEY))
        if even:
            mix(weights, values, words + 96)
        else:
            mix_safe(weights, values, words + 96)

    @kernel(key=body, inner=True)
    def block(tile: int, number: int) -> int:
        reset(tile, peek(tile + STATE), peek(tile + SUMS))
        size, count = peek(tile + PAGE_SIZE), peek(tile + COUNT)
        per = max(1, BLOCK // size)
        begin, newest = bounds(tile)
        for index in range(max(number * per, begin // size), min((number + 1) * per, newest // size + 1)):
            page = load32(peek(tile + TABLE) + 4 * index)
            start = index * size
            first, end = max(0, begin - start), min(size, newest + 1 - start)
            take(tile, page, first, end)
            for group in range((count + ROWS - 1) // ROWS):
                page_of_group(tile, group, start, end, (page * peek(tile + HEADS) + peek(tile + HEAD)) * size)
        return 0

    @kernel(key=body, inner=True)
    def join(tile: int, state: int, sums: int) -> None:
        width, running = peek(tile + PAD_VALUE), peek(tile + RUNNING)
        for group in range((peek(tile + COUNT) + ROWS - 1) // ROWS):
            offset = 4 * group * ROWS * width
            fold(state + STATE_BYTES * group, sums + offset, running + STATE_BYTES * group, running + peek(tile + ROOM) + offset, width)

    @kernel(key=body, inner=True)
    def whole(tile: int) -> None:
        running, state, sums = peek(tile + RUNNING), peek(tile + STATE), peek(tile + SUMS)
        reset(tile, running, running + peek(tile + ROOM))
        low, high = blocks_of(tile)
        for number in range(low, high):
            run_block(peek(tile + CODE), tile, number)
            join(tile, state, sums)

    return Sweep(block, join, whole)



@kernel(inner=True)
def finish(tile: int, row: int, out: int, width: int, sink: int) -> None:
    """out[width] := the row's running sums over its weights' sum; sink: address of one more logit that weighs nothing, or 0."""
    at = peek(tile + RUNNING) + STATE_BYTES * (row // ROWS) + 4 * (row % ROWS)
    sums = peek(tile + RUNNING) + peek(tile + ROOM) + 4 * row * peek(tile + PAD_VALUE)
    total, factor = peek_f32(at + 16), np.float32(1)
    if sink != 0:
        top, logit = peek_f32(at), peek_f32(sink)
        new = max(top, logit)
        factor = np.float32(math.exp(top - new))
        total = np.float32(total * factor + math.exp(logit - new))
    factor = np.float32(factor / total)
    for i in range(0, 4 * width, 4):
        poke_f32(out + i, peek_f32(sums + i) * factor)
