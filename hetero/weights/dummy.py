"""Random weights of any spec's shapes, for measuring machines without a checkpoint; knows no file. Output is noise of a sane size."""

import numpy as np
import torch

from hetero.arch import tensors
from hetero.arch.spec import Model, MoE, Tensor
from hetero.weights.checkpoint import ExpertWeights
from hetero.weights.reading import Floats

NORMS = ("norm", "attn_norm", "ffn_norm")
BLOCK = 1 << 20                          # numbers drawn; larger tensors repeat them, because drawing 700 GB takes an hour


class Dummy:
    """Stands where a Checkpoint stands. Experts arrive as bf16 floats of `kinds` different drawings; whoever packs may copy packed records."""

    kinds = 4

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model, self.seed = model, seed

    def dense(self, tensor: Tensor) -> torch.Tensor:
        """bfloat16 of the spec's shape: norms 1, biases 0, matrices normal with deviation 1 / sqrt(K)."""
        last = tensor.key.rsplit(".", 1)[-1]
        if last in NORMS or last.endswith("_norm"):
            return torch.ones(tensor.shape, dtype=torch.bfloat16)
        if last in ("bias", "correction", "sinks"):
            return torch.zeros(tensor.shape, dtype=torch.bfloat16)
        return self._draw(tensor.shape, sum(tensor.key.encode()) + 7919 * (tensor.layer or 0))

    def _draw(self, shape: tuple[int, ...], salt: int) -> torch.Tensor:
        count = int(np.prod(shape))
        generator = torch.Generator().manual_seed(self.seed + salt)
        block = (torch.randn(min(count, BLOCK), generator=generator) * shape[-1] ** -0.5).bfloat16()
        out = torch.empty(count, dtype=torch.bfloat16)
        for at in range(0, count, BLOCK):
            out[at:at + BLOCK] = block[:count - at]
        return out.reshape(shape)

    def expert_format(self, layer: int) -> str:
        return "bf16"

    def expert_arrives(self, layer: int) -> str:
        return "bf16"

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One of `kinds` drawings, the same for every layer of this shape."""
        moe = self.model.layers[layer].ffn
        assert isinstance(moe, MoE)
        made = {key.split(".")[1]: Floats("bf16", self._draw(shape, 31 * (expert % self.kinds) + i).view(torch.uint16).numpy())
                for i, (key, shape) in enumerate(tensors.expert_shapes(self.model, moe)) if len(shape) == 2}
        return ExpertWeights(made.get("gate"), made["up"], made["down"])

    def expert_biases(self, layer: int) -> dict[str, np.ndarray] | None:
        moe = self.model.layers[layer].ffn
        assert isinstance(moe, MoE)
        if not moe.bias:
            return None
        return {key.split(".")[1]: np.zeros((moe.router.experts, *shape), np.float32)
                for key, shape in tensors.expert_shapes(self.model, moe) if len(shape) == 1}

    def release_expert(self, layer: int, expert: int) -> None:
        pass
