"""The C++ attention kernel equals PyTorch's: ragged batches, scattered blocks, odd sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.shapes import Shape
from generate.attention import KernelAttention, PlainAttention
from generate.auto import build
from generate.cached import CachedGenerator
from generate.forward import KernelForward
from generate.linear import KINDS as LINEAR
from generate.linear import KernelLinear
from generate.loading import load_generator
from generate.norms import KernelAddNorm
from generate.weights import locate
from model import AddNorm, KVCache
from scheduling.inference import Inference, Row
from tests.counts import nightly_but, tenth
from tests.oracle import row

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}  # of values around 1; bfloat16 keeps 8 bits
DTYPES = list(TOLERANCE)
KEPT = [(dtype, dtype) for dtype in DTYPES] + [(dtype, torch.int8) for dtype in DTYPES]


def rows_of(
    rng: random.Random, n_rows: int, block_size: int, n_blocks: int, most: int
) -> list[Row]:
    """Decode rows, first chunks, later ones from token 1 on, an idle row; blocks anywhere."""
    free = rng.sample(range(n_blocks), n_blocks)
    rows = []
    for _ in range(n_rows):
        end = rng.choice([1, block_size, block_size + 1, rng.randint(1, most)])
        n_tokens = min(end, rng.choice([1, 1, 1, end, end - 1 or 1, rng.randint(1, 40)]))
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


# ---- the forward pass in one call comes to the bits of the kernels called one by one, of all types

# rows that decode, a first chunk, a later one that samples nothing, an idle row
BATCHES = {
    "one": [row(200, 1, list(range(20, 33)))],
    "many": [row(i, 1, [2 * i, 2 * i + 1]) for i in range(30)],
    "mixed": [
        row(17, 1, [3, 9]),
        row(0, 130, [1, 4, 7, *range(50, 56)]),
        row(16, 11, [8, 6], samples=False),
        row(0, 1, []),
        row(40, 1, [11, 10, 12]),
    ],
    "no samples": [row(0, 20, [1, 2], samples=False)],
}


def folder(path: Path, width: int) -> str:
    """A model of two heads."""
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": width, "vocab_size": 300, "n_positions": 256}
    path.joinpath("config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    return str(path)


def loaded(model: str, **settings: str) -> CachedGenerator:
    given = {"model": model, "weights": "random", "tokenizer": "bytes", "device": "cpu"}
    config = build("dynamic", given | {"dtype": "float32", "kv_cache": "70blocks"} | settings, {})
    generator = load_generator(config, locate(config), 257)
    assert isinstance(generator, CachedGenerator)
    return generator


def computed(generator: CachedGenerator, one_call: Any, rows: list[Row]) -> tuple[Tensor, Any]:
    """Return the logits, and the tensors of the cache after them."""
    cache, rng = generator.attention.cache, torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.randint(-2, 3, layer.shape, generator=rng))
    for scale in cache.scales or ():
        scale.uniform_(0.5, 1, generator=rng)
    generator.one_call = one_call
    logits = generator.logits(rows).clone()
    return logits, [tensor.clone() for tensor in stored(cache)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("linear", ["kernel", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", nightly_but([128], [32, 128]))  # heads of 16 and of 64
def test_one_call_comes_to_the_bits_of_many_and_of_each_row_alone(
    width: int, dtype: str, linear: str, kv_dtype: str, batch: str, threads: int, tmp_path: Path
) -> None:
    generator = loaded(folder(tmp_path, width), dtype=dtype, linear=linear, kv_dtype=kv_dtype)
    torch.set_num_threads(threads)
    one_call = generator.one_call
    assert isinstance(one_call, KernelForward)
    assert type(generator.model.lm_head) is LINEAR[linear]
    assert (generator.attention.cache.scales is None) == (kv_dtype == "auto")
    logits, kept = computed(generator, one_call, BATCHES[batch])
    expected, also_kept = computed(generator, None, BATCHES[batch])
    assert torch.equal(logits, expected) and len(logits) == sum(r.samples for r in BATCHES[batch])
    assert all(torch.equal(a, b) for a, b in zip(kept, also_kept))
    for alone, expected in zip((each for each in BATCHES[batch] if each.samples), logits):
        assert torch.equal(computed(generator, one_call, [alone])[0][0], expected)


@pytest.mark.parametrize("ids", [[-1, 5], [5, 300]])
def test_ids_that_the_model_has_not_are_refused(ids: list[int], tmp_path: Path) -> None:
    generator = loaded(folder(tmp_path, 32), linear="kernel")
    rows = [Row(Inference(ids, 1), 0, 2, [1], samples=True, idle=False)]
    for one_call in (generator.one_call, None):
        with pytest.raises(IndexError):
            computed(generator, one_call, rows)
    assert computed(generator, None, BATCHES["one"])[0].isfinite().all()


def test_it_is_taken_where_every_part_is_a_kernel(tmp_path: Path) -> None:
    """Layers of odd widths are called one by one: their inputs are filled up with zeros between."""
    model = folder(tmp_path, 64)
    assert isinstance(loaded(model, linear="kernel").one_call, KernelForward)
    for other in ({"linear": "onednn"}, {"attention": "plain"}):
        assert loaded(model, **{"linear": "kernel", **other}).one_call is None
    odd = folder(tmp_path, 48)
    ours, plain = loaded(odd, linear="kernel"), loaded(odd, kernels="plain")
    assert ours.one_call is None
    logits, expected = (computed(each, None, BATCHES["mixed"])[0] for each in (ours, plain))
    assert torch.allclose(logits, expected, atol=1e-4)


# ---- kernels of additions and norms equal PyTorch's, on odd sizes and values of any size

# of values around 1; bfloat16: one step of its 8 bits between 2 and 4
OF_NORMS = {torch.float32: 4e-6, torch.bfloat16: 2**-6}


def plain_norm(width: int, dtype: torch.dtype) -> AddNorm:
    """A norm with weights that are all different."""
    norm = AddNorm(width, 1e-5).requires_grad_(False)
    norm.weight.normal_(1, 0.3, generator=torch.Generator().manual_seed(width))
    norm.bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(width + 1))
    return norm.to(dtype)


def two(n_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_rows)
    x, y = torch.randn(2, n_rows, width, generator=generator).to(dtype)
    return x, y


def check(norm: AddNorm, x: Tensor, y: Tensor) -> None:
    """The sum to the bit, and its norm as float64 has it."""
    total, normed = KernelAddNorm(norm)(x, y)
    assert torch.equal(total, x + y) and total.dtype == normed.dtype == x.dtype
    exact = AddNorm(norm.normalized_shape, norm.eps).requires_grad_(False).double()
    exact.load_state_dict(norm.state_dict())
    _, expected = exact((x + y).double(), torch.zeros(()))
    assert normed.shape == expected.shape
    # in parts of the largest value of each row
    wrong = (normed.double() - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(1)
    assert (wrong < OF_NORMS[x.dtype]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 15, 16, 17, 63, 100, 768, 1025])
def test_the_norm_kernel_equals_pytorchs_norm(dtype: torch.dtype, width: int, threads: int) -> None:
    norm = plain_norm(width, dtype)
    for n_rows in (0, 1, 2, 3, 7, 64, 300):
        check(norm, *two(n_rows, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_any_size_are_normed(dtype: torch.dtype) -> None:
    """Also a small variance on a large mean, which sums of squares lose, and no variance at all."""
    norm, (x, y) = plain_norm(768, dtype), two(5, 768, dtype)
    for size in (0.0, 1e-30, 1e-4, 1e4, 1e15):
        check(norm, x * size, y * size)
    x, _ = two(3, 768, dtype)
    check(norm, torch.full_like(x, 256.0), (2 * x).round())
    for value in (0.0, 3.0, -1024.0):
        constant = torch.full((2, 768), value, dtype=dtype)
        assert torch.equal(KernelAddNorm(norm)(constant, constant)[1], norm.bias.expand(2, 768))


def test_values_that_are_no_numbers_stay_in_their_row() -> None:
    norm = KernelAddNorm(plain_norm(768, torch.float32))
    x, y = two(4, 768, torch.float32)
    before = norm(x, y)
    x[1, 5], x[2, 700] = torch.nan, torch.inf
    assert all(torch.equal(a[[0, 3]], b[[0, 3]]) for a, b in zip(norm(x, y), before))


def attended(qkv: Tensor) -> Tensor:
    cache = KVCache(Shape(n_layer=1, n_head=3, n_embd=48), 2, 16, torch.float32, "cpu")
    return KernelAttention(cache).prepare([row(0, 20, [1, 0])])(0, qkv)


def linear(x: Tensor) -> Tensor:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    return KernelLinear(weight, None)(x)


def normed(x: Tensor) -> Tensor:
    total, y = KernelAddNorm(plain_norm(48, torch.float32))(x, x.flip(0))
    return torch.cat([total, y])


STRIDED = [torch.randn(48, 30).T, torch.randn(60, 96)[::2, ::2], torch.randn(1, 48).expand(30, 48)]


@pytest.mark.parametrize(("kernel", "x"), [
    (attended, torch.randn(3, 20, 3, 16).transpose(0, 1)),
    (attended, torch.randn(20, 3, 3, 16).transpose(1, 2)),
    (attended, torch.randn(20, 3, 16, 3).transpose(2, 3)),
    *((kernel, x) for kernel in (linear, normed) for x in STRIDED),
], ids=lambda each: getattr(each, "__name__", "x"))  # fmt: skip
def test_kernels_read_their_inputs_by_their_strides(kernel: Any, x: Tensor) -> None:
    before = x.clone()
    assert not x.is_contiguous() and torch.equal(kernel(x), kernel(x.contiguous()))
    assert torch.equal(x, before)
