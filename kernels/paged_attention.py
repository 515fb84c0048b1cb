"""Attention over the blocks of the KV cache on a GPU: one launch a layer for all rows.

Rows decode or are in their prompt. A program takes a *tile*, up to QUERIES tokens of one
row, and one head. It reads earlier iterations' keys and values from the row's blocks and new
ones from qkv, and stores those of its own tokens in their blocks, so that no program waits
for another. The softmax runs along with its maximum and sum
(FlashAttention, Dao et al. 2022, section 3.1); blocks are found through a table (vLLM's
PagedAttention, Kwon et al. 2023, section 4.1).

Written in Triton, whose interpreter (TRITON_INTERPRET=1) runs it on a CPU: the tests do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16  # in a tile at most; the least that tensor cores multiply
KEYS = 64  # that a program reads at once
TILE = 8  # integers that describe a tile; three are spare, to keep the next aligned to 16 bytes


@triton.jit
def _accumulate(q, k, v, visible, best, total, y, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Take KEYS more keys and values into the running softmax of each query."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    scores = tl.where(visible, scores, float("-inf"))
    # finite: the first keys of a tile are visible to all its queries
    larger = tl.maximum(best, tl.max(scores, 1))
    fade = tl.exp(best - larger)
    weights = tl.exp(scores - larger[:, None])
    y = y * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return larger, total * fade + tl.sum(weights, 1), y


@triton.jit
def attention_kernel(
    qkv, out, cache, tiles, tables,
    SCALE: tl.constexpr, N_HEAD: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + TILE * tl.program_id(0), tl.program_id(1)
    first, n, cached = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    position, table = tl.load(tile + 3), tl.load(tile + 4)
    if n == 0:
        return
    at, feature = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    valid = (at < n)[:, None] & (feature < HEAD)[None, :]
    token = (first + at).to(tl.int64)
    own = token[:, None] * (3 * N_HEAD * HEAD) + head * HEAD + feature[None, :]
    q = tl.load(qkv + own, mask=valid, other=0.0).to(DTYPE)

    # keep what is new for the next iterations
    keys = cache + head * BLOCK_SIZE * HEAD
    values = keys + N_HEAD * BLOCK_SIZE * HEAD
    home = tl.load(
        tables + table + (position + at) // BLOCK_SIZE, mask=(at < n) & (table >= 0), other=0
    )
    slot = home.to(tl.int64) * (2 * N_HEAD * BLOCK_SIZE) + (position + at) % BLOCK_SIZE
    kept_at = slot[:, None] * HEAD + feature[None, :]
    kept = valid & (table >= 0)
    tl.store(keys + kept_at, tl.load(qkv + own + N_HEAD * HEAD, mask=valid, other=0.0), mask=kept)
    tl.store(
        values + kept_at, tl.load(qkv + own + 2 * N_HEAD * HEAD, mask=valid, other=0.0), mask=kept
    )

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, WIDTH], tl.float32)
    step = tl.arange(0, KEYS)
    for start in range(0, cached, KEYS):
        there = start + step < cached
        block = tl.load(tables + table + (start + step) // BLOCK_SIZE, mask=there, other=0)
        live = block.to(tl.int64) * (2 * N_HEAD * BLOCK_SIZE) + (start + step) % BLOCK_SIZE
        place = live[:, None] * HEAD + feature[None, :]
        known = there[:, None] & (feature < HEAD)[None, :]
        k = tl.load(keys + place, mask=known, other=0.0).to(DTYPE)
        v = tl.load(values + place, mask=known, other=0.0).to(DTYPE)
        best, total, y = _accumulate(q, k, v, there[None, :], best, total, y, SCALE, PRECISION)
    new = position - cached  # tokens of the row that are new and before this tile
    for start in range(0, new + n, KEYS):
        there = start + step < new + n
        row = (first - new + start + step).to(tl.int64)
        place = row[:, None] * (3 * N_HEAD * HEAD) + head * HEAD + feature[None, :]
        known = there[:, None] & (feature < HEAD)[None, :]
        k = tl.load(qkv + place + N_HEAD * HEAD, mask=known, other=0.0).to(DTYPE)
        v = tl.load(qkv + place + 2 * N_HEAD * HEAD, mask=known, other=0.0).to(DTYPE)
        visible = there[None, :] & (start + step[None, :] <= new + at[:, None])
        best, total, y = _accumulate(q, k, v, visible, best, total, y, SCALE, PRECISION)
    answer_at = token[:, None] * (N_HEAD * HEAD) + head * HEAD + feature[None, :]
    tl.store(out + answer_at, (y / total[:, None]).to(out.dtype.element_ty), mask=valid)


def paged_attention(
    qkv: Tensor, cache: Tensor, tiles: Tensor, tables: Tensor, n_tiles: int
) -> Tensor:
    """Return y: [T, H, D] of qkv: [T, 3, H, D], and store the new keys and values in `cache`.

    cache: [blocks, 2, H, block size, D]. tiles: int32, TILE for each tile: its first token in T,
    its tokens (0: nothing to do), the tokens that its row has in the cache, the position of its
    first token, and where its row's blocks begin in `tables`: int32 (-1: it has none, and nothing
    is stored). The tiles must cover T.
    """
    n_tokens, _, n_head, head_size = qkv.shape
    qkv = qkv.contiguous()  # the kernel takes an address and no strides
    out = qkv.new_empty(n_tokens, n_head, head_size)
    dtype = tl.float32 if qkv.dtype == torch.float32 or INTERPRETED else tl.bfloat16
    width = max(16, triton.next_power_of_2(head_size))
    attention_kernel[(n_tiles, n_head)](
        qkv, out, cache, tiles, tables,
        SCALE=head_size**-0.5, N_HEAD=n_head, HEAD=head_size, WIDTH=width,
        BLOCK_SIZE=cache.shape[3], QUERIES=QUERIES, KEYS=KEYS, TILE=TILE,
        DTYPE=dtype, PRECISION="ieee",
    )  # fmt: skip
    return out


# the interpreter multiplies bfloat16 as if they were integers
INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)
