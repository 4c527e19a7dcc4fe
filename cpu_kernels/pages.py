"""Attention over KV pages for a tile of query rows: pages widened once, a span of them at a time for four rows, blocks folded in order.

Knows addresses of pages and rows of queries; no projection, no norm, no thread. A row's result depends on its own query, its position and
the pages alone: positions are walked in blocks of BLOCK and spans of SPAN from the sequence's start, so that a token gives the same bits
alone, in a chunk of any size, and whichever thread joins the blocks.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from .atoms import load32, peek, peek_f32, poke, poke_f32
from .jit import kernel
from .lanes import F32, const, invoke, load, op, prefetch, spread, store, vec
from .spans import F32_KIND, FP8_KIND, LOWEST, PAD, ROWS, spans

run_block = invoke(2)                                # (CODE of a tile, tile, block)
_prefetch = op(1, lambda b, address: prefetch(b, address, 0, 2))
_REAL = vec(F32, PAD)
_ones = op(1, lambda b, to: store(b, const(_REAL, 1.0), to, 0, 4))
_zeros = op(1, lambda b, to: store(b, const(_REAL, 0.0), to, 0, 4))
_times = op(3, lambda b, to, of, factor: store(b, b.fmul(load(b, of, _REAL, 0, 4), spread(b, factor, F32, PAD)), to, 0, 4))
BLOCK = 256                                          # positions whose weights share one partial sum
SPAN = 64                                            # positions that are widened and weighed together

# words of a tile: COUNT rows that share keys. POSITIONS: int64 [rows]; QUERIES: float32 [rows, PAD_KEY]; STATE and SUMS are one block's
# result, RUNNING (a state, then sums) that of all blocks so far; WIDE_KEYS .. SPAN_SCALES: a span's widened pages, weights and (fp8) scales of
# keys, then of values; KEYS .. ONES say how the layer's pages lie; NEXT_*: NEXT_PAGES pages that will be read after this tile's
(COUNT, POSITIONS, QUERIES, HEAD, TABLE, WINDOW, SCALE, STATE, SUMS, RUNNING, WIDE_KEYS, WIDE_VALUES, WEIGHTS, WORDS, PAD_KEY, PAD_VALUE,
 ROOM, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, KIND, PAGE_SIZE, HEADS, KEY_WIDTH, VALUE_WIDTH, ONES, CODE, SPAN_SCALES,
 NEXT_TABLE, NEXT_HEAD, NEXT_PAGES) = (8 * i for i in range(32))
STATE_BYTES = 48                                     # of four rows: maximum[4], sum[4], factor[4]


def padded(n: int) -> int:
    """A vector's width as the kernels want it."""
    return -(-n // PAD) * PAD


def span_tokens(page_size: int) -> int:
    """Positions of one span: whole pages."""
    return max(1, SPAN // page_size) * page_size


span_of = kernel(span_tokens, inner=True)


def tile_bytes(rows: int, key_width: int, value_width: int, page_size: int) -> int:
    """Scratch of one tile with what it points to; widths padded."""
    partial, span = rows // ROWS * STATE_BYTES + 4 * rows * value_width, padded(span_tokens(page_size))
    return 512 + 8 * rows + 4 * (rows * key_width + span * (key_width + value_width + ROWS + 3)) + 2 * partial + 16 * 64


@kernel(inner=True)
def lay(tile: int, rows: int, key_width: int, value_width: int, page_size: int) -> None:
    """Lays a tile of at most `rows` (a multiple of ROWS) queries out in memory of tile_bytes, 64 B aligned; widths padded."""
    at, span = tile + 512, (span_of(page_size) + PAD - 1) & -PAD
    poke(tile + WORDS, tile + 256)
    poke(tile + NEXT_PAGES, 0)
    poke(tile + PAGE_SIZE, page_size)
    poke(tile + ONES, at)
    for i in range(0, 4 * span, 64):
        _ones(at + i)
    at += 4 * span
    poke(tile + SPAN_SCALES, at)
    at += 8 * span
    poke(tile + PAD_KEY, key_width)
    poke(tile + PAD_VALUE, value_width)
    poke(tile + POSITIONS, at)
    at += (8 * rows + 63) & -64
    poke(tile + QUERIES, at)
    at += 4 * rows * key_width
    poke(tile + WIDE_KEYS, at)
    at += 4 * span * key_width
    poke(tile + WIDE_VALUES, at)
    at += 4 * span * value_width
    poke(tile + WEIGHTS, at)
    at += 4 * span * ROWS
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
    for i in range(0, 4 * rows * ROWS * peek(tile + PAD_VALUE), 64):
        _zeros(sums + i)


@kernel(inner=True)
def fetch(tile: int, page: int, head: int) -> None:
    """Asks for one head's keys and values of a page. Pages lie anywhere, so no hardware foresees them."""
    kind, size = peek(tile + KIND), peek(tile + PAGE_SIZE)
    item = 4 if kind == F32_KIND else (1 if kind == FP8_KIND else 2)
    row = (page * peek(tile + HEADS) + head) * size * item
    keys, values = peek(tile + KEYS) + row * peek(tile + KEY_WIDTH), peek(tile + VALUES) + row * peek(tile + VALUE_WIDTH)
    for at in range(0, size * item * peek(tile + KEY_WIDTH), 64):
        _prefetch(keys + at)
    if peek(tile + VALUES) != 0:
        for at in range(0, size * item * peek(tile + VALUE_WIDTH), 64):
            _prefetch(values + at)


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
    def take(tile: int, page: int, to: int, first: int, end: int) -> None:
        """Widens rows first..end of a page's keys and values to rows to + first.. of the span."""
        kind, size, wk, wv = peek(tile + KIND), peek(tile + PAGE_SIZE), peek(tile + KEY_WIDTH), peek(tile + VALUE_WIDTH)
        item = 4 if kind == F32_KIND else (1 if kind == FP8_KIND else 2)
        at, pk, pv = (page * peek(tile + HEADS) + peek(tile + HEAD)) * size, peek(tile + PAD_KEY), peek(tile + PAD_VALUE)
        rows(peek(tile + KEYS) + (at + first) * wk * item, peek(tile + WIDE_KEYS) + 4 * to * pk, first, end, wk, pk, kind)
        if peek(tile + VALUES) != 0:
            rows(peek(tile + VALUES) + (at + first) * wv * item, peek(tile + WIDE_VALUES) + 4 * to * pv, first, end, wv, pv, kind)
        if kind == FP8_KIND:
            scales, span = peek(tile + SPAN_SCALES) + 4 * to, (span_of(size) + PAD - 1) & -PAD
            for i in range(first, end):
                poke_f32(scales + 4 * i, peek_f32(peek(tile + KEY_SCALES) + 4 * (at + i)))
                poke_f32(scales + 4 * (span + i), peek_f32(peek(tile + VALUE_SCALES) + 4 * (at + i)))

    @kernel(key=body, inner=True)
    def span_of_group(tile: int, group: int, start: int, count: int) -> None:
        """One span (positions start .. start + count) for the four rows of a group."""
        words, weights, positions = peek(tile + WORDS), peek(tile + WEIGHTS), peek(tile + POSITIONS)
        window, low, high, even = peek(tile + WINDOW), count, 0, True
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
        key_scales = value_scales = peek(tile + ONES)
        if peek(tile + KIND) == FP8_KIND:
            key_scales = peek(tile + SPAN_SCALES)
            value_scales = key_scales + 4 * ((span_of(peek(tile + PAGE_SIZE)) + PAD - 1) & -PAD)
        poke(words, key_scales)
        poke(words + 8, value_scales)
        poke(words + 16, peek(tile + SCALE))
        poke(words + 96, high)
        poke(words + 104, weights)
        scores(peek(tile + QUERIES) + 4 * group * ROWS * peek(tile + PAD_KEY), peek(tile + WIDE_KEYS), peek(tile + PAD_KEY), low, words + 96)
        weigh(weights, (high + ROWS - 1) & -ROWS, words, state)
        poke(words + 96, low)
        poke(words + 104, high)
        poke(words + 112, peek(tile + PAD_VALUE))
        poke(words + 128, peek(tile + SUMS) + 4 * group * ROWS * peek(tile + PAD_VALUE))
        poke(words + 136, state + 32)
        values = peek(tile + WIDE_VALUES)
        poke(words + 120, 4 * peek(tile + PAD_VALUE))
        if peek(tile + VALUES) == 0:
            values = peek(tile + WIDE_KEYS)
            poke(words + 120, 4 * peek(tile + PAD_KEY))
        if even:
            mix(weights, values, words + 96)
        else:
            mix_safe(weights, values, words + 96)

    @kernel(key=body, inner=True)
    def block(tile: int, number: int) -> int:
        reset(tile, peek(tile + STATE), peek(tile + SUMS))
        size, count = peek(tile + PAGE_SIZE), peek(tile + COUNT)
        per, span = max(1, BLOCK // size) * size, span_of(size)
        begin, newest = bounds(tile)
        last, start = min((number + 1) * per, newest + 1), number * per
        start += max(0, begin - start) // span * span
        while start < last:
            end = min(start + span, last)
            for index in range(max(begin, start) // size, (end - 1) // size + 1):
                at = index * size
                if at + span <= newest:
                    fetch(tile, load32(peek(tile + TABLE) + 4 * (index + span // size)), peek(tile + HEAD))
                take(tile, load32(peek(tile + TABLE) + 4 * index), at - start, max(0, begin - at), min(size, end - at))
            if start + span > newest:
                for i in range(peek(tile + NEXT_PAGES)):
                    fetch(tile, load32(peek(tile + NEXT_TABLE) + 4 * i), peek(tile + NEXT_HEAD))
            for group in range((count + ROWS - 1) // ROWS):
                span_of_group(tile, group, start, end - start)
            start += span
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
        low, high = blocks_of(tile)
        if high == low + 1:
            run_block(peek(tile + CODE), tile, low)
            poke(tile + RUNNING, state)
            return
        reset(tile, running, running + peek(tile + ROOM))
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
    poke_f32(at + 32, factor)                        # the place of what is over: what earlier blocks were multiplied with
    whole = 4 * width & -64
    for i in range(0, whole, 64):
        _times(out + i, sums + i, at + 32)
    for i in range(whole, 4 * width, 4):
        poke_f32(out + i, peek_f32(sums + i) * factor)
