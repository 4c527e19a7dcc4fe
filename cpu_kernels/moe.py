"""`ExpertLayer`: one routed layer over an `ExpertStore`: groups tokens by expert, shares rows out to a team, sums. Knows no model and no device."""
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plain
from .store import ExpertStore

Array = np.ndarray[Any, Any]
PRECISIONS = ("accurate", "fast", "exact")


@dataclass(frozen=True)
class Act:
    """What stands between gate/up and down: kind(min(gate, limit)) · (clip(up, ±limit) + up_shift); silu(g) = g · sigmoid(alpha · g).
    Ungated experts: kind(up). Kinds: silu, gelu, gelu_tanh, relu2."""
    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("silu", "gelu", "gelu_tanh", "relu2"):
            raise ValueError(f"kind: {self.kind!r}; silu, gelu, gelu_tanh and relu2 are known")


class ExpertLayer:
    """`biases`: float32 (gate [E, inter] | None, up [E, inter] | None, down [E, hidden] | None). `weight_on`: "output" sums w · FFN(x),
    "input" sums FFN(w · x)."""

    def __init__(self, store: ExpertStore, act: Act | None = None, biases: tuple[Array | None, Array | None, Array | None] | None = None,
                 weight_on: str = "output") -> None:
        if weight_on not in ("input", "output"):
            raise ValueError(f"weight_on: {weight_on!r}, expected \"input\" or \"output\"")
        self.store, self.act, self.weight_on, self.biases = store, act or Act(), weight_on, biases

    def run(self, x: Array, ids: Array, weights: Array, out: Array, team: Any, precision: str = "accurate", deterministic: bool = False) -> None:
        """x float32 or bf16 bits as uint16 [T, H]; ids int32 [T, k], −1 = not mine; weights float32 [T, k]; out float32 [T, H],
        overwritten. All C-contiguous. `deterministic`: the arithmetic of a token does not depend on how many others there are.
        ValueError or TypeError names the argument that is wrong, before anything is computed."""
        self._check(x, ids, weights, out, precision)
        act = (self.act.kind, self.act.alpha, self.act.limit, self.act.up_shift)
        seen: dict[int, Any] = {}

        def matrices(e: int) -> Any:
            if e not in seen:
                seen[e] = tuple(self.store.dequantize(e, n) if n != "gate" or self.store.gated else None for n in ("gate", "up", "down"))
            return seen[e]
        f = plain.bf16_to_f32(x) if x.dtype == np.uint16 else x
        out[...] = plain.moe(self.store.format, f, ids, weights, matrices, act, self.biases, self.weight_on, rounded=True)

    def _check(self, x: Array, ids: Array, weights: Array, out: Array, precision: str) -> None:
        T, k = ids.shape
        for name, a, shape, dtypes in (("x", x, (T, self.store.hidden), (np.float32, np.uint16)), ("ids", ids, (T, k), (np.int32,)),
                                       ("weights", weights, (T, k), (np.float32,)), ("out", out, (T, self.store.hidden), (np.float32,))):
            if a.dtype not in dtypes:
                raise TypeError(f"{name}: dtype {a.dtype}, expected {' or '.join(np.dtype(d).name for d in dtypes)}")
            if a.shape != shape:
                raise ValueError(f"{name}: shape {a.shape}, expected {shape}")
            if not a.flags.c_contiguous:
                raise ValueError(f"{name}: not C-contiguous")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r}, expected one of {', '.join(PRECISIONS)}")
        if ids.size and (int(ids.max()) >= self.store.experts or int(ids.min()) < -1):
            raise ValueError(f"ids: outside −1..{self.store.experts - 1}")
