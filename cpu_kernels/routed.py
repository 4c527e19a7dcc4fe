"""The job of a routed layer: sorts tokens by expert, shares rows out to the team's threads, sums. Knows addresses in words; `moe` fills them.

One job, two barriers. Stage 0: thread 0 sorts the pairs (token, expert) by expert while the others turn x into the format's partner.
Stage 1: tasks of 32 rows of gate and up of one expert, for all of its tokens. Stage 2: tasks of 16 to 64 output columns over all experts, in
ascending order of expert, so that a token's sum has one order whatever the threads and its neighbours are.
"""
from . import ffn, lanes
from .atoms import add, load, peek, poke
from .ffn import MOST_TOKENS, peek32, poke32
from .formats import COLS, ROWS
from .jit import kernel
from .jobs import arrive, arrived, await_all, barrier, claims, share
from .rows import NEXT_AT

BAD_ID = 77                                          # the job's code when an id names no expert
PULL_NBYTES = 192 << 10                              # of the own rows of down, pulled into L2 while waiting for the others

# words of a job's arguments; I is padded to 64, tiles and rows are those of H and I
(INPUTS, IDS, WEIGHTS, OUT, COUNT, TOP_K, BF16, HIDDEN, INTER, EXPERTS, BASE, RECORD, UP_AT, DOWN_AT, TILE, KIND, GATED, PARAMS, BIAS_GATE, BIAS_UP,
 BIAS_DOWN, BIAS_I, BIAS_H, ON_INPUT, ACTS, HID, COUNTS, USED, STARTS, TOKENS, PAIR_WEIGHTS, SPARE, USED_COUNT,
 ONE, STEP, TAKE, APART1, APART2, APART4, TOGETHER, PAIRS, DOWN_TILE, DOWN_STEP, DOWN_TAKE, DOWN_APART1, DOWN_APART2, DOWN_APART4,
 DOWN_TOGETHER, DOWN_PAIRS, ORDER_AT, LONG) = range(51)       # a walk's word in the format of gate and up, and in that of down
WORDS = 51
# a thread's own memory: streams and next streams, activations' addresses, sums of 4 streams × 16 tokens × 16 rows, 32 float32
AIM, XS, SUMS = 0, 64, 64 + 8 * MOST_TOKENS
VALUES = SUMS + 4 * 64 * MOST_TOKENS
SPARE_NBYTES = VALUES + 128
_walk, _take = lanes.invoke(4), lanes.invoke(4)
word = lanes.op(2, lambda b, a, i: lanes.load(b, b.add(a, b.shl(i, lanes.const(lanes.I64, 3))), lanes.I64, 0, 8), gives=True)


@kernel(inner=True)
def group(a: int) -> int:
    """Sorts pairs by expert (stable): used[n], starts[n + 1], tokens[p], pair weights[p]; n at word N. 0 or BAD_ID."""
    ids, weights, T, k, E = word(a, IDS), word(a, WEIGHTS), word(a, COUNT), word(a, TOP_K), word(a, EXPERTS)
    counts, used, starts, tokens, sorted_weights = word(a, COUNTS), word(a, USED), word(a, STARTS), word(a, TOKENS), word(a, PAIR_WEIGHTS)
    for e in range(E):
        poke32(counts + 4 * e, 0)
    for p in range(T * k):
        e = peek32(ids + 4 * p)
        if e < -1 or e >= E:
            return BAD_ID
        if e >= 0:
            poke32(counts + 4 * e, peek32(counts + 4 * e) + 1)
    n = 0
    at = 0
    for e in range(E):
        c = peek32(counts + 4 * e)
        if c:
            poke32(used + 4 * n, e)
            poke32(starts + 4 * n, at)
            poke32(counts + 4 * e, at)
            at += c
            n += 1
    poke32(starts + 4 * n, at)
    for t in range(T):
        for p in range(t * k, t * k + k):
            e = peek32(ids + 4 * p)
            if e >= 0:
                q = peek32(counts + 4 * e)
                poke32(counts + 4 * e, q + 1)
                poke32(tokens + 4 * q, t)
                poke32(sorted_weights + 4 * q, peek32(weights + 4 * p))
    poke(a + 8 * USED_COUNT, n)
    return 0


