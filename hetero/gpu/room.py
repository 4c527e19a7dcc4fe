"""Memory that the tensors of a recorded step share: what nothing holds any more is given to the next that asks. Knows no operation.

A step's jobs run in the order in which they were recorded, so a tensor that was dropped before another was made is dead when the other is
written. Without this every layer has rows of its own, which no cache still holds when the next step comes.
"""

import math
import weakref

import numpy as np
import torch
from torch import Tensor

LINE = 64


class Room:
    """`held`: bytes ever taken from the system."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []               # all of them: recorded jobs know their addresses
        self.free: list[np.ndarray] = []
        self.held = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialized; its bytes go to others once every tensor over them is gone."""
        nbytes = -(-max(1, math.prod(shape) * dtype.itemsize) // LINE) * LINE
        block = min((b for b in self.free if b.nbytes >= nbytes), key=lambda b: b.nbytes, default=None)
        if block is None:
            raw = np.zeros(nbytes + LINE, np.uint8)
            start = -raw.ctypes.data % LINE
            block = raw[start:start + nbytes]
            self.blocks.append(block)
            self.held += nbytes
        else:
            self.free = [b for b in self.free if b is not block]
        owner = block[:nbytes]
        weakref.finalize(owner, self.free_again, block)
        return torch.from_numpy(owner)[:math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def free_again(self, block: np.ndarray) -> None:
        self.free.append(block)
