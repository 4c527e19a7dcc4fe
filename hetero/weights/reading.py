"""What one logical matrix turns into: floats as stored, or codes with scales that kernels keep exactly; knows no file and no name.

A Reading is decided from shapes and types alone, before a byte is read. `dequantize` is exact arithmetic in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hetero.weights.layout import Piece

Parts = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Floats:
    """Weights as stored: f32 and f16 as such, bf16 as uint16 bit patterns. data: [N, K] (or [N]), read-only."""

    tag: str                             # f32 | f16 | bf16
    data: np.ndarray


@dataclass(frozen=True)
class Codes:
    """Weights as the kernel format `format` keeps them exactly: `codes`, `scales` and `more` are what `cpu_kernels.codes` calls codes and fields.
    int8_g32 and int4_g32: value[n, k] = scales[n, k // 32] * codes[n, k], codes int8 [N, K], scales float32 [N, K / 32]."""

    format: str
    codes: np.ndarray
    scales: np.ndarray
    more: Mapping[str, np.ndarray] = field(default_factory=dict)
    pairs: bool = False                  # codes are nibbles [N, K / 2], the even column in the low half
    order: np.ndarray | None = None      # int32 [K]: column k as it lies here is input order[k] of the matrix


@dataclass(frozen=True)
class Reading:
    """How a matrix arrives. `format` names it in reports; `bits` are per weight, scales left out."""

    format: str                          # bf16 f16 f32 | int8_g32 int4_g128 … | fp8_b128 fp8 mxfp4 nvfp4 | q4_k …
    bits: int
    shape: tuple[int, ...]
    parts: Mapping[str, Piece]
    dequantize: Callable[[Parts], np.ndarray]
    exact: Callable[[Parts], Codes | Floats] | None = None
    keeps: str = ""                      # the kernel format that `exact` is for
    ordered: bool = False                # its codes have an order of their own

    @property
    def nbytes(self) -> int:
        """Bytes in the file that this matrix takes, its share of fused tensors."""
        total = 0
        for p in self.parts.values():
            total += p.stored.nbytes // (p.stored.shape[0] if p.expert is not None else 1) // (2 if p.half else 1)
        return total
