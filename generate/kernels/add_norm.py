"""A residual addition and the layer norm of its sum in one launch on a GPU, which does not read the
sum again in between. Written in Triton; a program takes a row.

With `overlaps` its launch comes up early and reads its weights before it waits, as the launch after
it does (on an H200 33 µs of a step of 575, with eight warps, 2026-11-27).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from generate.kernels.launches import dependent

WARPS = 8


# the number of rows must not choose another kernel
@triton.jit(do_not_specialize=["n_rows"])
def add_norm_kernel(
    x, y, of_y, rows, n_rows, weight, bias, total, out,
    WIDTH: tl.constexpr, POWER: tl.constexpr, EPSILON: tl.constexpr, PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    at = tl.arange(0, POWER)
    valid = at < WIDTH
    w = tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=valid, other=0.0).to(tl.float32)
    if of_y is not None:
        of_y = tl.load(of_y + at, mask=valid, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    to, row = row * WIDTH + at, row if rows is None else tl.load(rows + row)
    if DEPENDENT:
        gdc_wait()
    given = row * WIDTH + at
    x_row = tl.load(x + given, mask=valid, other=0.0).to(tl.float32)
    y_row = tl.zeros([POWER], tl.float32)
    for piece in tl.static_range(PIECES):
        each = y + piece * n_rows.to(tl.int64) * WIDTH
        y_row += tl.load(each + given, mask=valid, other=0.0).to(tl.float32)
    if of_y is not None:
        y_row = (y_row + of_y).to(x.dtype.element_ty).to(tl.float32)  # as a whole product is
    rounded = (x_row + y_row).to(total.dtype.element_ty)  # as the next addition reads it
    tl.store(total + to, rounded, mask=valid)
    value = rounded.to(tl.float32)
    centred = tl.where(valid, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + EPSILON)
    tl.store(out + to, (centred * scale * w + b).to(out.dtype.element_ty), mask=valid)


def add_norm(
    x: Tensor,
    y: Tensor,
    of_y: Tensor | None,
    rows: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    overlaps: bool,
) -> tuple[Tensor, Tensor]:
    """Return (x + y, layer norm of x + y) of x, y: [T, E], contiguous; weight, bias: [E].

    of_y: [E], the bias of a product y: float32 [pieces, T, E], whose pieces are added in their
    order; None: y is whole. rows: int64 [N], the rows that are wanted; None: all.
    """
    (n_rows, width), n_wanted = x.shape, len(x) if rows is None else len(rows)
    total, out = x.new_empty(n_wanted, width), x.new_empty(n_wanted, width)
    overlaps = overlaps and dependent()
    add_norm_kernel[(n_wanted,)](
        x, y, of_y, rows, n_rows, weight, bias, total, out, WIDTH=width,
        POWER=triton.next_power_of_2(width), EPSILON=epsilon, DEPENDENT=overlaps,
        PIECES=1 if of_y is None else len(y), num_warps=WARPS, launch_pdl=overlaps,
    )  # fmt: skip
    return total, out
