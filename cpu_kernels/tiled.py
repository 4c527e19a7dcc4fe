"""The tile products' side of a routed layer: scratch, the words of the `prefill` job, and which pairs it takes. Knows no model and no device."""
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import gemm, prefill, routed, tiles
from .formats import COLS, padded
from .store import ExpertStore, aligned
from .team import Prepared, Team, address, prepare

Array = np.ndarray[Any, Any]
FAST = ("int8_g32", "int4_g32")                      # formats with int8 products; the others keep bf16 ones
BLOCKS_AT_ONCE = 8                                   # 256 rows: their activations and sums stay in L2
SWITCH = 16                                          # tokens of one expert from which tile products pay, unless measured
SCRATCH_NBYTES = 128 << 20                           # of packed activations in one job


def split(ids: Array, experts: int, least: int) -> tuple[Array, Array]:
    """(pairs of experts with fewer than `least` tokens, the others): ids with −1 in place of the other side's. Ids must be −1..experts − 1."""
    many = np.bincount(ids[ids >= 0].ravel(), minlength=experts + 1) >= least
    mine = many[ids]                                 # −1 looks up the spare last place, which is never many
    return np.where(mine, np.int32(-1), ids), np.where(mine, ids, np.int32(-1))


class Tiled:
    """`add(x, ids, weights, out)` adds what the experts named by ids give their tokens, by bf16 products or, `fast`, int8 ones."""

    def __init__(self, store: ExpertStore, static: dict[int, int], kind: str, body: str, amx: bool, fast: bool, team: Team, keep: Any) -> None:
        self.store, self.team, self.fast = store, team, fast
        H, I = padded(store.hidden, COLS), padded(store.inter, COLS)
        self.bytes_of_x, self.bytes_of_hidden = H * (1 if fast else 2), I * (1 if fast else 2)
        self.inter_bf16 = 2 * I
        self.words = np.zeros(prefill.WORDS, np.int64)
        for i, v in static.items():
            self.words[i] = v
        self.room = aligned(team.threads * prefill.room_nbytes(BLOCKS_AT_ONCE))
        self.starts = np.zeros(store.experts + 1, np.int32)
        self.configuration = tiles.configuration()
        w = self.words
        w[prefill.ROOM], w[prefill.CONFIGURATION], w[prefill.BLOCK_STARTS] = (a.ctypes.data for a in (self.room, self.configuration, self.starts))
        w[prefill.BLOCKS_AT_ONCE] = BLOCKS_AT_ONCE
        w[prefill.HIDDEN_CHUNK] = max(2, min(prefill.MOST_CHUNK, padded(store.hidden, 32) // 32 // (4 * team.threads)))
        units = prefill.units_of(not fast, store.gated, kind)
        for first, format in ((prefill.MULTIPLY, store.format), (prefill.DOWN_MULTIPLY, store.down)):
            kernels = gemm.gemm(format.name, body, amx, not fast)
            units = units | {first: kernels.multiply, first + 1: kernels.fill, first + 2: kernels.scales}
        for i, unit in units.items():
            w[i] = address(unit)
        self.prepared: Prepared = prepare(prefill.job_of(amx, not fast), self.words, (keep, self.room, units))
        self.blocks = self.pairs = -1

    def _fit(self, blocks: int, pairs: int) -> None:
        if blocks > self.blocks:
            self.packed, self.hidden = aligned(32 * blocks * self.bytes_of_x), aligned(32 * blocks * self.bytes_of_hidden)
            self.scales = np.zeros((2, 32 * blocks), np.float32)
            self.bf16 = aligned(32 * blocks * self.inter_bf16 if self.fast else 64)
            self.blocks = blocks
            for i, a in ((prefill.PACKED, self.packed), (prefill.HIDDEN_TILES, self.hidden), (prefill.PACKED_SCALES, self.scales[0]),
                         (prefill.HIDDEN_SCALES, self.scales[1]), (prefill.HIDDEN_BF16, self.bf16)):
                self.words[i] = a.ctypes.data
        if pairs > self.pairs:
            self.tokens, self.weights = np.zeros(pairs, np.int32), np.zeros(pairs, np.float32)
            self.words[routed.TOKENS], self.words[routed.PAIR_WEIGHTS] = self.tokens.ctypes.data, self.weights.ctypes.data
            self.pairs = pairs

    def add(self, x: Array, ids: Array, weights: Array, out: Array) -> None:
        """Arguments as `ExpertLayer.run` has checked them; ids −1..experts − 1."""
        most = max(512, SCRATCH_NBYTES // (ids.shape[1] * self.bytes_of_x))
        for t in range(0, x.shape[0], most):
            piece = slice(t, t + most)
            self._add(x[piece], ids[piece], weights[piece], out[piece])

    def _add(self, x: Array, ids: Array, weights: Array, out: Array) -> None:
        T, k = ids.shape
        used = int(np.count_nonzero(np.bincount(ids[ids >= 0].ravel(), minlength=1)))
        self._fit(T * k // 32 + used, T * k)
        tasks = max(1, used * padded(self.store.inter, 32) // 32 // (8 * self.team.threads))
        self.words[prefill.INTER_CHUNK] = min(8, tasks)
        self.words[:7] = (x.ctypes.data, ids.ctypes.data, weights.ctypes.data, out.ctypes.data, T, k, x.dtype == np.uint16)
        self.team.run_at(self.prepared.job, self.prepared.arguments)


def measure(store: ExpertStore, walk: Callable[..., None], add: Callable[..., None]) -> int:
    """The fewest tokens of one expert (of 4, 8, 16, 32) from which `add` is faster than `walk`: medians of five runs in turn, eight experts."""
    experts = min(store.experts, 8)
    rng = np.random.default_rng(0)
    for tokens in (4, 8, 16, 32):
        x = rng.standard_normal((tokens, store.hidden)).astype(np.float32)
        ids = np.tile(np.arange(experts, dtype=np.int32), (tokens, 1))
        weights, out = np.ones((tokens, experts), np.float32), np.zeros_like(x)
        ratios = []
        for _ in range(6):
            times = []
            for run in (walk, add):
                begin = time.perf_counter()
                run(x, ids, weights, out)
                times.append(time.perf_counter() - begin)
            ratios.append(times[1] / times[0])
        if sorted(ratios[1:])[2] < 1:                # the first pair warms up
            return tokens
    return 64
