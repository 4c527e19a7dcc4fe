"""`ExpertLayer`: one routed layer over an `ExpertStore`, run by a `Team`. Checks what it is given; `routed` computes. Knows no model."""
import ctypes
import struct
import weakref
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from . import cpu, ffn, lanes, routed, rows, tiled, tiles
from .ffn import KINDS
from .formats import COLS, ROWS, Format, padded
from .store import ExpertStore, aligned
from .team import JobFailed, Prepared, Team, prepare

Array = np.ndarray[Any, Any]
PRECISIONS = ("accurate", "fast", "exact")
CHUNK_TOKENS = 1024                                  # of one job: bounds the scratch
LONG_COLUMNS = 1024                                  # of x: shorter rows lose more by a second call than long streams win
_AIM = struct.Struct("7q").pack_into


def place(a: Array) -> int:
    """Address of an array's memory, several times faster than `a.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, a))) if a.flags.writeable else int(a.ctypes.data)


@dataclass(frozen=True)
class Act:
    """What stands between gate/up and down: kind(min(gate, limit)) · (clip(up, ±limit) + up_shift); silu(g) = g · sigmoid(alpha · g).
    Ungated experts: kind(up). Kinds: silu, gelu, gelu_tanh, relu2."""
    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r}; known: {', '.join(KINDS)}")
        if self.alpha != 1.0 and self.kind != "silu":
            raise ValueError(f"alpha: {self.alpha} with {self.kind}; only silu has one")


class Scratch:
    """Memory that the layers of one team share: activations, hidden rows, sorted pairs, a block per thread. Grows, never shrinks."""

    def __init__(self, threads: int) -> None:
        self.spare = aligned(threads * routed.SPARE_NBYTES)
        self.acts = self.hid = self.pairs = aligned(64)
        self.version = 0

    def fit(self, acts: int, hid: int, pairs: int) -> None:
        """At least that many bytes of each."""
        if self.acts.size >= acts and self.hid.size >= hid and self.pairs.size >= pairs:
            return
        self.acts = self.acts if self.acts.size >= acts else aligned(acts)
        self.hid = self.hid if self.hid.size >= hid else aligned(hid)
        self.pairs = self.pairs if self.pairs.size >= pairs else aligned(padded(pairs, 64))
        self.version += 1

    @staticmethod
    def of(team: Team) -> "Scratch":
        if team not in _scratches:
            _scratches[team] = Scratch(team.threads)
        return _scratches[team]


_scratches: "weakref.WeakKeyDictionary[Team, Scratch]" = weakref.WeakKeyDictionary()


def _padded_bias(name: str, bias: Array | None, experts: int, columns: int, to: int) -> Array:
    out = np.zeros((experts, padded(columns, to)), np.float32)
    if bias is not None:
        if bias.shape != (experts, columns) or bias.dtype != np.float32:
            raise ValueError(f"biases: {name} is {bias.dtype} {bias.shape}, expected float32 {(experts, columns)}")
        out[:, :columns] = bias
    return out


class ExpertLayer:
    """`biases`: float32 (gate [E, inter] | None, up [E, inter] | None, down [E, hidden] | None). `weight_on`: "output" sums w · FFN(x),
    "input" sums FFN(w · x)."""

    def __init__(self, store: ExpertStore, act: Act | None = None, biases: tuple[Array | None, Array | None, Array | None] | None = None,
                 weight_on: str = "output", isa: str | None = None) -> None:
        if weight_on not in ("input", "output"):
            raise ValueError(f"weight_on: {weight_on!r}, expected \"input\" or \"output\"")
        self.store, self.act, self.weight_on, self.biases = store, act or Act(), weight_on, biases
        named = cpu.isa(isa)
        self.body = lanes.body_of(named)
        refused = named == "amx" and not tiles.permitted()
        self.refused = "Linux refuses this process AMX tile registers: many tokens go by AVX-512" if refused else ""
        if named == "amx" and store.order_at:
            self.refused = "inputs in an order of their own: no tile products"
        self.amx = named == "amx" and "f32" not in (store.format.name, store.down.name) and not self.refused
        self.switch = tiled.SWITCH                   # tokens of one expert from which tile products are used; `tune` measures it
        E, H, I = store.experts, store.hidden, padded(store.inter, COLS)
        given = biases or (None, None, None)
        if biases is None:
            self._biases = (np.zeros((1, max(I, padded(H, ROWS))), np.float32),) * 3
        else:
            self._biases = (_padded_bias("gate", given[0], E, store.inter, COLS), _padded_bias("up", given[1], E, store.inter, COLS),
                            _padded_bias("down", given[2], E, H, ROWS))
        limit = float("inf") if self.act.limit is None else self.act.limit
        self._params = np.array([self.act.alpha, limit, self.act.up_shift, 1.0], np.float32)
        self._counts = np.zeros(3 * E + 1, np.int32)
        one = store.format.nbytes(I, H)
        r = routed
        self.static: dict[int, int] = {
            r.HIDDEN: H, r.INTER: I, r.EXPERTS: E, r.BASE: store.address, r.RECORD: store.record_nbytes, r.UP_AT: one,
            r.DOWN_AT: one * (1 + store.gated), r.TILE: store.format.tile_nbytes,
            r.DOWN_TILE: store.down.tile_nbytes, r.ORDER_AT: store.order_at, r.KIND: KINDS.index(self.act.kind), r.GATED: int(store.gated),
            r.PARAMS: self._params.ctypes.data, r.BIAS_GATE: self._biases[0].ctypes.data, r.BIAS_UP: self._biases[1].ctypes.data,
            r.BIAS_DOWN: self._biases[2].ctypes.data, r.BIAS_I: 4 * I * (biases is not None),
            r.BIAS_H: 4 * padded(H, ROWS) * (biases is not None), r.ON_INPUT: int(weight_on == "input"), r.COUNTS: self._counts.ctypes.data,
            r.USED: self._counts[E:].ctypes.data, r.STARTS: self._counts[2 * E:].ctypes.data, r.ONE: self._params[3:].ctypes.data,
            r.LONG: int(cpu.amd() and H >= LONG_COLUMNS)}
        self._lines: weakref.WeakKeyDictionary[Team, dict[bool, _Line]] = weakref.WeakKeyDictionary()
        self._tiled: weakref.WeakKeyDictionary[Team, dict[bool, tiled.Tiled]] = weakref.WeakKeyDictionary()

    def run(self, x: Array, ids: Array, weights: Array, out: Array, team: Team, precision: str = "accurate", deterministic: bool = False) -> None:
        """x float32 or bf16 bits as uint16 [T, H]; ids int32 [T, k], −1 = not mine; weights float32 [T, k]; out float32 [T, H],
        overwritten. All C-contiguous. precision "exact" multiplies unrounded float32 activations; with AMX, experts of many tokens
        multiply bf16 activations ("accurate") or ones rounded to int8 by row ("fast"). `deterministic`: the arithmetic of a
        token does not depend on how many others there are. ValueError or TypeError names the argument that is wrong."""
        self._check(x, ids, weights, out, precision)
        if self.amx and x.shape[0] >= self.switch and precision != "exact" and not deterministic:
            if int(ids.min()) < -1 or int(ids.max()) >= self.store.experts:
                raise ValueError(f"ids: outside −1..{self.store.experts - 1}")
            few, many = tiled.split(ids, self.store.experts, self.switch)
            if (many >= 0).any():
                if (few >= 0).any():
                    self._walk(x, few, weights, out, team, False)
                else:
                    out[...] = 0
                self._tiles(team, precision == "fast").add(x, many, weights, out)
                return
        self._walk(x, ids, weights, out, team, precision == "exact")

    def kernel(self, precision: str = "accurate", deterministic: bool = False) -> str:
        """What `run` runs, for a report: the body of few tokens, and that of many where there is another one."""
        few = f"rows.{self.store.form}"
        if not self.amx or precision == "exact" or deterministic:
            return few
        return f"{few}, from {self.switch} tokens tiles.{'int8' if precision == 'fast' and self.rounds else 'bf16'}"

    @property
    def rounds(self) -> bool:
        """True when there are int8 tile products for these formats."""
        return {self.store.format.name, self.store.down.name} <= set(tiled.FAST)

    def _walk(self, x: Array, ids: Array, weights: Array, out: Array, team: Team, exact: bool) -> None:
        """By the kernels of few tokens, which any number can go through."""
        line = self._line(team, exact)
        T = x.shape[0]
        try:
            if T <= CHUNK_TOKENS:
                line.aim(x, ids, weights, out)
                team.run_at(line.prepared.job, line.prepared.arguments)
                return
            for t in range(0, T, CHUNK_TOKENS):
                piece = slice(t, t + CHUNK_TOKENS)
                line.aim(x[piece], ids[piece], weights[piece], out[piece])
                team.run_at(line.prepared.job, line.prepared.arguments)
        except JobFailed as failed:
            if failed.code != routed.BAD_ID:
                raise
            raise ValueError(f"ids: outside −1..{self.store.experts - 1}") from None

    def _tiles(self, team: Team, fast: bool) -> tiled.Tiled:
        """By tile products; only some formats have a faster int8 form."""
        fast = fast and self.rounds
        made = self._tiled.setdefault(team, {})
        if fast not in made:
            made[fast] = tiled.Tiled(self.store, self.static, self.act.kind, self.body, True, fast, team, self)
        return made[fast]

    def tune(self, team: Team) -> int:
        """Measures from how many tokens of one expert tile products are the faster way here, and sets and returns `switch`."""
        if self.amx:
            self.switch = tiled.measure(self.store, lambda x, ids, w, out: self._walk(x, ids, w, out, team, False), self._tiles(team, False).add)
        return self.switch

    def prepared(self, x: Array, ids: Array, weights: Array, out: Array, team: Team) -> Prepared:
        """The same as a job over fixed arrays that the caller keeps alive (a mailbox, a recorded step's), with scratch that other layers of the
        team share but nobody moves."""
        self._check(x, ids, weights, out, "accurate")
        line = _Line(self, Scratch.of(team), False)
        line.aim(x, ids, weights, out)
        return prepare(routed.job, line.words, (line, line.scratch.acts, line.scratch.hid, line.scratch.pairs))

    def _line(self, team: Team, exact: bool) -> "_Line":
        lines = self._lines.setdefault(team, {})
        if exact not in lines:
            lines[exact] = _Line(self, Scratch.of(team), exact)
        return lines[exact]

    def _check(self, x: Array, ids: Array, weights: Array, out: Array, precision: str) -> None:
        H = self.store.hidden
        if x.dtype != np.float32 and x.dtype != np.uint16:
            raise TypeError(f"x: dtype {x.dtype}, expected float32, or uint16 for bf16")
        if ids.dtype != np.int32 or weights.dtype != np.float32 or out.dtype != np.float32:
            raise TypeError(f"ids, weights, out: dtypes {ids.dtype}, {weights.dtype}, {out.dtype}; expected int32, float32, float32")
        if x.ndim != 2 or x.shape[1] != H:
            raise ValueError(f"x: shape {x.shape}, expected (T, {H})")
        if out.shape != x.shape:
            raise ValueError(f"out: shape {out.shape}, expected {x.shape}")
        if ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
            raise ValueError(f"ids, weights: shapes {ids.shape}, {weights.shape}; expected ({x.shape[0]}, k) both")
        if not ids.size:
            raise ValueError(f"ids: shape {ids.shape} holds no token or no expert")
        if not (x.flags.c_contiguous and ids.flags.c_contiguous and weights.flags.c_contiguous and out.flags.c_contiguous):
            name = next(n for n, v in (("x", x), ("ids", ids), ("weights", weights), ("out", out)) if not v.flags.c_contiguous)
            raise ValueError(f"{name}: not C-contiguous")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r}, expected one of {', '.join(PRECISIONS)}")


class _Line:
    """The arguments of one layer's job on one team."""

    def __init__(self, layer: ExpertLayer, scratch: Scratch, exact: bool) -> None:
        store = layer.store
        step, down_step = (rows.block_nbytes(f, exact) for f in (store.format, store.down))
        self.scratch, self.version = scratch, -1
        self.act_nbytes, self.ordered = padded(store.hidden, COLS) // COLS * step, store.order_at > 0
        self.hid_nbytes = padded(store.inter, COLS) // COLS * down_step
        self.words = np.zeros(routed.WORDS, np.int64)
        self.view, self.several = memoryview(cast(Any, self.words)), False
        for i, v in layer.static.items():
            self.words[i] = v
        self.words[routed.STEP], self.words[routed.DOWN_STEP] = step, down_step
        self.kinds: dict[str, tuple[Format, str, bool]] = {"": (store.format, layer.body, exact), "DOWN_": (store.down, layer.body, exact)}
        self.prepared = prepare(routed.job, self.words, layer)

        self.widen(False)

    def widen(self, several: bool) -> None:
        """Makes walks for one token or for several of one expert at once ready: compiled when first needed."""
        for prefix, (format, body, exact) in self.kinds.items():
            for name, place in ffn.walks(format.name, body, exact, several, bool(prefix)).items():
                self.words[getattr(routed, prefix + name)] = place
        self.several = several

    def aim(self, x: Array, ids: Array, weights: Array, out: Array) -> None:
        T, k = ids.shape
        if T * k > 1 and not self.several:           # a token may name an expert twice
            self.widen(True)
        scratch = self.scratch
        scratch.fit(T * self.act_nbytes * (k if self.ordered else 1), T * k * self.hid_nbytes, 8 * T * k)
        if scratch.version != self.version:
            pairs = scratch.pairs.ctypes.data
            self.words[routed.ACTS], self.words[routed.HID] = scratch.acts.ctypes.data, scratch.hid.ctypes.data
            self.words[routed.SPARE] = scratch.spare.ctypes.data
            self.words[routed.TOKENS], self.words[routed.PAIR_WEIGHTS] = pairs, pairs + scratch.pairs.size // 8 * 4
            self.version = scratch.version
        _AIM(self.view, 0, place(x), place(ids), place(weights), place(out), T, k, x.dtype == np.uint16)
