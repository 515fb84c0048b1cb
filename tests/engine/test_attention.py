"""The C++ attention kernel equals PyTorch's: ragged batches, scattered blocks, odd sizes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from generate.attention import KernelAttention, PlainAttention
from model import KVCache
from scheduling.inference import Row
from shapes import Shape
from tests.counts import tenth
from tests.oracle import row

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}  # of values around 1; bfloat16 keeps 8 bits
DTYPES = list(TOLERANCE)
KEPT = [(dtype, dtype) for dtype in DTYPES] + [(dtype, torch.int8) for dtype in DTYPES]


def rows_of(
    rng: random.Random, n_rows: int, block_size: int, n_blocks: int, most: int
) -> list[Row]:
    """A ragged batch: decode rows, first chunks and later ones, idle rows without blocks; blocks
    anywhere in the pool.
    """
    free = rng.sample(range(n_blocks), n_blocks)
    rows = []
    for _ in range(n_rows):
        end = rng.choice([1, block_size, block_size + 1, rng.randint(1, most)])
        n_tokens = min(end, rng.choice([1, 1, 1, end, rng.randint(1, 40)]))
        blocks = [free.pop() for _ in range(-(-end // block_size))]
        rows.append(row(end - n_tokens, n_tokens, blocks))
    rows.insert(n_rows // 2, row(0, 1, []))
    return rows


def filled_cache(shape: Shape, n_blocks: int, block_size: int, kept: torch.dtype) -> KVCache:
    """Values around 1 everywhere."""
    cache = KVCache(shape, n_blocks, block_size, kept, "cpu")
    rng = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        if kept == torch.int8:
            layer.random_(-127, 128, generator=rng)
        else:
            layer.normal_(generator=rng)
    for scale in cache.scales or ():
        scale.uniform_(0.005, 0.01, generator=rng)
    return cache


def stored(cache: KVCache) -> list[Tensor]:
    return [*cache.layers, *(cache.scales or ())]


def random_qkv(rows: list[Row], shape: Shape, dtype: torch.dtype) -> Tensor:
    size = sum(row.n_tokens for row in rows), 3, shape.n_head, shape.head_size
    return torch.randn(size, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
@pytest.mark.parametrize(
    ("n_rows", "block_size", "head_size", "most"),
    [
        (1, 16, 64, 1024), (64, 16, 64, 300), (5, 1, 16, 50), (7, 4, 10, 90),
        (3, 64, 128, 200), (3, 3, 64, 100), (2, 16, 256, 300), (4, 1024, 64, 1024),
    ],
)  # fmt: skip
def test_the_attention_kernel_equals_pytorchs(
    dtype: torch.dtype, kept: torch.dtype, n_rows: int, block_size: int, head_size: int, most: int
) -> None:
    shape = Shape(n_layer=2, n_head=3, n_embd=3 * head_size)
    n_blocks = n_rows * (most // block_size + 1) + 1
    for seed in range(tenth(20)):
        rows = rows_of(random.Random(seed), n_rows, block_size, n_blocks, most)
        qkv = random_qkv(rows, shape, dtype)
        ours, plain = (filled_cache(shape, n_blocks, block_size, kept) for _ in range(2))
        kernel, pytorch = KernelAttention(ours).prepare(rows), PlainAttention(plain).prepare(rows)
        for layer in range(shape.n_layer):
            assert (kernel(layer, qkv) - pytorch(layer, qkv)).abs().max() < TOLERANCE[dtype]
        assert all(torch.equal(a, b) for a, b in zip(stored(ours), stored(plain)))


@pytest.mark.parametrize("head_size", [16, 64])
@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
def test_no_bit_depends_on_where_blocks_lie_how_large_they_are_or_how_many_threads_there_are(
    dtype: torch.dtype, kept: torch.dtype, head_size: int, threads: int
) -> None:
    shape = Shape(n_layer=1, n_head=5, n_embd=5 * head_size)
    tokens = torch.randn(300, 3, 5, head_size, generator=torch.Generator().manual_seed(3)).to(dtype)

    def last(block_size: int, scatter: bool) -> Tensor:
        n_blocks = -(-300 // block_size)
        order = random.Random(1).sample(range(n_blocks), n_blocks) if scatter else range(n_blocks)
        attention = KernelAttention(KVCache(shape, n_blocks, block_size, kept, "cpu"))
        for start, n in ((0, 299), (299, 1)):
            y = attention.prepare([row(start, n, list(order))])(0, tokens[start : start + n])
        return y

    found = [last(*where) for where in ((16, False), (16, True), (7, True), (300, False))]
    torch.set_num_threads(8)
    assert all(torch.equal(y, last(16, False)) for y in found)


def test_attention_reads_nothing_but_the_rows_own_live_tokens() -> None:
    shape = Shape(n_layer=1, n_head=2, n_embd=128)
    cache = KVCache(shape, 8, 16, torch.float32, "cpu")
    cache.layers[0].fill_(float("nan"))  # what a former owner left behind
    rows = [row(0, 20, [5, 2]), row(0, 1, [7])]
    attend = KernelAttention(cache).prepare(rows)
    assert attend(0, random_qkv(rows, shape, torch.float32)).isfinite().all()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_the_attention_kernel_reads_its_input_by_its_strides(order: tuple[int, ...]) -> None:
    shape = Shape(n_layer=1, n_head=3, n_embd=48)
    qkv = torch.randn(20, 3, 3, 16)
    strided = qkv.permute(order).contiguous().permute(*[order.index(i) for i in range(4)])
    rows = [row(0, 20, [1, 0])]
    one, other = (
        KernelAttention(KVCache(shape, 2, 16, torch.float32, "cpu")).prepare(rows)(0, x)
        for x in (qkv, strided)
    )
    assert not strided.is_contiguous() and torch.equal(one, other)
