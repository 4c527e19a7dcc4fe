"""The job of a routed layer when experts have many tokens each: whole FFNs as tile products. Knows addresses in words; `moe` fills them.

Adds to `out` what the experts give their tokens. Stages, a barrier after each: group pairs by expert; pack each expert's rows of x into A tiles
(padded to 32); gate and up, activation, into A tiles again; (int8: round those by row;) down, added to out. A task of the last stage owns columns
of out and goes through the experts in order, so a token's sum has one order for any number of threads.
"""
import functools
from typing import Any

from . import ffn, routed
from .atoms import add, call, load, peek, poke
from .ffn import peek32, poke32
from .formats import COLS, ROWS
from .gemm import (
    AHEAD,
    AHEAD_ROW,
    BLOCKS,
    CURRENT,
    INVERSES_AT,
    ROOM_NBYTES,
    ROW,
    SCALES_AT,
    SUMS,
    WIDE,
    X_STRIDE,
    W,
    X,
    panel_tiles,
)
from .gemm import ROOM as PRODUCT_ROOM
from .jit import kernel
from .jobs import barrier, claims, share
from .lines import bf16_line, bf16_row, copy_row, dequantize_rows, greatest, int8_line, join_rows, scale_of, widen_line, zero_line
from .routed import first_pair, word
from .tiles import BLOCK_NBYTES, power

# words after those of `routed`; x and hidden rows as A tiles, their row scales (int8), hidden rows before rounding (int8)
(PACKED, PACKED_SCALES, HIDDEN_TILES, HIDDEN_SCALES, HIDDEN_BF16, BLOCK_STARTS, ROOM, INTER_CHUNK, HIDDEN_CHUNK, CONFIGURATION, BLOCKS_AT_ONCE,
 PACK, ROUND, GATE_UP, DOWN, ACTIVATE, MULTIPLY, FILL, SCALES, DOWN_MULTIPLY, DOWN_FILL, DOWN_SCALES) = range(routed.WORDS, routed.WORDS + 22)
WORDS = routed.WORDS + 22
# per thread: the room of `gemm`, some float32, the arguments of a product, 16 B that a call leaves behind, the sums
VALUES_AT = ROOM_NBYTES
PRODUCT_AT = VALUES_AT + 512
CALL_AT = PRODUCT_AT + 128
SUMS_AT = CALL_AT + 128
MOST_CHUNK = 8                                       # pieces of 32 columns that a task keeps the sums of


def room_nbytes(blocks: int) -> int:
    """Scratch of one thread that takes `blocks` blocks of 32 rows at once."""
    return SUMS_AT + MOST_CHUNK * blocks * BLOCK_NBYTES


@kernel
def block_start(a: int, u: int) -> int:
    """The first 32-row block of the u-th used expert."""
    return peek32(word(a, BLOCK_STARTS) + 4 * u)


@kernel
def count_blocks(a: int) -> None:
    at = 0
    n = word(a, routed.USED_COUNT)
    for u in range(n):
        poke32(word(a, BLOCK_STARTS) + 4 * u, at)
        at += (first_pair(a, u + 1) - first_pair(a, u) + 31) // 32
    poke32(word(a, BLOCK_STARTS) + 4 * n, at)


@kernel
def owner_of(a: int, block: int) -> int:
    """Which used expert a 32-row block belongs to."""
    lo, hi = 0, word(a, routed.USED_COUNT)
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if block_start(a, middle) <= block:
            lo = middle
        else:
            hi = middle
    return lo


