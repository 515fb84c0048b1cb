"""Attention over the blocks of the KV cache on a GPU: one launch a layer for all rows.

Rows decode or are in their prompt. A program takes a *tile*, up to QUERIES tokens of one
row, and one head. It reads earlier iterations' keys and values from the row's blocks and new
ones from qkv, and stores those of its own tokens in their blocks, so that no program waits
for another. The softmax runs along with its maximum and sum
(FlashAttention, Dao et al. 2022, section 3.1); blocks are found through a table (vLLM's
PagedAttention, Kwon et al. 2023, section 4.1).

A program takes KEYS positions at a time from the row's first on, wherever they lie, so that a token
has the same bits in a whole prompt, in any chunk of it, alone or beside other rows.

Written in Triton, whose interpreter (TRITON_INTERPRET=1) runs it on a CPU: the tests do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import dependent, follow, multiplied_as

QUERIES = 16  # in a tile at most; the least that tensor cores multiply
KEYS = 64  # that a program reads at once
TILE = 8  # integers that describe a tile; three are spare, to keep the next aligned to 16 bytes


@triton.jit
def attention_kernel(
    qkv, out, cache, tiles, tables,
    SCALE: tl.constexpr, N_HEAD: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
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
    for start in range(0, position + n, KEYS):
        key = start + step  # positions in the row, of which all queries see the first
        old = key < cached
        block = tl.load(tables + table + key // BLOCK_SIZE, mask=old, other=0)
        place = block.to(tl.int64) * (2 * N_HEAD * BLOCK_SIZE) + key % BLOCK_SIZE
        old_at = place[:, None] * HEAD + feature[None, :]
        row = (first - position + key).to(tl.int64)
        new_at = row[:, None] * (3 * N_HEAD * HEAD) + head * HEAD + feature[None, :]
        k_at = tl.where(old[:, None], keys + old_at, qkv + new_at + N_HEAD * HEAD)
        v_at = tl.where(old[:, None], values + old_at, qkv + new_at + 2 * N_HEAD * HEAD)
        known = (key < position + n)[:, None] & (feature < HEAD)[None, :]
        k = tl.load(k_at, mask=known, other=0.0).to(DTYPE)
        v = tl.load(v_at, mask=known, other=0.0).to(DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        visible = key[None, :] <= position + at[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        fade = tl.exp(best - larger)
        weights = tl.exp(scores - larger[:, None])
        y = y * fade[:, None] + tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        best, total = larger, total * fade + tl.sum(weights, 1)
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
    width = max(16, triton.next_power_of_2(head_size))
    attention_kernel[(n_tiles, n_head)](
        qkv, out, cache, tiles, tables,
        SCALE=head_size**-0.5, N_HEAD=n_head, HEAD=head_size, WIDTH=width,
        BLOCK_SIZE=cache.shape[3], QUERIES=QUERIES, KEYS=KEYS, TILE=TILE,
        DTYPE=multiplied_as(qkv.dtype), DEPENDENT=dependent(), launch_pdl=dependent(),
    )  # fmt: skip
    return out
