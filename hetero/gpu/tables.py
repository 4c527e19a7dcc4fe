"""Numbers that attention parts share, computed once from the spec: cos and sin by position, softmax scales; knows no kernel."""

import torch
from torch import Tensor

from hetero.arch import rope as ropes
from hetero.arch import spec


def rope_table(rope: spec.Rope, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [context, rope.dim // 2] float32, already multiplied by the scaling's attention factor."""
    frequencies, size = ropes.frequencies(rope, context)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), torch.from_numpy(frequencies).double())
    return (angles.cos() * size).float(), (angles.sin() * size).float()


def scale_of(part: spec.GQA | spec.MLA) -> float:
    """What scores are multiplied with before the softmax."""
    width = part.head_dim if isinstance(part, spec.GQA) else part.nope_dim + part.rope.dim
    return width ** -0.5 if part.scale is None else part.scale
