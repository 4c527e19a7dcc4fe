"""One file per family of weight formats: the bytes of its 16 × 64 tile, and how a tile is multiplied. Knows no expert and no thread.

`walk` is the loop that all kernels are made of: several streams of tiles (row blocks of one matrix, or of several experts) times one or
more tokens each, eight in all; the streams are prefetched, and the next task's after them.
"""
import functools
from typing import Any

from ..formats import FORMATS, Format
from ..jit import address, kernel
from ..lanes import F32, I64, WIDTHS, Builder, Value, cgutils, const, load, op, store, vec
from . import floating, integer

NEXT_AT, STREAMS = 32, 4                              # the next task's streams stand behind up to four of this one
AHEAD_NBYTES = 3456                                  # how far a stream is prefetched where vectors have 16 lanes
AHEAD_NARROW_NBYTES = 1152                           # where they have 8


def is_float(format: Format, exact: bool) -> bool:
    """True when the activation of this format stays float32."""
    return exact or format.partner == "f32"


def block_nbytes(format: Format, exact: bool) -> int:
    """Bytes of the activation of 64 columns."""
    return floating.BLOCK_NBYTES if is_float(format, exact) else integer.BLOCK_NBYTES


@functools.cache
def walk(format: str, body: str, exact: bool, streams: int, tokens: int) -> int:
    """Address of a kernel walk(where, acts, sums, tiles): sums[stream][token][16 rows] := Σ over `tiles` tiles of tile × activation.

    where: addresses of the streams' first tiles, and at NEXT_AT of those of the task that comes after this one; acts: addresses of
    activations, `tokens` per stream; sums: float32. A token's sum is the same bits for any
    number of streams and tokens.
    """
    run = op(4, emitter(FORMATS[format], body, exact, streams, tokens))

    @kernel(key=(format, body, exact, streams, tokens))
    def walk_tiles(where: int, acts: int, sums: int, tiles: int) -> int:
        run(where, acts, sums, tiles)
        return 0

    return address(walk_tiles, 4)


def emitter(format: Format, body: str, exact: bool, streams: int, tokens: int) -> Any:
    """The code of `walk`."""
    size, step, n = format.tile_nbytes, block_nbytes(format, exact), WIDTHS[body]
    ahead = max(1, (AHEAD_NBYTES if n == 16 else AHEAD_NARROW_NBYTES) // size)
    tile = floating.tile if is_float(format, exact) else integer.tile
    zero = const(vec(F32, n), 0.0)

    def emit(b: Builder, where: Value, acts: Value, out: Value, tiles: Value) -> None:
        first = [load(b, where, I64, 8 * s, 8) for s in range(streams)]
        after = [load(b, where, I64, NEXT_AT + 8 * s, 8) for s in range(streams)]
        xs = [load(b, acts, I64, 8 * t, 8) for t in range(streams * tokens)]
        sums = [[[cgutils.alloca_once_value(b, zero) for _ in range(16 // n)] for _ in range(tokens)] for _ in range(streams)]
        own = b.sub(tiles, const(I64, ahead))
        own = b.select(b.icmp_signed("<", own, const(I64, 0)), const(I64, 0), own)
        with cgutils.for_range(b, tiles) as loop:
            here = b.icmp_signed("<", loop.index, own)
            at, x = b.mul(loop.index, const(I64, size)), b.mul(loop.index, const(I64, step))
            on, over = b.add(at, const(I64, ahead * size)), b.mul(b.sub(loop.index, own), const(I64, size))
            for s in range(streams):
                to = b.select(here, b.add(first[s], on), b.add(after[s], over))
                accs = [[b.load(v) for v in token] for token in sums[s]]
                mine = [b.add(a, x) for a in xs[s * tokens:(s + 1) * tokens]]
                for token, values in zip(sums[s], tile(b, format, body, accs, b.add(first[s], at), mine, to), strict=True):
                    for v, value in zip(token, values, strict=True):
                        b.store(value, v)
        for s in range(streams):
            for t in range(tokens):
                for part, v in enumerate(sums[s][t]):
                    store(b, b.load(v), out, (s * tokens + t) * 64 + part * 4 * n, 4 * n)
    return emit
