"""Steps of a single sequence over pages that lie one after another: for evaluation and self-tests; knows no scheduler."""

import torch

from hetero.gpu.ops import Step


def single(tokens: torch.Tensor, start: int, page_size: int, wanted: torch.Tensor, device: str = "cpu") -> Step:
    """`tokens` [T] int64 at positions start, start + 1, ... of one sequence whose pages are 0, 1, 2, ...; `wanted` [R] rows of this step."""
    T = tokens.shape[0]
    at = torch.arange(start, start + T)
    pages = torch.arange(-(-(start + T) // page_size), dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, T], dtype=torch.int32), torch.tensor([start + T], dtype=torch.int32)
    t, p, s, n, table, slots, states, w = (x.to(device) for x in (tokens, at.int(), starts, lengths, pages, at, torch.zeros_like(lengths), wanted))
    return Step(t, p, s, n, table, slots, states, w, T, start)
