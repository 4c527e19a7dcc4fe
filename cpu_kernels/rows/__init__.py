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
AHEAD_MANY_NBYTES = 4608                             # the same for streams that follow each other
AHEAD_NARROW_NBYTES = 2304                           # where they have 8
MANY = 0                                             # `tokens` of the walk that takes any number of them


def is_float(format: Format, exact: bool) -> bool:
    """True when the activation of this format stays float32."""
    return exact or format.partner == "f32"


def is_plain(format: Format, exact: bool) -> bool:
    """True when a row of float32 already is what tiles of this format are multiplied with."""
    return is_float(format, exact) and format.name != "fp8"


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
    activations, `tokens` per stream; sums: float32. With tokens = MANY all streams (1 to 4, whatever `streams` says) share them, and `tiles` holds
    tiles | tokens << 32 | (streams - 1) << 48; up to half as many rows of sums again behind the last stream's are overwritten.
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
    ahead = max(1, (AHEAD_MANY_NBYTES if tokens == MANY else AHEAD_NBYTES if n == 16 else AHEAD_NARROW_NBYTES) // size)
    family = family_of(format, exact)
    zero = const(vec(F32, n), 0.0)
    parts = range(16 // n)

    def join(b: Builder, now: Value, value: Value, scale: Value | None) -> Value:
        return b.fadd(now, value) if scale is None else fma(b, value, scale, now)

    def pulled(b: Builder, i: Value, own: Value, first: Value, after: Value) -> Value:
        """What is prefetched at tile i."""
        on, over = b.mul(b.add(i, const(I64, ahead)), const(I64, size)), b.mul(b.sub(i, own), const(I64, size))
        return b.select(b.icmp_signed("<", i, own), b.add(first, on), b.add(after, over))

    def emit(b: Builder, where: Value, acts: Value, out: Value, tiles: Value) -> None:
        first = [load(b, where, I64, 8 * s, 8) for s in range(streams)]
        after = [load(b, where, I64, NEXT_AT + 8 * s, 8) for s in range(streams)]
        xs = [load(b, acts, I64, 8 * t, 8) for t in range(streams * tokens)]
        sums = [[[cgutils.alloca_once_value(b, zero) for _ in parts] for _ in range(tokens)] for _ in range(streams)]
        own, width = b.sub(tiles, const(I64, ahead)), min(tokens, family.at_once(format, body)[0])
        own = b.select(b.icmp_signed("<", own, const(I64, 0)), const(I64, 0), own)
        with cgutils.for_range(b, tiles) as loop:
            at, x = b.mul(loop.index, const(I64, size)), b.mul(loop.index, const(I64, step))
            for s in range(streams):
                to = pulled(b, loop.index, own, first[s], after[s])
                for t in range(0, tokens, width):
                    of = s * tokens + t
                    family.tile(b, format, body, adder(b, sums[s][t:]), b.add(first[s], at), [b.add(a, x) for a in xs[of:of + width]], to)
        for i, token in enumerate(token for stream in sums for token in stream):
            write(b, token, out, 64 * i)

    def adder(b: Builder, mine: Any) -> Any:
        def add(token: int, part: int, value: Value, scale: Value | None = None) -> None:
            b.store(join(b, b.load(mine[token][part]), value, scale), mine[token][part])
        return add

    def write(b: Builder, token: Any, out: Value, offset: int) -> None:
        for part, v in enumerate(token):
            store(b, b.load(v), out, offset + 4 * n * part, 4)

    def emit_many(b: Builder, where: Value, acts: Value, out: Value, all_three: Value) -> None:
        tiles, more = b.and_(all_three, const(I64, 0xFFFFFFFF)), b.lshr(all_three, const(I64, 48))
        count = b.and_(b.lshr(all_three, const(I64, 32)), const(I64, 0xFFFF))
        far, rest = b.udiv(const(I64, ahead), tiles), b.urem(const(I64, ahead), tiles)
        own = b.sub(tiles, rest)

        def stream_at(i: Value) -> Value:
            """The i-th stream from this task's first on, then the next task's."""
            beyond = b.add(b.sub(i, more), const(I64, NEXT_AT // 8 - 1))
            beyond = b.select(b.icmp_signed("<", beyond, const(I64, 7)), beyond, const(I64, 7))
            i = b.select(b.icmp_signed("<=", i, more), i, beyond)
            return load(b, b.add(where, b.shl(i, const(I64, 3))), I64, 0, 8)

        with cgutils.for_range(b, b.add(more, const(I64, 1))) as stream:
            first, then = stream_at(stream.index), b.add(stream.index, far)
            here = b.sub(stream_at(then), b.mul(b.sub(const(I64, ahead), rest), const(I64, size)))
            after = stream_at(b.add(then, const(I64, 1)))
            mine = b.add(out, b.shl(b.mul(stream.index, count), const(I64, 6)))
            (in_memory if family is floating else in_registers)(b, first, here, after, own, acts, mine, tiles, count)

    def in_registers(b: Builder, first: Value, here: Value, after: Value, own: Value, acts: Value, out: Value, tiles: Value, count: Value) -> None:
        """One stream of codes times all tokens, as many at once as have room in registers, sums included; for all but the first of them the row
        block comes from L1 or L2. What is left of a width is rounded up from its half on: the last token is then multiplied again."""
        low, left, last = const(I64, 0), count, b.sub(count, const(I64, 1))
        for width in family.at_once(format, body):
            bits = const(I64, width.bit_length() - 1)
            turns = b.lshr(b.add(left, const(I64, max(width // 2 - 1, 0))), bits)
            with cgutils.for_range(b, turns) as turn:
                at = b.add(low, b.shl(turn.index, bits))
                which = [b.add(at, const(I64, t)) for t in range(width)]
                which = [b.select(b.icmp_signed("<", t, last), t, last) for t in which]
                xs = [load(b, b.add(acts, b.shl(t, const(I64, 3))), I64, 0, 8) for t in which]
                mine = [[cgutils.alloca_once_value(b, zero) for _ in parts] for _ in range(width)]
                begins = b.icmp_signed("==", at, const(I64, 0))
                with cgutils.for_range(b, tiles) as loop:
                    w, x = b.add(first, b.mul(loop.index, const(I64, size))), b.mul(loop.index, const(I64, step))
                    to = b.select(begins, pulled(b, loop.index, own, here, after), w)
                    family.tile(b, format, body, adder(b, mine), w, [b.add(a, x) for a in xs], to)
                for t, token in enumerate(mine):
                    write(b, token, b.add(out, b.shl(at, const(I64, 6))), 64 * t)
            low, left = b.add(low, b.shl(turns, bits)), b.sub(left, b.shl(turns, bits))
            left = b.select(b.icmp_signed("<", left, const(I64, 0)), const(I64, 0), left)

    def in_memory(b: Builder, first: Value, here: Value, after: Value, own: Value, acts: Value, out: Value, tiles: Value, count: Value) -> None:
        """One stream of floats times all tokens, tile by tile, as many at once as have room in registers; sums that join tiles are in memory: held
        in registers over the loops of `floating.tile` they would push its own out."""
        with cgutils.for_range(b, count) as token:
            for p in parts:
                store(b, zero, b.add(out, b.shl(token.index, const(I64, 6))), 4 * n * p, 4)
        with cgutils.for_range(b, tiles) as loop:
            w, x = b.add(first, b.mul(loop.index, const(I64, size))), b.mul(loop.index, const(I64, step))
            to, low = pulled(b, loop.index, own, here, after), const(I64, 0)
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
    return emit_many if tokens == MANY else emit
