"""Float formats times a panel of tokens: one or two row blocks at once against up to twelve tokens whose activations lie column by column.

A panel of P tokens holds, for each column, P float32 side by side: one line feeds every product of the column, where rows of activations a
power of two apart would push each other out of L1. Knows no thread and no expert. Sums are taken in the order of `floating.tile`: a token's
result is the same bits as alone.
"""
import functools
from typing import Any

from ..atoms import poke
from ..formats import FORMATS, Format
from ..jit import address, kernel
from ..lanes import F32, I64, WIDTHS, Builder, Value, cgutils, const, fma, fresh, kept, load, op, prefetch, spread, store, vec
from . import coded, floating
from .integer import scales_of

# words of `where`: row blocks; what is prefetched while tiles are left, `ahead` of them on; what is prefetched at the end
FIRST, PULLED, AFTER = 0, 16, 32
AHEAD_NBYTES = 3456


def blocks(body: str) -> int:
    """Row blocks at once."""
    return 2 if WIDTHS[body] == 16 else 1


def sizes(body: str) -> tuple[int, ...]:
    """Tokens of a panel, most first: sums fill the registers."""
    return (12, 8, 4, 2, 1) if WIDTHS[body] == 16 else (6, 4, 2, 1)


@functools.cache
def panels(body: str, tokens: int) -> tuple[int, ...]:
    """How so many tokens are cut into panels: as few as there can be, and no wider than they must be."""
    made: list[int] = []
    while tokens:
        most = next(s for s in sizes(body) if s <= tokens)
        if most > 8 and 12 < tokens <= 16:           # 8 + 8 rather than 12 + 4
            most = 8
        made.append(most)
        tokens -= most
    return tuple(made)


@functools.cache
def walk(format: str, body: str) -> int:
    """Address of a kernel walk(where, panel, sums, tiles | tokens << 32): sums[block][token][16 rows] := tiles × panel.

    where: addresses of the first tiles of `blocks` row blocks and of what to prefetch (`aim`); panel: float32 [64 · tiles][tokens]; sums: float32
    [blocks][tokens][16]; tokens: one of `sizes`."""
    run = op(4, emitter(FORMATS[format], body))

    @kernel(key=(format, body), inner=True)
    def walk_panel(where: int, panel: int, sums: int, tiles: int) -> int:
        run(where, panel, sums, tiles)
        return 0

    return address(walk_panel, 4)


def ahead_of(format: Format) -> int:
    """Tiles by which prefetches go ahead."""
    return max(1, AHEAD_NBYTES // format.tile_nbytes)


@kernel(inner=True)
def aim(where: int, first: int, after: int, warm: bool, tiles: int, ahead: int, size: int) -> None:
    """One row block's words of `where` for a walk over `tiles` tiles of `size` bytes. `warm`: its tiles are near already, so all that is
    prefetched is `after`'s, else its own and then the beginning of `after`'s."""
    own = max(tiles - ahead, 0)
    poke(where + FIRST, first)
    poke(where + PULLED, after - ahead * size if warm else first)
    poke(where + AFTER, after + own * size if warm else after)


def emitter(format: Format, body: str) -> Any:
    """The code of `walk`."""
    size, n, count, ahead = format.tile_nbytes, WIDTHS[body], blocks(body), ahead_of(format)

    def emit(b: Builder, where: Value, panel: Value, sums: Value, both: Value) -> None:
        tokens, tiles = b.lshr(both, const(I64, 32)), b.and_(both, const(I64, 0xFFFFFFFF))
        first, pulled, after = ([load(b, where, I64, at + 8 * s, 8) for s in range(count)] for at in (FIRST, PULLED, AFTER))
        with cgutils.for_range(b, b.mul(tokens, const(I64, count))) as line:
            for p in range(16 // n):
                store(b, const(vec(F32, n), 0.0), b.add(sums, b.shl(line.index, const(I64, 6))), 4 * n * p, 4)
        own = b.sub(tiles, const(I64, ahead))
        own = b.select(b.icmp_signed("<", own, const(I64, 0)), const(I64, 0), own)
        for width in sizes(body):
            with b.if_then(b.icmp_signed("==", tokens, const(I64, width))), cgutils.for_range(b, tiles) as loop:
                at = b.mul(loop.index, const(I64, size))
                here = b.icmp_signed("<", loop.index, own)
                on, over = b.add(at, const(I64, ahead * size)), b.mul(b.sub(loop.index, own), const(I64, size))
                to = [b.select(here, b.add(pulled[s], on), b.add(after[s], over)) for s in range(count)]
                x = b.add(panel, b.mul(loop.index, const(I64, 256 * width)))
                _tile(b, format, body, [b.add(w, at) for w in first], x, sums, to, width)
    return emit


def _tile(b: Builder, format: Format, body: str, ws: list[Value], x: Value, sums: Value, to: list[Value], tokens: int) -> None:
    """Tiles of row blocks times a panel's 64 columns, joined to `sums`; `to`: tiles to be prefetched."""
    n, zero = WIDTHS[body], const(vec(F32, WIDTHS[body]), 0.0)
    parts, step, turns = range(16 // n), format.tile_nbytes // 8, 32 // floating.COLUMNS
    for group in range(2):
        held = {(s, t, p): cgutils.alloca_once(b, vec(F32, n)) for s in range(len(ws)) for t in range(tokens) for p in parts}
        for v in held.values():
            b.store(zero, v)
        with cgutils.for_range(b, const(I64, turns)) as loop:
            at = b.add(x, b.mul(loop.index, const(I64, 4 * floating.COLUMNS * tokens)))
            pulled = [b.add(a, b.mul(loop.index, const(I64, step))) for a in to]
            totals = {k: b.load(v) for k, v in held.items()}
            for c in range(floating.COLUMNS):
                fresh(b)
                if 64 * c < step:
                    for a in pulled:
                        prefetch(b, a, 4 * step * group + 64 * c)
                columns = {(s, p): floating.column(b, format, body, ws[s], loop.index, c, group, n * p, n)
                           for s in range(len(ws)) for p in parts}
                for t in range(tokens):
                    value = spread(b, at, F32, n, 4 * ((32 * group + c) * tokens + t))
                    for s in range(len(ws)):
                        for p in parts:
                            totals[s, t, p] = fma(b, columns[s, p], value, totals[s, t, p])
                            if body in ("avx2", "avx_vnni"):
                                totals[s, t, p] = kept(b, totals[s, t, p])
            for k, v in held.items():
                b.store(totals[k], v)
        for s in range(len(ws)):
            for p in parts:
                scale = None
                if floating.outside(format):
                    scale = (coded.scale_of(b, format, body, ws[s], group, 0, n * p, n) if format.coded
                             else scales_of(b, format, body, ws[s], group, n * p, n))
                for t in range(tokens):
                    mine = 64 * (s * tokens + t) + 4 * n * p
                    now, value = load(b, sums, vec(F32, n), mine, 4), b.load(held[s, t, p])
                    store(b, b.fadd(now, value) if scale is None else fma(b, value, scale, now), sums, mine, 4)
