"""A residual addition and the layer norm of its sum in one launch, on a GPU.

The sum is not read again in between. Written in Triton, as is
paged_attention.py. A program takes a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_kernel(
    x, y, weight, bias, total, out, WIDTH: tl.constexpr, POWER: tl.constexpr, EPSILON: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, POWER)
    mine = at < WIDTH
    added = tl.load(x + row + at, mask=mine, other=0.0).to(tl.float32) + tl.load(
        y + row + at, mask=mine, other=0.0
    ).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)  # the norm is of what the next addition will find
    tl.store(total + row + at, rounded, mask=mine)
    value = rounded.to(tl.float32)
    centred = tl.where(mine, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + EPSILON)
    w, b = (
        tl.load(weight + at, mask=mine, other=0.0).to(tl.float32),
        tl.load(bias + at, mask=mine, other=0.0).to(tl.float32),
    )
    tl.store(out + row + at, (centred * scale * w + b).to(out.dtype.element_ty), mask=mine)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return (x + y, layer norm of x + y) of x, y: [T, E], contiguous; weight, bias: [E]."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    n_rows, width = x.shape
    power = triton.next_power_of_2(width)
    add_norm_kernel[(n_rows,)](
        x, y, weight, bias, total, out, WIDTH=width, POWER=power, EPSILON=epsilon
    )
    return total, out
