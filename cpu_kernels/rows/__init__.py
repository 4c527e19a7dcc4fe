"""One file per family of weight formats: the bytes of its 16 × 64 tile, and how a tile is multiplied. Knows no expert and no thread.

`walk` is the loop that all kernels are made of: several streams of tiles (row blocks of one matrix, or of several experts) times one or
two tokens each, or one stream times any number of tokens; the streams are prefetched, and the next task's after them.
"""
import functools
from typing import Any

from ..formats import FORMATS, Format
from ..jit import address, kernel
from ..lanes import F32, I64, WIDTHS, Builder, Value, cgutils, const, fma, load, op, store, vec
from . import coded, floating, integer

NEXT_AT, STREAMS = 32, 4                              # the next task's streams stand behind up to four of this one
AHEAD_NBYTES = 3456                                  # how far a stream is prefetched where vectors have 16 lanes
AHEAD_NARROW_NBYTES = 1152                           # where they have 8
MANY = 0                                             # `tokens` of the walk that takes any number of them


def is_float(format: Format, exact: bool) -> bool:
    """True when the activation of this format stays float32."""
    return exact or format.partner == "f32"


def family_of(format: Format, exact: bool) -> Any:
    """The module that multiplies this format's tiles."""
    return floating if is_float(format, exact) else coded if format.coded else integer


def block_nbytes(format: Format, exact: bool) -> int:
    """Bytes of the activation of 64 columns."""
    return family_of(format, exact).BLOCK_NBYTES


@functools.cache
def walk(format: str, body: str, exact: bool, streams: int, tokens: int) -> int:
    """Address of a kernel walk(where, acts, sums, tiles): sums[stream][token][16 rows] := Σ over `tiles` tiles of tile × activation.

    where: addresses of the streams' first tiles, and at NEXT_AT of those of the task that comes after this one; acts: addresses of
    activations, `tokens` per stream; sums: float32. With tokens = MANY their number stands in the upper half of `tiles`.
    A token's sum is the same bits for any number of streams and tokens.
    """
    run = op(4, emitter(FORMATS[format], body, exact, streams, tokens))

    @kernel(key=(format, body, exact, streams, tokens), inner=True)
    def walk_tiles(where: int, acts: int, sums: int, tiles: int) -> int:
        run(where, acts, sums, tiles)
        return 0

    return address(walk_tiles, 4)


def emitter(format: Format, body: str, exact: bool, streams: int, tokens: int) -> Any:
    """The code of `walk`."""
    size, step, n = format.tile_nbytes, block_nbytes(format, exact), WIDTHS[body]
    ahead = max(1, (AHEAD_NBYTES if n == 16 else AHEAD_NARROW_NBYTES) // size)
    family = family_of(format, exact)
    zero = const(vec(F32, n), 0.0)
    parts = range(16 // n)

    def join(b: Builder, now: Value, value: Value, scale: Value | None) -> Value:
        return b.fadd(now, value) if scale is None else fma(b, value, scale, now)

    def emit(b: Builder, where: Value, acts: Value, out: Value, tiles: Value) -> None:
        first = [load(b, where, I64, 8 * s, 8) for s in range(streams)]
        after = [load(b, where, I64, NEXT_AT + 8 * s, 8) for s in range(streams)]
        if tokens == MANY:
            count, tiles = b.lshr(tiles, const(I64, 32)), b.and_(tiles, const(I64, 0xFFFFFFFF))
            with cgutils.for_range(b, count) as token:
                for p in parts:
                    store(b, zero, b.add(out, b.shl(token.index, const(I64, 6))), 4 * n * p, 4)
        else:
            xs = [load(b, acts, I64, 8 * t, 8) for t in range(streams * tokens)]
            sums = [[[cgutils.alloca_once_value(b, zero) for _ in parts] for _ in range(tokens)] for _ in range(streams)]
        own = b.sub(tiles, const(I64, ahead))
        own = b.select(b.icmp_signed("<", own, const(I64, 0)), const(I64, 0), own)
        with cgutils.for_range(b, tiles) as loop:
            here = b.icmp_signed("<", loop.index, own)
            at, x = b.mul(loop.index, const(I64, size)), b.mul(loop.index, const(I64, step))
            on, over = b.add(at, const(I64, ahead * size)), b.mul(b.sub(loop.index, own), const(I64, size))
            for s in range(streams):
                to = b.select(here, b.add(first[s], on), b.add(after[s], over))
                w = b.add(first[s], at)
                if tokens == MANY:
                    everyone(b, format, body, (w, acts, x, out, to), count)
                    continue
                width = min(tokens, family.at_once(format, body)[0])
                for t in range(0, tokens, width):
                    def add(token: int, part: int, value: Value, scale: Value | None = None, mine: Any = sums[s][t:]) -> None:
                        v = mine[token][part]
                        b.store(join(b, b.load(v), value, scale), v)
                    family.tile(b, format, body, add, w, [b.add(a, x) for a in xs[s * tokens + t:s * tokens + t + width]], to)
        for i, token in enumerate([] if tokens == MANY else [token for stream in sums for token in stream]):
            for part, v in enumerate(token):
                store(b, b.load(v), out, i * 64 + part * 4 * n, 4 * n)

    def everyone(b: Builder, format: Format, body: str, places: tuple[Value, ...], count: Value) -> None:
        """One tile times all tokens, as many at once as have room in registers; their sums are in memory: held in registers over the
        loops of `floating.tile` they would push its own out."""
        w, acts, x, out, to = places
        low = const(I64, 0)
        for width in family.at_once(format, body):
            turns = b.udiv(b.sub(count, low), const(I64, width))
            with cgutils.for_range(b, turns) as turn:
                at = b.add(low, b.mul(turn.index, const(I64, width)))
                xs = [b.add(load(b, b.add(acts, b.shl(at, const(I64, 3))), I64, 8 * t, 8), x) for t in range(width)]
                mine = b.add(out, b.shl(at, const(I64, 6)))

                def add(token: int, part: int, value: Value, scale: Value | None = None, mine: Value = mine) -> None:
                    offset = 64 * token + 4 * n * part
                    store(b, join(b, load(b, mine, vec(F32, n), offset, 4), value, scale), mine, offset, 4)
                family.tile(b, format, body, add, w, xs, to)
            low = b.add(low, b.mul(turns, const(I64, width)))
    return emit
