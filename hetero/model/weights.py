"""A model's dense tensors by canonical key, read when asked for; knows no file format and keeps nothing."""

from collections.abc import Callable, Iterable

from torch import Tensor

from hetero.arch import spec


class Weights:
    """`read` gives one tensor of the list as floats; the list says which exist."""

    def __init__(self, tensors: Iterable[spec.Tensor], read: Callable[[spec.Tensor], Tensor]) -> None:
        self.listed = {(t.key, t.layer): t for t in tensors if t.home == "dense"}
        self.read = read

    def of(self, layer: int | None) -> "LayerWeights":
        """The tensors of one layer, or the global ones for None."""
        return LayerWeights(self, layer)


class LayerWeights:
    def __init__(self, weights: Weights, layer: int | None) -> None:
        self.weights, self.layer = weights, layer

    def __call__(self, key: str) -> Tensor:
        return self.weights.read(self.weights.listed[key, self.layer])

    def maybe(self, key: str) -> Tensor | None:
        """None where the model has no such tensor."""
        return self(key) if (key, self.layer) in self.weights.listed else None