@kernel(inner=True)
def expert(a: int, u: int) -> int:
    """Address of the record of the u-th used expert."""
    return word(a, BASE) + peek32(word(a, USED) + 4 * u) * word(a, RECORD)


@kernel(inner=True)
def first_pair(a: int, u: int) -> int:
    return peek32(word(a, STARTS) + 4 * u)


@kernel(inner=True)
def pull(a: int, lo: int, hi: int, control: int, tid: int, threads: int) -> int:
    """Waits for the others behind `arrive`; meanwhile fetches rows lo..hi of the used experts' down into L2. 1 go on, -1 aborted."""
    n, row = word(a, USED_COUNT), word(a, INTER) // COLS * word(a, DOWN_TILE)
    u, r, at, pulled = 0, lo if n else hi, 0, 0
    while r < hi and pulled < PULL_NBYTES:
        state = arrived(control, tid, threads)
        if state != 0:
            return state
        base = expert(a, u) + word(a, DOWN_AT) + r * row + at
        for line in range(0, 512, 64):
            ffn.prefetch_far(base + line)
        at += 512
        pulled += 512
        if at >= row:
            at = 0
            u += 1
            if u == n:
                u = 0
                r += 1
    return 1 if await_all(control, tid, threads) else -1


@kernel(inner=True)
def aim_gate_up(a: int, u: int, i: int, where: int) -> None:
    """Streams of task (u, i): two row blocks of gate, two of up (ungated: two of up)."""
    row = (word(a, HIDDEN) + COLS - 1) // COLS * word(a, TILE)
    at = expert(a, u) + 2 * i * row
    poke(where, at)
    poke(where + 8, at + row)
    poke(where + 16, at + word(a, UP_AT))
    poke(where + 24, at + word(a, UP_AT) + row)


@kernel(inner=True)
def aim_down(a: int, u: int, n: int, r: int, where: int) -> None:
    """Streams of n experts from the u-th on, row block r of down. Beyond the last expert: the first one's next row block."""
    row = word(a, INTER) // COLS * word(a, DOWN_TILE)
    for s in range(n):
        v = u + s
        q = r
        if v >= word(a, USED_COUNT):
            v -= word(a, USED_COUNT)
            q += 1
        poke(where + 8 * s, expert(a, min(v, word(a, USED_COUNT) - 1)) + word(a, DOWN_AT) + q * row)


@kernel(inner=True)
def join_row(a: int, e: int, pair: int, r: int, sums: int, spare: int) -> None:
    """Adds 16 columns of one pair's result to its token's row of out."""
    H = word(a, HIDDEN)
    weight = word(a, ONE) if word(a, ON_INPUT) else word(a, PAIR_WEIGHTS) + 4 * pair
    y = word(a, OUT) + 4 * (peek32(word(a, TOKENS) + 4 * pair) * H + ROWS * r)
    bias = word(a, BIAS_DOWN) + e * word(a, BIAS_H) + 4 * ROWS * r
    columns = min(H - ROWS * r, ROWS)
    if columns == ROWS:
        ffn.join(y, sums, weight, bias)
        return
    for c in range(columns):
        poke32(spare + VALUES + 4 * c, peek32(y + 4 * c))
    ffn.join(spare + VALUES, sums, weight, bias)
    for c in range(columns):
        poke32(y + 4 * c, peek32(spare + VALUES + 4 * c))


