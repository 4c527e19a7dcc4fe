"""How many bytes of KV a model keeps per token and per sequence, and how many tokens each group of layers has room for; knows no tensor.

Layers that see the same window share a pool of pages (see `pool`). A pool without a window holds every token; one with a window holds what running
sequences see, what a chunk of a prompt writes before it is given back, and the last windows of prompts to go on from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.arch.spec import GQA, MLA, Foreign, GatedDeltaNet, Model, window
from hetero.memory.pool import APART

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
PAGE = 16                                       # tokens


@dataclass(frozen=True)
class Group:
    """Layers of one window (None: they see everything): bytes that a token takes in all of them, and tokens that there is room for."""

    window: int | None
    token_nbytes: int
    tokens: int = 0

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_nbytes

    def seen(self, length: int) -> int:
        """Bytes that a token at the end of `length` tokens sees."""
        return self.token_nbytes * min(length, self.window or length)


def layer_nbytes(part: GQA | MLA | GatedDeltaNet | Foreign, dtype: str) -> int:
    """Bytes of one token in one layer; fp8 carries a float32 scale per token and head."""
    if isinstance(part, GatedDeltaNet):
        return 0
    b, scale = KV_BYTES[dtype], 4 * (dtype == "fp8")
    if isinstance(part, Foreign):
        return part.kv_numbers * b
    return part.kv_rank * b + part.rope.dim * b + scale if isinstance(part, MLA) else 2 * part.kv_heads * (part.head_dim * b + scale)


def state_nbytes(model: Model) -> int:
    """Bytes that one sequence keeps in layers with a state, in float32."""
    parts = [a for layer in model.layers if isinstance(a := layer.attention, GatedDeltaNet)]
    foreign = sum(4 * a.state_numbers for layer in model.layers if isinstance(a := layer.attention, Foreign))
    return foreign + sum(4 * (a.value_heads * a.key_dim * a.value_dim + a.channels * (a.kernel - 1)) for a in parts)


def groups(model: Model, dtype: str) -> list[Group]:
    """In the order of `model.windows`, with room for nothing yet."""
    sums = dict.fromkeys(model.windows, 0)
    for layer in model.layers:
        if not isinstance(a := layer.attention, GatedDeltaNet):
            sums[window(a) if isinstance(a, GQA | MLA) else None] += layer_nbytes(a, dtype)
    return [Group(w, nbytes) for w, nbytes in sums.items()]


def _whole(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def kept(group: Group, ctx: int, chunk: int) -> int:
    """Most tokens that one sequence keeps in a group while its prompt is read in chunks; its pages reach over both ends of a window."""
    return ctx if group.window is None else min(ctx, group.window + chunk + 3 * PAGE)


def pools(model: Model, dtype: str, ctx: int, batch: int, chunk: int, nbytes: int) -> tuple[Group, ...]:
    """Every group with room for what fits `nbytes`: for one sequence of `ctx` tokens at least, for `batch` of them at most."""
    empty = groups(model, dtype)

    def sized(tokens: int) -> tuple[Group, ...]:
        """When all sequences together have `tokens` tokens."""
        windows = batch + max(batch, tokens // APART)
        most = [tokens if g.window is None else min(tokens, chunk + windows * (g.window + 2 * PAGE)) for g in empty]
        return tuple(Group(g.window, g.token_nbytes, _whole(max(n, kept(g, ctx, chunk)))) for g, n in zip(empty, most, strict=True))
    low, high = -(-max(kept(g, ctx, chunk) for g in empty) // PAGE), -(-batch * ctx // PAGE)
    while low < high:                                    # the most pages that fit
        middle = (low + high + 1) // 2
        fits = sum(g.nbytes for g in sized(middle * PAGE)) <= nbytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return sized(low * PAGE)


def host_pages(pools: Sequence[Group], nbytes: int) -> list[int]:
    """Pages of each group in a second tier of `nbytes`, in proportion to the first."""
    total = sum(g.nbytes for g in pools)
    return [g.tokens * nbytes // total // PAGE if total else 0 for g in pools]