@kernel
def pack_bf16(a: int, u: int, block: int, values: int) -> int:
    """32 rows of x of one expert, as bf16 A tiles."""
    H = word(a, routed.HIDDEN)
    per = (H + COLS - 1) // COLS
    into = word(a, PACKED) + block * per * 4096
    pair = first_pair(a, u) + 32 * (block - block_start(a, u))
    bf16 = word(a, routed.BF16)
    for r in range(32):
        if pair + r >= first_pair(a, u + 1):
            for line in range(2 * per):
                zero_line(into + line * 2048 + 64 * r)
            continue
        x = word(a, routed.INPUTS) + peek32(word(a, routed.TOKENS) + 4 * (pair + r)) * H * (4 - 2 * bf16)
        if bf16:
            copy_row(x, H // 32, into + 64 * r)
        else:
            bf16_row(x, H // 32, into + 64 * r)
        for line in range(H // 32, 2 * per):             # what is left of a width that is no multiple of 64
            ffn.load32(x, bf16, 32 * line, H, values)
            bf16_line(values, into + line * 2048 + 64 * r)
    return 0


@kernel
def pack_int8(a: int, u: int, block: int, values: int) -> int:
    """32 rows of x of one expert, rounded by row to int8 A tiles."""
    H = word(a, routed.HIDDEN)
    per = (H + COLS - 1) // COLS
    into = word(a, PACKED) + block * per * 2048
    pair = first_pair(a, u) + 32 * (block - block_start(a, u))
    bf16 = word(a, routed.BF16)
    for r in range(32):
        scale = word(a, PACKED_SCALES) + 4 * (32 * block + r)
        at = into + 64 * r
        if pair + r >= first_pair(a, u + 1):
            poke32(scale, 0)
            for k in range(per):
                zero_line(at + 2048 * k)
            continue
        x = word(a, routed.INPUTS) + peek32(word(a, routed.TOKENS) + 4 * (pair + r)) * H * (4 - 2 * bf16)
        poke32(values + 128, 0)
        for line in range(2 * per):
            ffn.load32(x, bf16, 32 * line, H, values)
            greatest(values, values + 128)
        scale_of(values + 128, scale, values + 132)
        for line in range(2 * per):
            ffn.load32(x, bf16, 32 * line, H, values)
            int8_line(values, values + 132, at + 2048 * (line // 2) + 32 * (line & 1))
    return 0


@kernel
def round_hidden(a: int, block: int, values: int, _: int) -> int:
    """32 hidden rows from bf16 lines to int8 A tiles."""
    per = word(a, routed.INTER) // COLS
    source = word(a, HIDDEN_BF16) + block * per * 4096
    into = word(a, HIDDEN_TILES) + block * per * 2048
    for r in range(32):
        scale = word(a, HIDDEN_SCALES) + 4 * (32 * block + r)
        poke32(values + 128, 0)
        for line in range(2 * per):
            widen_line(source + line * 2048 + 64 * r, values)
            greatest(values, values + 128)
        scale_of(values + 128, scale, values + 132)
        for line in range(2 * per):
            widen_line(source + line * 2048 + 64 * r, values)
            int8_line(values, values + 132, into + 2048 * (line // 2) + 32 * (line & 1) + 64 * r)
    return 0


@kernel
def join_columns(a: int, u: int, pair: int, rows: int, first: int, last: int, blocks: int, room: int) -> None:
    """Adds columns 32 · first .. 32 · last − 1 of `rows` results to their tokens' rows of out; the sums of 32 columns are together."""
    H, where, sums = word(a, routed.HIDDEN), room + VALUES_AT, room + SUMS_AT
    e = peek32(word(a, routed.USED) + 4 * u)
    whole = min(last, H // 32)
    weights, stride = word(a, routed.PAIR_WEIGHTS) + 4 * pair, 4
    if word(a, routed.ON_INPUT):
        weights, stride = word(a, routed.ONE), 0
    if whole > first:
        poke(where, sums)
        poke(where + 8, rows)
        poke(where + 16, word(a, routed.TOKENS) + 4 * pair)
        poke(where + 24, weights)
        poke(where + 32, stride)
        poke(where + 40, word(a, routed.OUT) + 128 * first)
        poke(where + 48, 4 * H)
        poke(where + 56, word(a, routed.BIAS_DOWN) + e * word(a, routed.BIAS_H) + 128 * first)
        poke(where + 64, whole - first)
        poke(where + 72, blocks * BLOCK_NBYTES)
        join_rows(where)
    for i in range(max(whole, first), last):             # the last columns of a width that is no multiple of 32
        for r in range(rows):
            at = sums + (i - first) * blocks * BLOCK_NBYTES + 128 * r
            routed.join_row(a, e, pair + r, 2 * i, at, where - routed.VALUES)
            if 32 * i + ROWS < H:
                routed.join_row(a, e, pair + r, 2 * i + 1, at + 64, where - routed.VALUES)


@kernel
def set_product(room: int, i: int, value: int) -> None:
    poke(room + PRODUCT_AT + 8 * i, value)


@kernel
def product(a: int, of: int, room: int, w: int, row: int, sums: int, ahead: int, ahead_row: int) -> None:
    """32 rows of weights times the blocks that the room's product is set to; `ahead` is unpacked on the way and is `current` next time. `of`: 0,
    or 3 for the format of down."""
    set_product(room, W, w)
    set_product(room, ROW, row)
    set_product(room, SUMS, sums)
    set_product(room, AHEAD, ahead)
    set_product(room, AHEAD_ROW, ahead_row)
    if ahead != 0:
        call(word(a, SCALES + of), ahead, ahead_row, peek(room + PRODUCT_AT + 8 * WIDE), room + 128, room + CALL_AT)
    set_product(room, CURRENT, call(word(a, MULTIPLY + of), room + PRODUCT_AT, 0, 0, 0, room + CALL_AT))


@kernel
def start_products(a: int, of: int, room: int, w: int, row: int, wide: int, x: int, stride: int, blocks: int) -> None:
    """Sets the room's product to `blocks` blocks of activations at x, and unpacks the first panel of the first 32 rows."""
    set_product(room, WIDE, wide)
    set_product(room, X, x)
    set_product(room, X_STRIDE, stride)
    set_product(room, BLOCKS, blocks)
    set_product(room, PRODUCT_ROOM, room)
    set_product(room, CURRENT, 0)
    call(word(a, SCALES + of), w, row, wide, room, room + CALL_AT)
    call(word(a, FILL + of), w, row, panel_tiles(wide), room, room + CALL_AT)


@kernel
def turn(room: int) -> None:
    """The scales of what was ahead are now the current ones."""
    for i in range(16):
        poke(room + SCALES_AT + 8 * i, peek(room + SCALES_AT + 128 + 8 * i))
        poke(room + INVERSES_AT + 8 * i, peek(room + INVERSES_AT + 128 + 8 * i))


@functools.cache
def units_of(bf16: bool, gated: bool, kind: str) -> dict[int, Any]:
    """What the job calls by address, by word: each compiled on its own, none depends on the weights' format. `kind`: the activation."""
    step = 4096 if bf16 else 2048
    apply = ffn.activations[kind, gated]

    @kernel(key=(bf16, gated, kind))
    def activate(a: int, where: int, gate: int, up: int) -> int:
        """32 columns of gate and up of up to 32 rows -> hidden columns. `where`: the used expert, first pair, rows, 32-row block, column / 32."""
        u, pair, rows, block, i = peek(where), peek(where + 8), peek(where + 16), peek(where + 24), peek(where + 32)
        per = word(a, routed.INTER) // COLS
        bias = peek32(word(a, routed.USED) + 4 * u) * word(a, routed.BIAS_I) + 128 * i
        into = (word(a, HIDDEN_TILES) if bf16 else word(a, HIDDEN_BF16)) + (block * per * 2 + i) * 2048
        first = word(a, routed.BIAS_GATE) if gated else word(a, routed.BIAS_UP)
        plain = word(a, routed.BIAS_I) == 0 and word(a, routed.ON_INPUT) == 0
        for r in range(rows):
            weight = word(a, routed.PAIR_WEIGHTS) + 4 * (pair + r) if word(a, routed.ON_INPUT) else word(a, routed.ONE)
            for half in range(0, 128, 64):
                g, v = gate + 128 * r + half, up + 128 * r + half
                if not plain:
                    ffn.scale_add(g, weight, first + bias + half)
                    if gated:
                        ffn.scale_add(v, weight, word(a, routed.BIAS_UP) + bias + half)
                apply(g, v, word(a, routed.PARAMS))
            bf16_line(gate + 128 * r, into + 64 * r)
        for r in range(rows, 32):
            zero_line(into + 64 * r)
        return 0

    @kernel(key=(bf16, gated))
    def gate_up(a: int, u: int, span: int, room: int) -> int:
        """Hidden columns 32 · (span // 65536) .. 32 · (span % 65536) − 1 of one expert, all its rows."""
        first, last = span >> 16, span & 65535
        wide = (word(a, routed.HIDDEN) + COLS - 1) // COLS
        row = wide * word(a, routed.TILE)
        record, end, where = routed.expert(a, u), block_start(a, u + 1), room + VALUES_AT
        for b in range(block_start(a, u), end, word(a, BLOCKS_AT_ONCE)):
            blocks = min(end - b, word(a, BLOCKS_AT_ONCE))
            start_products(a, 0, room, record + 2 * first * row, row, wide, word(a, PACKED) + b * wide * step, wide * step, blocks)
            for i in range(first, last):
                for matrix in range(2 if gated else 1):
                    w = record + matrix * word(a, routed.UP_AT) + 2 * i * row
                    ahead = 0
                    if gated and matrix == 0:
                        ahead = w + word(a, routed.UP_AT)
                    elif i + 1 < last:
                        ahead = record + 2 * (i + 1) * row
                    c = room + SUMS_AT + matrix * blocks * BLOCK_NBYTES
                    product(a, 0, room, w, row, c, ahead, row)
                    if not bf16:
                        dequantize_rows(c, 32 * blocks, word(a, PACKED_SCALES) + 128 * b, room + SCALES_AT)
                    turn(room)
                for m in range(blocks):
                    pair = first_pair(a, u) + 32 * (b + m - block_start(a, u))
                    c = room + SUMS_AT + m * BLOCK_NBYTES
                    poke(where, u)
                    poke(where + 8, pair)
                    poke(where + 16, min(first_pair(a, u + 1) - pair, 32))
                    poke(where + 24, b + m)
                    poke(where + 32, i)
                    call(word(a, ACTIVATE), a, where, c, c + blocks * BLOCK_NBYTES, room + CALL_AT)
        return 0

    @kernel(key=(bf16, gated))
    def down(a: int, first: int, last: int, room: int) -> int:
        """Columns 32 · first .. of out, over all experts. An odd last row block of the weights stands in for its missing neighbour."""
        H, wide = word(a, routed.HIDDEN), word(a, routed.INTER) // COLS
        row = wide * word(a, routed.DOWN_TILE)
        for u in range(word(a, routed.USED_COUNT)):
            base, end = routed.expert(a, u) + word(a, routed.DOWN_AT), block_start(a, u + 1)
            for b in range(block_start(a, u), end, word(a, BLOCKS_AT_ONCE)):
                blocks = min(end - b, word(a, BLOCKS_AT_ONCE))
                start_products(a, 3, room, base + 2 * first * row, row if 32 * first + ROWS < H else 0, wide,
                               word(a, HIDDEN_TILES) + b * wide * step, wide * step, blocks)
                start = first_pair(a, u) + 32 * (b - block_start(a, u))
                rows = min(first_pair(a, u + 1) - start, 32 * blocks)
                for i in range(first, last):
                    ahead = base + 2 * (i + 1) * row if i + 1 < last else 0
                    c = room + SUMS_AT + (i - first) * blocks * BLOCK_NBYTES
                    product(a, 3, room, base + 2 * i * row, row if 32 * i + ROWS < H else 0, c, ahead, row if 32 * (i + 1) + ROWS < H else 0)
                    if not bf16:
                        dequantize_rows(c, rows, word(a, HIDDEN_SCALES) + 128 * b, room + SCALES_AT)
                    turn(room)
                join_columns(a, u, start, rows, first, last, blocks, room)
        return 0

    units = {PACK: pack_bf16 if bf16 else pack_int8, ACTIVATE: activate, GATE_UP: gate_up, DOWN: down}
    return units if bf16 else units | {ROUND: round_hidden}


@functools.cache
def job_of(amx: bool, bf16: bool) -> Any:
    """The job; bf16 products or int8 ones."""
    begin, end = power(amx)

    @kernel(key=(amx, bf16))
    def tasks(control: int, tid: int, threads: int, a: int, stage: int, per: int, chunk: int, room: int) -> None:
        """The claimed tasks of one stage: `per` 32-column pieces, `chunk` to a task, for each used expert (stage 0) or for all (1)."""
        chunks = (per + chunk - 1) // chunk
        n = word(a, routed.USED_COUNT) * chunks if stage == 0 else chunks
        for k in range(threads):
            owner = (tid + k) % threads
            lo, hi = share(n, owner, threads)
            counter = claims(control, tid, owner, stage)
            if k > 0 and load(counter) >= hi - lo:
                continue
            t = lo + add(counter, 1)
            while t < hi:
                u = t // chunks
                first = (t - u * chunks) * chunk
                last = min(first + chunk, per)
                if stage == 0:
                    call(word(a, GATE_UP), a, u, first * 65536 + last, room, room + CALL_AT)
                else:
                    call(word(a, DOWN), a, first, last, room, room + CALL_AT)
                t = lo + add(counter, 1)

    @kernel(key=(amx, bf16))
    def job(control: int, tid: int, threads: int, a: int) -> int:
        room = word(a, ROOM) + tid * (SUMS_AT + MOST_CHUNK * word(a, BLOCKS_AT_ONCE) * BLOCK_NBYTES)
        if tid == 0:
            code = routed.group(a)
            if code != 0:
                return code
            count_blocks(a)
        if not barrier(control, tid, threads):
            return 0
        lo, hi = share(block_start(a, word(a, routed.USED_COUNT)), tid, threads)
        for block in range(lo, hi):
            call(word(a, PACK), a, owner_of(a, block), block, room + VALUES_AT, room + CALL_AT)
        if not barrier(control, tid, threads):
            return 0
        begin(word(a, CONFIGURATION))
        tasks(control, tid, threads, a, 0, word(a, routed.INTER) // 32, word(a, INTER_CHUNK), room)
        end(0)
        if not barrier(control, tid, threads):
            return 0
        if not bf16:
            for block in range(lo, hi):
                call(word(a, ROUND), a, block, room + VALUES_AT, 0, room + CALL_AT)
            if not barrier(control, tid, threads):
                return 0
        begin(word(a, CONFIGURATION))
        tasks(control, tid, threads, a, 1, (word(a, routed.HIDDEN) + 31) // 32, word(a, HIDDEN_CHUNK), room)
        end(0)
        return 0

    return job
