"""A residual addition and the layer norm of its sum in one launch on a GPU, which does not read the
sum again in between. Written in Triton; a program takes a row.

With `overlaps` the launch after it comes up at once, to read its weights before it waits; this has
run on an H200 (2026-11-27).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from generate.kernels.launches import dependent


@triton.jit
def add_norm_kernel(
    x, y, weight, bias, total, out,
    WIDTH: tl.constexpr, POWER: tl.constexpr, EPSILON: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, at = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, POWER)
    valid = at < WIDTH
    x_row = tl.load(x + row + at, mask=valid, other=0.0).to(tl.float32)
    y_row = tl.load(y + row + at, mask=valid, other=0.0).to(tl.float32)
    rounded = (x_row + y_row).to(total.dtype.element_ty)  # as the next addition reads it
    tl.store(total + row + at, rounded, mask=valid)
    value = rounded.to(tl.float32)
    centred = tl.where(valid, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + EPSILON)
    w = tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row + at, (centred * scale * w + b).to(out.dtype.element_ty), mask=valid)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float, overlaps: bool
) -> tuple[Tensor, Tensor]:
    """Return (x + y, layer norm of x + y) of x, y: [T, E], contiguous; weight, bias: [E]."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    n_rows, width = x.shape
    overlaps = overlaps and dependent()
    add_norm_kernel[(n_rows,)](
        x, y, weight, bias, total, out, WIDTH=width, POWER=triton.next_power_of_2(width),
        EPSILON=epsilon, DEPENDENT=overlaps, launch_pdl=overlaps,
    )  # fmt: skip
    return total, out
