"""What adapters add to a linear layer on a GPU: one launch for all rows (generate/lora.py).

A program takes a *tile*, up to TOKENS tokens side by side whose rows have one adapter, and some of
the outputs: tokens of a tile share the reading of A and B (the SGMV of Punica, Chen et al. 2023,
section 4). Every program computes A x anew, which takes less time than a second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16  # in a tile at most; the least that `dot` multiplies
# integers that describe a tile: its first token, its tokens (0: nothing to do), slot, none
TILE = 4
RANKS, INPUTS, OUTPUTS = 16, 32, 128  # that a program multiplies at once
STAGES = 5  # in which it reads ahead; with fewer and wider ones, registers spill


@triton.jit
def lora_kernel(
    x, y, memory, tiles, ranks, stride, offset,
    N_IN: tl.constexpr, WIDTH: tl.constexpr, N_OUT: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    tile = tiles + TILE * tl.program_id(0)
    first, n, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    if n == 0:
        return
    rank = tl.load(ranks + slot)
    a = memory + slot * stride + rank.to(tl.int64) * offset
    b = a + rank * WIDTH
    at = tl.arange(0, TOKENS)
    token = (first + at).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, rank, RANKS):
        row = start + tl.arange(0, RANKS)
        low = tl.zeros([TOKENS, RANKS], tl.float32)
        for k in range(0, N_IN, INPUTS):
            feature = k + tl.arange(0, INPUTS)
            known = (at < n)[:, None] & (feature < N_IN)[None, :]
            given = tl.load(x + token[:, None] * N_IN + feature[None, :], mask=known, other=0.0)
            own = (feature < N_IN)[:, None] & (row < rank)[None, :]
            part = tl.load(a + row[None, :] * WIDTH + feature[:, None], mask=own, other=0.0)
            low += tl.dot(given.to(tl.float32), part, input_precision="ieee")
        own = (row < rank)[:, None] & (output < N_OUT)[None, :]
        part = tl.load(b + output[None, :] * rank + row[:, None], mask=own, other=0.0)
        total += tl.dot(low, part, input_precision="ieee")
    place = y + token[:, None] * N_OUT + output[None, :]
    valid = (at < n)[:, None] & (output < N_OUT)[None, :]
    result = tl.load(place, mask=valid, other=0.0).to(tl.float32) + total
    tl.store(place, result.to(y.dtype.element_ty), mask=valid)


def add(
    x: Tensor, y: Tensor, memory: Tensor, tiles: Tensor, n_tiles: int, ranks: Tensor,
    offset: int, width: int,
) -> None:  # fmt: skip
    """Add the adapters' part to y: [T, out], of x: [T, in].

    memory: float32 [slots, numbers]; ranks: int32 [slots]. The layer's part of a slot begins at
    rank × offset with A: [rank, width], of which the first `in` columns count; B: [out, rank]
    follows. tiles: int32, TILE for each.
    """
    n_in, n_out = x.shape[1], y.shape[1]
    lora_kernel[(n_tiles, triton.cdiv(n_out, OUTPUTS))](
        x.contiguous(), y, memory, tiles, ranks, memory.stride(0), offset,
        N_IN=n_in, WIDTH=width, N_OUT=n_out, TOKENS=TOKENS, TILE=TILE,
        RANKS=RANKS, INPUTS=INPUTS, OUTPUTS=OUTPUTS, num_stages=STAGES,
    )  # fmt: skip
