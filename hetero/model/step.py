"""One forward as a flat record: which tokens, where they stand, where their KV pages are; knows no model and no request."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Step:
    """T tokens of S sequences, flat, any number of tokens per sequence; R rows want logits. Given to every layer as an argument."""

    tokens: torch.Tensor       # [T] int64
    positions: torch.Tensor    # [T] int32, position in the own sequence
    starts: torch.Tensor       # [S + 1] int32, sequence s owns rows starts[s]:starts[s + 1]
    lengths: torch.Tensor      # [S] int32, tokens of the sequence after this step, cached ones included
    pages: torch.Tensor        # [S, P] int32, page table, -1 beyond the end or given back
    slots: torch.Tensor        # [T] int64, page * page_size + offset where the token's KV is written
    states: torch.Tensor       # [S] int32, slot of per-sequence state parts
    wanted: torch.Tensor       # [R] int64, rows whose logits are wanted
    longest: int               # max tokens of one sequence in this step: 1 means pure decode
