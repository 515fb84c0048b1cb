"""A product of a layer on a GPU with what lies around it, f(x) W + b, in one launch.

Before it may come the norm of x, after it a gelu or the residual addition; so a layer of the model
takes five launches (generate/fused.py). Written in Triton.

A program takes ROWS tokens and some outputs. It adds the products of an output in an order that
depends on the weights' shape alone: its warps take a slice of each INPUTS inputs, and their sums
are added last. So the result of a token has the same bits however many others are computed beside
it, which cuBLAS, whose kernels are chosen by the number of tokens, does not promise (He et al.,
"Defeating Nondeterminism in LLM Inference", Thinking Machines Lab 2025).

Few tokens take as long as the weights take to be read: a wave of programs covers an H100's 132
multiprocessors, and each has about 30 kB of weights on their way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from generate.kernels.launches import dependent, follow, multiplied_as

ROWS = 16  # tokens of a program; the least that tensor cores multiply
WARPS = 8  # of a program, each with its slice of the inputs
PROGRAMS = 128  # for few tokens at least, if outputs suffice
FEWEST, MOST = 8, 32  # outputs of a program


# the number of tokens must not choose another kernel
@triton.jit(do_not_specialize=["n_tokens"])
def product_kernel(
    x, weight, bias, gain, shift, residual, out, n_tokens,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, POWER: tl.constexpr, EPSILON: tl.constexpr,
    GELU: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SLICES: tl.constexpr, DTYPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, row = token < n_tokens, token.to(tl.int64) * N_IN
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if gain is not None:
        every = tl.arange(0, POWER)
        inside = there[:, None] & (every < N_IN)[None, :]
        whole = tl.load(x + row[:, None] + every[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(whole, 1) / N_IN
        centred = tl.where((every < N_IN)[None, :], whole - mean[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / N_IN + EPSILON)
    EACH: tl.constexpr = INPUTS // SLICES
    inputs = tl.arange(0, SLICES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    total = tl.zeros([SLICES, ROWS, OUTPUTS], tl.float32)
    for start in range(0, N_IN, INPUTS):
        at = start + inputs  # [SLICES, EACH]
        known = at < N_IN
        place = row[None, :, None] + at[:, None, :]
        a = tl.load(x + place, mask=there[None, :, None] & known[:, None, :], other=0.0)
        if gain is not None:
            g = tl.load(gain + at, mask=known, other=0.0).to(tl.float32)[:, None, :]
            s = tl.load(shift + at, mask=known, other=0.0).to(tl.float32)[:, None, :]
            a = (a.to(tl.float32) - mean[None, :, None]) * scale[None, :, None] * g + s
        place = output[None, None, :] * N_IN + at[:, :, None]
        b = tl.load(
            weight + place, mask=known[:, :, None] & (output < N_OUT)[None, None, :], other=0.0
        )
        total = tl.dot(a.to(DTYPE), b.to(DTYPE), total, input_precision="ieee")
    y = tl.sum(total, 0)
    if bias is not None:
        y += tl.load(bias + output, mask=output < N_OUT, other=0.0).to(tl.float32)[None, :]
    if GELU:  # y (1 + tanh u) / 2 = y sigmoid(2 u), with u = √(2 / π) (y + 0.044715 y³)
        double = 1.5957691216057308 * (y + 0.044715 * y * y * y)
        y *= tl.sigmoid(tl.maximum(double, -80.0))  # below, exp would overflow
    place = token.to(tl.int64)[:, None] * N_OUT + output[None, :]
    valid = there[:, None] & (output < N_OUT)[None, :]
    if residual is not None:
        y += tl.load(residual + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=valid)


def tile(n_out: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of a program and its stages, by the outputs and the type of a product."""
    outputs = max(FEWEST, min(MOST, triton.next_power_of_2(n_out // PROGRAMS + 1) // 2))
    inputs = min(256, 4096 // outputs)
    stages = 5 if dtype == torch.bfloat16 else 2
    sizes = {"ROWS": ROWS, "OUTPUTS": outputs, "INPUTS": inputs, "SLICES": WARPS}
    return sizes | {"num_warps": WARPS, "num_stages": stages}


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
    add: Tensor | None = None,
) -> Tensor:
    """Return add + gelu(norm(x) W + b) of x: [T, in], of which each may be missing: [T, out].

    weight: [in, out], whose columns lie one after another in memory. norm: weight, bias: [in], and
    epsilon. add: [T, out]. x and add are contiguous.
    """
    (n_tokens, n_in), n_out = x.shape, weight.shape[1]
    assert weight.stride() == (1, n_in), "a column of the weights is one piece of memory"
    gain, shift, epsilon = norm or (None, None, 0.0)
    out, sizes = x.new_empty(n_tokens, n_out), tile(n_out, x.dtype)
    grid = triton.cdiv(n_tokens, ROWS), triton.cdiv(n_out, sizes["OUTPUTS"])
    product_kernel[grid](
        x, weight, bias, gain, shift, add, out, n_tokens,
        N_IN=n_in, N_OUT=n_out, POWER=triton.next_power_of_2(n_in), EPSILON=epsilon, GELU=gelu,
        DTYPE=multiplied_as(x.dtype), DEPENDENT=dependent(), launch_pdl=dependent(), **sizes,
    )  # fmt: skip
    return out
