"""Attention over the blocks of the KV cache on a GPU: one launch a layer for all rows.

Rows decode or are in their prompt. A program takes a *tile*, up to QUERIES tokens of one
row, and one head. It reads earlier iterations' keys and values from the row's blocks and new
ones from qkv, and stores those of its own tokens in their blocks, so that no program waits
for another. The softmax runs along with its maximum and sum
(FlashAttention, Dao et al. 2022, section 3.1); blocks are found through a table (vLLM's
PagedAttention, Kwon et al. 2023, section 4.1).

A program takes a *round* of KEYS positions at a time, from the row's first on, wherever they lie.
Each round has its own maximum and sum, and is added to those before it. So a token has the same
bits in a whole prompt, in any chunk of it, alone or beside other rows.

Few tokens would leave most of a GPU idle. Then several programs share a row's rounds, and the last
one to end adds all rounds in the same order (Flash-Decoding, Dao et al. 2023, with a counter in
place of a second launch). The bits are the same again, whichever program is the last.

Written in Triton, whose interpreter (TRITON_INTERPRET=1) runs it on a CPU: the tests do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from generate.kernels.launches import dependent, follow, multiplied_as

QUERIES = 16  # in a tile at most; the least that tensor cores multiply
KEYS = 64  # keys that a round reads
PROGRAMS = 256  # that share rows at most: two for each multiprocessor
TILE = 8  # integers that describe a tile; three are spare, to keep the next aligned to 16 bytes


@triton.jit
def merge(best, total, y, new_best, new_total, new_y):
    """Add a round to those before it. As fma, so that no compiler chooses where to round."""
    larger = tl.maximum(best, new_best)
    fade, grow = tl.exp(best - larger), tl.exp(new_best - larger)
    y = tl.fma(y, tl.broadcast_to(fade[:, None], y.shape), new_y * grow[:, None])
    return larger, tl.fma(total, fade, new_total * grow), y


@triton.jit
def attention_kernel(
    qkv, out, cache, tiles, tables, parts, arrived,
    SCALE: tl.constexpr, N_HEAD: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    MOST: tl.constexpr, SPLIT: tl.constexpr,
    DTYPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + TILE * tl.program_id(0), tl.program_id(1)
    first, n, cached = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    position, table = tl.load(tile + 3), tl.load(tile + 4)
    follow(DEPENDENT)  # none but the host writes tiles and tables
    rounds = tl.cdiv(position + n, KEYS)
    each = tl.cdiv(rounds, tl.num_programs(2))
    begin = tl.program_id(2) * each
    if begin >= rounds:  # as in a tile with nothing to do
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
    kept = valid & (table >= 0) & (begin == 0)
    tl.store(keys + kept_at, tl.load(qkv + own + N_HEAD * HEAD, mask=valid, other=0.0), mask=kept)
    tl.store(
        values + kept_at, tl.load(qkv + own + 2 * N_HEAD * HEAD, mask=valid, other=0.0), mask=kept
    )

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, WIDTH], tl.float32)
    part_at = parts + (token * N_HEAD + head) * MOST * (WIDTH + 4)
    step = tl.arange(0, KEYS)
    for round in range(begin, tl.minimum(begin + each, rounds)):
        key = round * KEYS + step  # positions in the row, of which all queries see the first
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
        scores = tl.where(visible, scores, -1e30)  # finite: a query may see none of the round
        new_best = tl.max(scores, 1)
        weights = tl.exp(scores - new_best[:, None])
        new_total, new_y = tl.sum(weights, 1), tl.dot(weights.to(DTYPE), v, input_precision="ieee")
        if SPLIT and rounds > each:
            here = part_at + round * (WIDTH + 4)
            tl.store(here[:, None] + feature[None, :], new_y, mask=valid)
            tl.store(here + WIDTH, new_best, mask=at < n)
            tl.store(here + WIDTH + 1, new_total, mask=at < n)
        best, total, y = merge(best, total, y, new_best, new_total, new_y)
    if SPLIT and rounds > each:
        tl.debug_barrier()  # all threads have stored their parts
        counter = arrived + tl.program_id(0) * N_HEAD + head
        if tl.atomic_add(counter, 1) < tl.cdiv(rounds, each) - 1:
            return
        tl.store(counter, 0)  # for the next launch
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        y = tl.zeros([QUERIES, WIDTH], tl.float32)
        for round in tl.range(0, rounds, num_stages=6):  # loads ahead
            here = part_at + round * (WIDTH + 4)
            new_y = tl.load(here[:, None] + feature[None, :], mask=valid, other=0.0)
            new_best = tl.load(here + WIDTH, mask=at < n, other=0.0)
            new_total = tl.load(here + WIDTH + 1, mask=at < n, other=1.0)
            best, total, y = merge(best, total, y, new_best, new_total, new_y)
    answer_at = token[:, None] * (N_HEAD * HEAD) + head * HEAD + feature[None, :]
    tl.store(out + answer_at, (y / total[:, None]).to(out.dtype.element_ty), mask=valid)


def shared(cache: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the memory in which programs share rows of up to `longest` tokens: of each round y,
    maximum and sum, float32 [tokens × H, rounds, width + 4], and how many programs of a tile and
    head have ended, int32 [tokens × H], 0 between launches. cache: see `paged_attention`.
    """
    # where there are more tokens × H, not even two programs share a row
    size = PROGRAMS // 2, triton.cdiv(longest, KEYS), _width(cache.shape[4]) + 4
    parts = torch.empty(size, dtype=torch.float32, device=cache.device)
    return parts, torch.zeros(size[0], dtype=torch.int32, device=cache.device)