@kernel(inner=True)
def apart(a: int, walk: int, streams: int, spare: int, tiles: int) -> None:
    """1, 2 or 4 streams of one token each; walk: APART1 or DOWN_APART1."""
    _walk(word(a, walk + streams // 2), spare + AIM, spare + XS, spare + SUMS, tiles)


@kernel(inner=True)
def gather32(x: int, bf16: int, order: int, at: int, H: int, into: int) -> None:
    """32 float32 at `into`: of a row of H columns those that int32 order[at] .. name; zeros beyond its end."""
    for i in range(32):
        value = 0
        if at + i < H:
            c = peek32(order + 4 * (at + i))
            value = ffn.peek16(x + 2 * c) << 16 if bf16 else peek32(x + 4 * c)
        poke32(into + 4 * i, value)


@kernel(inner=True)
def take_rows(a: int, tid: int, threads: int, spare: int) -> None:
    """Stage 0: this thread's share of the activation blocks of x: one row a token, or a pair where experts order their inputs."""
    H, x, bf16, acts, step, take = word(a, HIDDEN), word(a, INPUTS), word(a, BF16), word(a, ACTS), word(a, STEP), word(a, TAKE)
    per = (H + COLS - 1) // COLS
    if word(a, ORDER_AT) != 0:
        lo, hi = share(first_pair(a, word(a, USED_COUNT)) * per, tid, threads)
        u = 0
        for i in range(lo, hi):
            while first_pair(a, u + 1) * per <= i:
                u += 1
            token = peek32(word(a, TOKENS) + 4 * (i // per))
            for g in range(2):
                gather32(x + token * H * (4 - 2 * bf16), bf16, expert(a, u) + word(a, ORDER_AT), i % per * COLS + 32 * g, H, spare + VALUES)
                _take(take, spare + VALUES, spare + VALUES + 64, acts + i * step, g)
        return
    lo, hi = share(word(a, COUNT) * per, tid, threads)
    for i in range(lo, hi):
        t = i // per
        for g in range(2):
            at = (i - t * per) * COLS + 32 * g
            first = x + 4 * (t * H + at)
            if bf16 or at + 32 > H:
                first = spare + VALUES
                ffn.load32(x + t * H * (4 - 2 * bf16), bf16, at, H, first)
            _take(take, first, first + 64, acts + i * step, g)


@kernel(inner=True)
def walk_long(a: int, spare: int, tiles: int) -> None:
    """The row blocks of a gated task, one of gate and one of up at a time: two streams that go on from task to task. Their sums alternate."""
    where, row = spare + AIM, tiles * word(a, TILE)
    gate, up, then_gate, then_up = peek(where), peek(where + 16), peek(where + NEXT_AT), peek(where + NEXT_AT + 16)
    for half in range(2):
        poke(where, gate + half * row)
        poke(where + 8, up + half * row)
        poke(where + NEXT_AT, then_gate if half else gate + row)
        poke(where + NEXT_AT + 8, then_up if half else up + row)
        _walk(word(a, APART2), where, spare + XS, spare + SUMS + 128 * half, tiles)


@kernel(inner=True)
def gate_up_task(a: int, u: int, i: int, spare: int) -> None:
    """32 rows of gate and up of the u-th used expert, for all its tokens; the streams' addresses are in place."""
    I, step = word(a, INTER), word(a, STEP)
    tiles = (word(a, HIDDEN) + COLS - 1) // COLS
    e, up_from = peek32(word(a, USED) + 4 * u), 2 * word(a, GATED)
    streams, sums, bias = 2 + up_from, spare + SUMS, e * word(a, BIAS_I) + 128 * i
    plain = word(a, BIAS_I) == 0 and word(a, ON_INPUT) == 0
    take, wide = word(a, DOWN_TAKE), I // COLS * word(a, DOWN_STEP)
    hidden = word(a, HID) + i // 2 * word(a, DOWN_STEP)
    start, end = first_pair(a, u), first_pair(a, u + 1)
    for c in range(start, end, MOST_TOKENS):
        m = min(end - c, MOST_TOKENS)
        for t in range(max(m, 4)):
            row = c + t % m if word(a, ORDER_AT) != 0 else peek32(word(a, TOKENS) + 4 * (c + t % m))
            poke(spare + XS + 8 * t, word(a, ACTS) + row * tiles * step)
        paired = m == 1 and up_from != 0 and word(a, LONG) != 0
        half_step, up_step = (128, 64) if paired else (64 * m, 64 * m * up_from)
        if paired:
            walk_long(a, spare, tiles)
        elif m == 1:
            apart(a, APART1, streams, spare, tiles)
        elif m == 2 and word(a, PAIRS) != 0:
            for s in range(0, streams, 2):
                _walk(word(a, PAIRS), spare + AIM + 8 * s, spare + XS, sums + 128 * s, tiles)
        else:
            _walk(word(a, TOGETHER), spare + AIM, spare + XS, sums, tiles | m << 32 | (streams - 1) << 48)
        if not plain:
            for t in range(m):
                weight = word(a, PAIR_WEIGHTS) + 4 * (c + t) if word(a, ON_INPUT) else word(a, ONE)
                for half in range(2):
                    g = sums + half_step * half + 64 * t
                    if up_from:
                        ffn.scale_add(g, weight, word(a, BIAS_GATE) + bias + 64 * half)
                    ffn.scale_add(g + up_step, weight, word(a, BIAS_UP) + bias + 64 * half)
        if paired:
            for half in range(2):
                ffn.activate(word(a, KIND), up_from, sums + 128 * half, sums + 128 * half + 64, 1, word(a, PARAMS))
        else:
            ffn.activate(word(a, KIND), up_from, sums, sums + up_step, 2 * m, word(a, PARAMS))
        for t in range(m):                           # on its own: many of these chains are in flight at once
            _take(take, sums + 64 * t, sums + half_step + 64 * t, hidden + (c + t) * wide, i & 1)


@kernel(inner=True)
def down_apart(a: int, u: int, n: int, r: int, spare: int) -> None:
    """16 columns of n experts of one token each."""
    stride = word(a, INTER) // COLS * word(a, DOWN_STEP)
    for s in range(n):
        poke(spare + XS + 8 * s, word(a, HID) + first_pair(a, u + s) * stride)
    apart(a, DOWN_APART1, n, spare, word(a, INTER) // COLS)
    for s in range(n):
        join_row(a, peek32(word(a, USED) + 4 * (u + s)), first_pair(a, u + s), r, spare + SUMS + 64 * s, spare)


@kernel(inner=True)
def down_together(a: int, u: int, first: int, blocks: int, spare: int) -> None:
    """`blocks` times 16 columns of one expert for all its tokens."""
    wide, H, sums = word(a, INTER) // COLS, word(a, HIDDEN), spare + SUMS
    stride, weight, weight_step = wide * word(a, DOWN_STEP), word(a, ONE), 0
    e, start, end = peek32(word(a, USED) + 4 * u), first_pair(a, u), first_pair(a, u + 1)
    whole = ROWS * (first + blocks) <= H
    bias, y = word(a, BIAS_DOWN) + e * word(a, BIAS_H) + 4 * ROWS * first, word(a, OUT) + 4 * ROWS * first
    if word(a, ON_INPUT) == 0:
        weight, weight_step = word(a, PAIR_WEIGHTS), 4
    for c in range(start, end, MOST_TOKENS):
        m = min(end - c, MOST_TOKENS)
        for t in range(m):
            poke(spare + XS + 8 * t, word(a, HID) + (c + t) * stride)
        _walk(word(a, DOWN_TOGETHER), spare + AIM, spare + XS, sums, wide | m << 32 | (blocks - 1) << 48)
        for t in range(m):
            row = y + 4 * H * peek32(word(a, TOKENS) + 4 * (c + t))
            for s in range(blocks):
                if whole:
                    ffn.join(row + 64 * s, sums + 64 * (m * s + t), weight + weight_step * (c + t), bias + 64 * s)
                else:
                    join_row(a, e, c + t, first + s, sums + 64 * (m * s + t), spare)


@kernel(inner=True)
def clear(a: int, first: int, blocks: int) -> None:
    """`blocks` times 16 columns of out := 0."""
    H = word(a, HIDDEN)
    for t in range(word(a, COUNT)):
        row = word(a, OUT) + 4 * t * H
        for r in range(first, first + blocks):
            if ROWS * r + ROWS <= H:
                ffn.zero16(row + 4 * ROWS * r)
                continue
            for c in range(ROWS * r, H):
                poke32(row + 4 * c, 0)


@kernel(inner=True)
def down_task(a: int, first: int, blocks: int, spare: int) -> None:
    """`blocks` times 16 columns of out, over all experts and tokens."""
    n, row = word(a, USED_COUNT), word(a, INTER) // COLS * word(a, DOWN_TILE)
    clear(a, first, blocks)
    u = 0
    while u < n:
        lone = 0
        while lone < 4 and u + lone < n and first_pair(a, u + lone + 1) - first_pair(a, u + lone) == 1:
            lone += 1
        if lone == 0:
            for s in range(blocks):
                poke(spare + AIM + 8 * s, expert(a, u) + word(a, DOWN_AT) + (first + s) * row)
            aim_down(a, u + 1, 1, first, spare + AIM + NEXT_AT)
            down_together(a, u, first, blocks, spare)
            u += 1
            continue
        if lone == 3:
            lone = 2
        for r in range(first, first + blocks):
            aim_down(a, u, lone, r, spare + AIM)
            if r + 1 < first + blocks:
                aim_down(a, u, lone, r + 1, spare + AIM + NEXT_AT)
            else:
                aim_down(a, u + lone, lone, first, spare + AIM + NEXT_AT)
            down_apart(a, u, lone, r, spare)
        u += lone


@kernel(inner=True)
def job(control: int, tid: int, threads: int, a: int) -> int:
    spare = word(a, SPARE) + tid * SPARE_NBYTES
    if tid == 0:
        code = group(a)
        if code != 0:
            return code
    if word(a, ORDER_AT) != 0 and not barrier(control, tid, threads):
        return 0                                     # rows are taken by expert, so pairs must be sorted first
    take_rows(a, tid, threads, spare)
    if not barrier(control, tid, threads):
        return 0
    per, rows = word(a, INTER) // 32, (word(a, HIDDEN) + ROWS - 1) // ROWS
    n = word(a, USED_COUNT) * per
    blocks = min(4, max(1, rows // (4 * threads)))   # a stream of several row blocks is long enough for the CPU's own prefetching
    downs = (rows + blocks - 1) // blocks
    lo2, hi2 = share(downs, tid, threads)
    lo2, hi2 = lo2 * blocks, min(hi2 * blocks, rows)
    for k in range(threads):
        owner = (tid + k) % threads
        lo, hi = share(n, owner, threads)
        counter = claims(control, tid, owner, 0)
        if k > 0 and load(counter) >= hi - lo:
            continue
        t = lo + add(counter, 1)
        while t < hi:
            u = t // per
            aim_gate_up(a, u, t - u * per, spare + AIM)
            if t + 1 < hi:
                v = (t + 1) // per
                aim_gate_up(a, v, t + 1 - v * per, spare + AIM + NEXT_AT)
            else:
                aim_down(a, 0, 4, lo2, spare + AIM + NEXT_AT)
            gate_up_task(a, u, t - u * per, spare)
            t = lo + add(counter, 1)
    if threads > 1:
        arrive(control, tid)
        if pull(a, lo2, hi2, control, tid, threads) < 0:
            return 0
    for k in range(threads):
        owner = (tid + k) % threads
        lo, hi = share(downs, owner, threads)
        counter = claims(control, tid, owner, 1)
        if k > 0 and load(counter) >= hi - lo:
            continue
        t = lo + add(counter, 1)
        while t < hi:
            down_task(a, t * blocks, min(blocks, rows - t * blocks), spare)
            t = lo + add(counter, 1)
    return 0


