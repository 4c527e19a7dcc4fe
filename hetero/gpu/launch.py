"""Kernels of a decode step brought onto the card before the one ahead of them has ended (programmatic dependent launch); knows no arithmetic.

A kernel launched so must call `follow` before it reads or writes anything that an earlier kernel touches; what is never written (weights) may be read
before. Only cards from compute capability 9.0 on can. Source: PTX ISA, griddepcontrol; CUDA Programming Guide, programmatic dependent launch.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW = 64                                 # tokens of a step up to which the gaps between its kernels count


@triton.jit
def follow(EARLY: tl.constexpr):
    """From here on what came before has ended; the next kernel may come onto the card, but no second one behind it."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def able(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def early(x: torch.Tensor) -> dict[str, bool]:
    """Launch options for a kernel over the tokens of x [T, ...]."""
    if x.is_cuda and x.shape[0] <= FEW and able(x.device.index):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
