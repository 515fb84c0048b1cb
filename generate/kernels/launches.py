"""What the launches of a layer share on a GPU: the type that they multiply, and programmatic
dependent launch, by which a launch comes up while the one before it still computes (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Wait for all that the launch before has written; the launch after this one may come up."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


# the interpreter multiplies bfloat16 as if they were integers
INTERPRETED = not isinstance(follow, triton.JITFunction)


def multiplied_as(dtype: torch.dtype) -> tl.dtype:
    return tl.float32 if dtype == torch.float32 or INTERPRETED else tl.bfloat16


@functools.cache
def dependent() -> bool:
    """Return whether launches can depend on one another: on GPUs from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
