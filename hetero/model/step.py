"""Steps of a single sequence over pages that lie one after another: for evaluation and self-tests; knows no scheduler."""

import torch

from hetero.gpu.ops import Step


def single(tokens: torch.Tensor, start: int, page_size: int, wanted: torch.Tensor) -> Step:
    """`tokens` [T] int64 at positions start, start + 1, ... of one sequence whose pages are 0, 1, 2, ...; `wanted` [R] rows of this step."""
    T = tokens.shape[0]
    at = torch.arange(start, start + T)
    pages = torch.arange(-(-(start + T) // page_size), dtype=torch.int32)[None]
    return Step(tokens, at.int(), torch.tensor([0, T], dtype=torch.int32), torch.tensor([start + T], dtype=torch.int32), pages, at,
                torch.zeros(1, dtype=torch.int32), wanted, T)
