"""A linear layer on a GPU, x W + b or its gelu, with the same bits for any number of tokens.
Written in Triton.

An output's sum has one order: pieces of PIECE inputs, each from zero, added one after another. So a
token has the same bits however many others are computed beside it, and the tiles may follow the
number of tokens all the same. cuBLAS's follow it too, with other bits (He et al., "Defeating
Nondeterminism in LLM Inference", Thinking Machines Lab 2025). Two kernels:

    few      a few tokens take as long as their weights take to be read: a program has all of its
             weights on their way before it waits for the launch before it
    tiles    more tokens, in a pipelined loop

Run on an H200 (PyTorch 2.11, Triton 3.6, 2026-11-27): each product of GPT-2-medium had the same
bits at 1 to 2,048 tokens (commit d27e0135; attn.c_proj has two programs for an output from 5 to 32
tokens since, and mlp.c_proj narrower ones from 17 to 32). The launch after one comes up at once,
and waits until its own input is complete. The residual addition after a product may take the sums
of the pieces as they are (generate/linear.py: Sums), so that no program waits for another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from generate.kernels.launches import dependent, multiplied_as

PIECE = 512
FEW = 32  # tokens
MANY = 512  # tokens, beyond which every product has programs enough
HEAD = 30_000  # outputs, more than which only a head has


@triton.jit
def store(y, bias, out, token, output, n_tokens, N_OUT: tl.constexpr, GELU: tl.constexpr):
    """Store y + bias, or its gelu. y: [ROWS, OUTPUTS], bias: [OUTPUTS]."""
    if bias is not None:
        y += bias[None, :]
    if GELU:  # y (1 + tanh u) / 2 = y sigmoid(2 u), with u = √(2 / π) (y + 0.044715 y³)
        # fused by name, so that no compiler chooses it in one kernel alone
        double = 1.5957691216057308 * tl.fma(0.044715 * y * y, y, y)
        y *= tl.sigmoid(tl.maximum(double, -80.0))  # below, exp would overflow
    place = token.to(tl.int64)[:, None] * N_OUT + output[None, :]
    valid = (token < n_tokens)[:, None] & (output < N_OUT)[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=valid)


# the number of tokens must not choose another kernel
@triton.jit(do_not_specialize=["n_tokens"])
def few_kernel(
    x, weight, bias, out, n_tokens,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GELU: tl.constexpr, DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One of SPLIT pieces of ROWS tokens' OUTPUTS, or both of two."""
    if DEPENDENT:
        gdc_launch_dependents()  # whose weights come meanwhile
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    begin, at = tl.program_id(2) * PIECE, tl.arange(0, PIECE)
    there, inside = (token < n_tokens)[:, None], (output < N_OUT)[None, :]
    x_at = x + token[:, None].to(tl.int64) * N_IN + begin + at[None, :]
    w_at = weight + output[None, :].to(tl.int64) * N_IN + begin + at[:, None]
    TWO: tl.constexpr = N_IN > SPLIT * PIECE
    WHOLE: tl.constexpr = N_IN % PIECE == 0  # else a mask more
    known = inside if WHOLE else inside & (begin + at < N_IN)[:, None]
    w_first = tl.load(w_at, mask=known, other=0.0)
    if TWO:
        known = inside if WHOLE else inside & (PIECE + at < N_IN)[:, None]
        w_second = tl.load(w_at + PIECE, mask=known, other=0.0)
    if bias is not None:
        bias = tl.load(bias + output, mask=output < N_OUT, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    known = there if WHOLE else there & (begin + at < N_IN)[None, :]
    x_first = tl.load(x_at, mask=known, other=0.0)
    if TWO:
        known = there if WHOLE else there & (PIECE + at < N_IN)[None, :]
        x_second = tl.load(x_at + PIECE, mask=known, other=0.0)
    total = tl.dot(x_first.to(DTYPE), w_first.to(DTYPE), input_precision="ieee")
    if TWO:
        more = tl.dot(x_second.to(DTYPE), w_second.to(DTYPE), input_precision="ieee")
        # `total + more` would be compiled to a product that begins with `total`: other bits
        total = tl.fma(more, tl.full(more.shape, 1.0, tl.float32), total)
    out += tl.program_id(2) * n_tokens * N_OUT
    store(total, bias, out, token, output, n_tokens, N_OUT, GELU)


@triton.jit(do_not_specialize=["n_tokens"])
def tiles_kernel(
    x, weight, bias, out, n_tokens,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GELU: tl.constexpr, DTYPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All pieces of ROWS tokens' OUTPUTS, or one of SPLIT, by INPUTS at a time."""
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, INPUTS)
    there, inside = (token < n_tokens)[:, None], (output < N_OUT)[None, :]
    x_at = x + token[:, None].to(tl.int64) * N_IN + at[None, :]
    w_at = weight + output[None, :].to(tl.int64) * N_IN + at[:, None]
    WHOLE: tl.constexpr = N_IN % PIECE == 0  # else a mask more
    EACH: tl.constexpr = (N_IN + PIECE - 1) // PIECE // SPLIT
    if bias is not None:
        bias = tl.load(bias + output, mask=output < N_OUT, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for piece in tl.range(0, EACH, num_stages=1):
        of_piece = tl.zeros([ROWS, OUTPUTS], tl.float32)
        begin = (tl.program_id(2) * EACH + piece) * PIECE
        for start in tl.range(0, PIECE, INPUTS, num_stages=STAGES):
            k = begin + start
            known = there if WHOLE else there & (k + at < N_IN)[None, :]
            given = tl.load(x_at + k, mask=known, other=0.0)
            known = inside if WHOLE else inside & (k + at < N_IN)[:, None]
            w = tl.load(w_at + k, mask=known, other=0.0)
            of_piece = tl.dot(given.to(DTYPE), w.to(DTYPE), of_piece, input_precision="ieee")
        total += of_piece
    out += tl.program_id(2) * n_tokens * N_OUT
    store(total, bias, out, token, output, n_tokens, N_OUT, GELU)


def tile(
    n_tokens: int, n_in: int, n_out: int, dtype: torch.dtype, whole: bool = True
) -> tuple[Any, dict[str, int]]:
    """Return the kernel of a product and the sizes of its programs: of bfloat16 those that were
    fastest at the widths of GPT-2-medium on an H200 (graphs of whole steps, 2026-11-27).
    """
    pieces = triton.cdiv(n_in, PIECE)
    short = pieces <= 2
    if dtype == torch.bfloat16 and n_tokens <= FEW and n_out <= HEAD and (short or not whole):
        # at most 64 KB of weights a program, which are on their way before x comes
        split = 1 if whole or (short and n_tokens <= 4) else pieces
        outputs = 32 if short or n_tokens > 16 else 64
        return few_kernel, {"SPLIT": split, "ROWS": 16, "OUTPUTS": outputs, "num_warps": 4}
    split = 1 if whole or n_tokens > MANY else pieces
    if dtype == torch.float32:  # without tensor cores; it is there for comparisons with the oracle
        rows, outputs, inputs, stages, warps = 32, 32, 32, 2, 4
    elif n_tokens > MANY or (n_out > HEAD and n_tokens > 64):
        rows, outputs, inputs, stages, warps = 128, 128, 64, 3, 8
    elif n_out > HEAD or (whole and n_tokens > 128):
        rows, outputs, inputs, stages, warps = 64, 64, 64, 4, 4
    elif not short and n_tokens > 64:
        rows, outputs, inputs, stages, warps = 128, 64, 64, 4, 8
    elif not short:
        rows, outputs, inputs, stages, warps = 64, 64, 128, 3, 4
    else:
        rows, outputs, inputs, stages, warps = 64, 32, 128, 4, 4
    sizes = {"SPLIT": split, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs}
    return tiles_kernel, sizes | {"STAGES": stages, "num_warps": warps}


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False, whole: bool = True
) -> Tensor:
    """Return x W + b or its gelu: [T, out]. Unless `whole`, it may be the sums of the pieces,
    without b: float32 [pieces, T, out]. x: [T, in], weight: [out, in], both contiguous.
    """
    (n_tokens, n_in), n_out = x.shape, weight.shape[0]
    kernel, sizes = tile(n_tokens, n_in, n_out, x.dtype, whole)
    split, follows = sizes["SPLIT"], dependent()
    if split == 1:
        out = x.new_empty(n_tokens, n_out)
    else:
        out, bias = x.new_empty(split, n_tokens, n_out, dtype=torch.float32), None
    if kernel is few_kernel:  # the others' loads would begin after the wait, later than without
        sizes["launch_pdl"] = follows
    grid = triton.cdiv(n_tokens, sizes["ROWS"]), triton.cdiv(n_out, sizes["OUTPUTS"]), split
    kernel[grid](
        x, weight, bias, out, n_tokens, N_IN=n_in, N_OUT=n_out, PIECE=PIECE, GELU=gelu,
        DTYPE=multiplied_as(x.dtype), DEPENDENT=follows, **sizes,
    )  # fmt: skip
    return out
