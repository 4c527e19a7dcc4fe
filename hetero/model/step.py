"""One forward as a flat record, under the name the engine knows it by; the record itself lives with the arithmetic that reads it."""

from hetero.gpu.ops import Step

__all__ = ["Step"]