def _width(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


def tuned(dtype: torch.dtype, shares: bool) -> dict[str, int]:
    """Return warps and stages of a program; shares: a row with others.

    A sum over a round goes by warps, so they are as many where rows are shared: with two alone and
    eight that share, 57% of a burst had the same text alone (H200, 2026-11-27).
    """
    warps = 8 if dtype == torch.float32 else 4  # in float32, registers of fewer spill
    return {"num_warps": warps, "num_stages": 3 if shares else 2}


def paged_attention(
    qkv: Tensor, cache: Tensor, tiles: Tensor, tables: Tensor, n_tiles: int,
    parts: Tensor, arrived: Tensor,
) -> Tensor:  # fmt: skip
    """Return y: [T, H, D] of qkv: [T, 3, H, D], and store the new keys and values in `cache`.

    cache: [blocks, 2, H, block size, D]. tiles: int32, TILE for each tile: its first token in T,
    its tokens (0: nothing to do), the tokens that its row has in the cache, the position of its
    first token, and where its row's blocks begin in `tables`: int32 (-1: it has none, and nothing
    is stored). The tiles must cover T. parts, arrived: see `shared`. How many programs share a
    row depends on T, H and parts alone, so that a captured launch holds for any row.
    """
    n_tokens, _, n_head, head_size = qkv.shape
    qkv = qkv.contiguous()  # the kernel takes an address and no strides
    out = qkv.new_empty(n_tokens, n_head, head_size)
    most = parts.shape[1]
    n_programs = max(1, min(PROGRAMS // (n_tokens * n_head), most))
    attention_kernel[(n_tiles, n_head, n_programs)](
        qkv, out, cache, tiles, tables, parts, arrived,
        SCALE=head_size**-0.5, N_HEAD=n_head, HEAD=head_size, WIDTH=_width(head_size),
        BLOCK_SIZE=cache.shape[3], QUERIES=QUERIES, KEYS=KEYS, TILE=TILE,
        MOST=most, SPLIT=n_programs > 1, DTYPE=multiplied_as(qkv.dtype), DEPENDENT=dependent(),
        launch_pdl=dependent(), **tuned(qkv.dtype, n_programs > 1),
    )  # fmt: skip
    return out
