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
bits at 1 to 2,048 tokens, and a step of 1, 32, 128 and 256 rows took 0.79, 1.29, 2.35 and 3.71 ms,
where cuBLAS's took 1.20, 1.45, 2.18 and 3.34.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from generate.kernels.launches import dependent, multiplied_as

PIECE = 512
FEW = 16  # tokens; twice as many where outputs and inputs are as few as those of attn.c_proj
MANY = 512  # tokens, beyond which every product has programs enough
NARROW = 1600  # outputs: the width of a model. More are those of c_attn, c_fc and the head
HEAD = 30_000  # outputs, more than which only a head has
PARTS = 2**23  # sums that programs can hand each other in one launch: 34 MB


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


@triton.jit
def finish(
    total, bias, out, parts, arrived, token, output, n_tokens,
    N_OUT: tl.constexpr, SPLIT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Store outputs, of which this program has the sums, or one piece of SPLIT: the program that
    ends last adds those of all, in their order.
    """
    if SPLIT == 1:
        store(total, bias, out, token, output, n_tokens, N_OUT, GELU)
    else:
        place = token.to(tl.int64)[:, None] * N_OUT + output[None, :]  # int32 would spill
        valid = (token < n_tokens)[:, None] & (output < N_OUT)[None, :]
        tl.store(parts + tl.program_id(2) * n_tokens * N_OUT + place, total, mask=valid)
        tl.debug_barrier()  # all threads have stored theirs
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1) == SPLIT - 1:
            tl.store(counter, 0)  # as the next launch finds it
            y = tl.zeros_like(total)
            for part in tl.static_range(SPLIT):
                y += tl.load(parts + part * n_tokens * N_OUT + place, mask=valid, other=0.0)
            store(y, bias, out, token, output, n_tokens, N_OUT, GELU)


# the number of tokens must not choose another kernel
@triton.jit(do_not_specialize=["n_tokens"])
def few_kernel(
    x, weight, bias, out, parts, arrived, n_tokens,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GELU: tl.constexpr, DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One or two pieces of ROWS tokens' OUTPUTS."""
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
    finish(total, bias, out, parts, arrived, token, output, n_tokens, N_OUT, SPLIT, GELU)


@triton.jit(do_not_specialize=["n_tokens"])
def tiles_kernel(
    x, weight, bias, out, parts, arrived, n_tokens,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GELU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """All pieces of ROWS tokens' OUTPUTS, or one of SPLIT, by INPUTS at a time."""
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
    finish(total, bias, out, parts, arrived, token, output, n_tokens, N_OUT, SPLIT, GELU)


def tile(n_tokens: int, n_in: int, n_out: int, dtype: torch.dtype) -> tuple[Any, dict[str, int]]:
    """Return the kernel of a product and the sizes of its programs: of bfloat16 those of the
    fastest prototypes at the widths of GPT-2-medium.
    """
    pieces = triton.cdiv(n_in, PIECE)
    narrow, short = n_out <= NARROW, pieces <= 2
    fits = pieces * n_tokens * n_out <= PARTS
    is_few = n_tokens <= (2 * FEW if narrow and short else FEW)
    if is_few and dtype == torch.bfloat16 and (short or fits):
        sizes = {"SPLIT": 1 if short else pieces, "ROWS": 16, "OUTPUTS": 32, "num_warps": 4}
        return few_kernel, sizes
    split = pieces if narrow and fits and n_tokens <= MANY else 1
    if dtype == torch.float32:  # without tensor cores; it is there for comparisons with the oracle
        rows, outputs, inputs, stages, warps = 32, 32, 32, 2, 4
    elif n_tokens > MANY or (n_out > HEAD and n_tokens > 64):
        rows, outputs, inputs, stages, warps = 128, 128, 64, 3, 8
    elif n_out > HEAD or (not narrow and n_tokens > 128):
        rows, outputs, inputs, stages, warps = 64, 64, 64, 4, 4
    elif narrow and not short:
        rows, outputs, inputs, stages, warps = 64, 64, 128, 3, 4
    else:
        rows, outputs, inputs, stages, warps = 64, 32, 128, 4, 4
    sizes = {"SPLIT": split, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs}
    return tiles_kernel, sizes | {"STAGES": stages, "num_warps": warps}


@functools.cache
def shared(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what programs of one launch hand each other: parts of sums, and for each set of
    outputs how many have arrived. Its place stays, since CUDA graphs know it.
    """
    # at least two parts of at least 32 outputs for each set
    arrived = torch.zeros(PARTS // 64 + 1, dtype=torch.int32, device=device)
    return torch.empty(PARTS, device=device), arrived


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Return x W + b or its gelu: [T, out]. x: [T, in], weight: [out, in], both contiguous."""
    (n_tokens, n_in), n_out = x.shape, weight.shape[0]
    kernel, sizes = tile(n_tokens, n_in, n_out, x.dtype)
    out = x.new_empty(n_tokens, n_out)
    grid = triton.cdiv(n_tokens, sizes["ROWS"]), triton.cdiv(n_out, sizes["OUTPUTS"])
    memory = shared(x.device) if sizes["SPLIT"] > 1 else (None, None)
    if kernel is few_kernel:  # the others' loads would begin after the wait, later than without
        sizes |= {"DEPENDENT": dependent(), "launch_pdl": dependent()}
    kernel[*grid, sizes["SPLIT"]](
        x, weight, bias, out, *memory, n_tokens, N_IN=n_in, N_OUT=n_out, PIECE=PIECE, GELU=gelu,
        DTYPE=multiplied_as(x.dtype), **sizes,
    )  # fmt: skip
    return out
