"""The linear layers of the C++ kernels: against PyTorch's and exact sums, on odd sizes; and the
same bits whatever the batch, the threads and the processor they were built for.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from config.shapes import SHAPES, Shape
from generate.attention import KernelAttention
from generate.auto import build
from generate.checkpoint import load_model
from generate.linear import Int8Linear, KernelLinear, OneDNNLinear, pack
from generate.norms import KernelAddNorm, fuse_norms
from generate.weights import DEMO, locate
from model import GPT2, Attend, KVCache, causal_attention
from tests.generate.conftest import FUSED, TILED, built_for
from tests.oracle import row

DTYPES = [torch.float32, torch.bfloat16]
Kind = type[KernelLinear] | type[Int8Linear]
KINDS: list[Kind] = [KernelLinear, Int8Linear]
SIZES = [(256, 768), (64, 64), (65, 1), (1, 63), (130, 257), (48, 144)]


@pytest.mark.parametrize("kind", [KernelLinear, OneDNNLinear])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
def test_a_packed_layer_equals_the_plain_one(
    kind: Any, dtype: torch.dtype, n_in: int, n_out: int, threads: int
) -> None:
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if kind is OneDNNLinear and dtype == torch.bfloat16 and not has_bfloat16:
        pytest.skip("oneDNN has no bfloat16 for this processor")
    generator = torch.Generator().manual_seed(n_in)
    weight = (torch.randn(n_in, n_out, generator=generator) * n_in**-0.5).to(dtype)
    bias = torch.randn(n_out, generator=generator).to(dtype)
    plain, no_bias = kind(weight, bias), kind(weight, None)
    with_gelu = kind(weight, bias, gelu=True)
    for n_tokens in (0, 1, 2, 5, 6, 7, 12, 64, 300):
        x = torch.randn(n_tokens, n_in, generator=generator).to(dtype)
        exact = x.double() @ weight.double()
        gelu = F.gelu(exact + bias, approximate="tanh")
        for layer, expected in (plain, exact + bias), (with_gelu, gelu), (no_bias, exact):
            y = layer(x)
            assert y.shape == expected.shape and y.dtype == dtype
            rtol = 8e-3 if dtype == torch.bfloat16 else 0
            assert torch.allclose(y.double(), expected, rtol=rtol, atol=1e-5)


def test_gelu_stays_finite_for_values_of_any_size() -> None:
    x = torch.tensor([[-1e9], [-300.0], [-9.0], [-1.0], [0.0], [1.0], [9.0], [300.0], [1e9]])
    y = KernelLinear(torch.ones(1, 1), None, gelu=True)(x)
    assert torch.allclose(y, F.gelu(x, approximate="tanh"), atol=1e-6)


def random_layer(
    n_in: int, n_out: int, dtype: torch.dtype, n_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and tokens; some products are subnormal numbers."""
    generator = torch.Generator().manual_seed(n_in)
    weight = torch.randn(n_in, n_out, generator=generator) * n_in**-0.5
    weight[::7] *= 1e-38
    bias, x = (torch.randn(n, generator=generator) for n in ((n_out,), (n_tokens, n_in)))
    return weight.to(dtype), bias.to(dtype), x.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_as_alone_among_any_number_of_others(
    kind: Kind, dtype: torch.dtype, build: str, threads: int
) -> None:
    weight, bias, x = random_layer(200, 300, dtype, 300)
    layer = kind(weight, bias, gelu=True)
    together = layer(x)
    assert all(torch.equal(layer(x[-n:]), together[-n:]) for n in range(1, 300))
    assert torch.equal(layer(x.repeat(7, 1)), together.repeat(7, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("build", FUSED, indirect=True)
@pytest.mark.nightly
def test_every_processor_comes_to_the_same_bits(
    kind: Kind, dtype: torch.dtype, n_in: int, n_out: int, build: str
) -> None:
    for n_tokens in (1, 9, 33):
        weight, bias, x = random_layer(n_in, n_out, dtype, n_tokens)
        result = kind(weight, bias)(x)
        tiled = build in TILED and (kind, dtype) == (KernelLinear, torch.bfloat16)
        with built_for("AMX emulated" if tiled else "AVX2"):
            expected = kind(weight, bias)(x)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("build", sorted(TILED), indirect=True)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
def test_a_tile_adds_first_and_second_numbers_apart(n_in: int, n_out: int, build: str) -> None:
    weight, bias, x = (t.float() for t in random_layer(n_in, n_out, torch.bfloat16, n_tokens=19))
    weight[::7] = 0  # products that AMX takes for zeros
    products = F.pad(x[:, :, None] * weight, (0, 0, 0, -n_in % 32))  # [T, in, out], exact
    sums = bias.expand(19, -1)
    for tile in products.unflatten(1, (-1, 16, 2)).unbind(1):
        parts = torch.zeros(19, 2, n_out)
        for pair in tile.unbind(1):
            parts += pair
        sums = sums + (parts[:, 0] + parts[:, 1])
    y = KernelLinear(weight.bfloat16(), bias.bfloat16())(x.bfloat16())
    assert torch.equal(y, sums.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_int8_layer_is_exact_where_nothing_is_rounded(dtype: torch.dtype, build: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (130, 257), (20, 130)
    weight, x = (torch.randint(-127, 128, size, generator=generator) for size in sizes)
    weight[60], x[:, 70] = 127, -127  # the largest of each output, and of each token
    weight[:, 3], x[5] = 0, 0
    weight, x = weight.to(dtype) / 64, x.to(dtype) / 16
    bias = torch.randn(257, generator=generator).to(dtype)
    exact = x.double() @ weight.double() + bias.double()
    y = Int8Linear(weight, bias)(x)
    rtol = 8e-3 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(y.double(), exact, rtol=rtol, atol=1e-4)
    assert torch.equal(y[5], bias) and torch.equal(y[:, 3], bias[3].expand(20))


def test_an_int8_sum_of_the_largest_products_does_not_overflow(build: str) -> None:
    """6,400 inputs as in gpt2-xl; the bytes' instruction of older processors saturates at two."""
    layer = Int8Linear(torch.full((6400, 70), 1.0), None)
    for sign in (1.0, -1.0):
        assert torch.allclose(layer(torch.full((7, 6400), sign)), torch.tensor(6400 * sign))


def test_a_number_that_is_none_is_not_rounded_away(build: str) -> None:
    layer, x = Int8Linear(torch.ones(64, 70), None), torch.ones(4, 64)
    x[1, 5], x[2, 9] = float("nan"), float("inf")
    assert layer(x).isfinite().all(1).tolist() == [True, False, False, True]


# ---- weights and tokens, keys and values rounded to int8: how near the answers come to float32's

TEXT = (DEMO / "held_out.txt").read_bytes()
# Of demo's held-out text against float32, whose logits have a standard deviation of 7: the largest
# difference, and of 1.214 bits per byte. Measured were 0.13 and 0.0002 for keys and values; for
# weights 1.05, on average 0.091, and 0.0007 to 0.0009. With one scale a layer instead of one an
# output they would be 0.98, 0.114 and 0.0019.
KV_LOGITS, KV_BITS = 0.5, 0.001
LOGITS, MEAN_LOGITS, BITS = 1.5, 0.1, 0.0015
CONTEXT = 512
WINDOWS = [torch.tensor([*TEXT[i : i + CONTEXT + 1]]) for i in range(0, 8 * CONTEXT, CONTEXT)]


def predicted(model: GPT2, attend: Attend) -> tuple[Tensor, float]:
    """Return the logits after each byte of the windows, and bits per byte."""
    positions = torch.arange(CONTEXT)
    with torch.inference_mode():
        logits = torch.cat([model(ids[:-1], positions, attend, positions) for ids in WINDOWS])
    after = torch.cat([ids[1:] for ids in WINDOWS])
    return logits, F.cross_entropy(logits, after).item() / math.log(2)


@pytest.fixture(scope="module")
def demo() -> GPT2:
    config = build("dynamic", {"model": "demo"}, {})
    return load_model(config.shape, locate(config), 0, torch.float32, "cpu")


@pytest.fixture(scope="module")
def rounded(demo: GPT2) -> GPT2:
    model = copy.deepcopy(demo)
    pack(model, "int8")
    fuse_norms(model, KernelAddNorm)
    return model


def test_kept_values_are_within_half_a_step_whatever_the_size_of_the_numbers() -> None:
    cache = KVCache(Shape(n_layer=1, n_head=3, n_embd=30), 4, 5, torch.int8, "cpu")
    kv = torch.randn(20, 2, 3, 10) * 10.0 ** torch.arange(-10, 10)[:, None, None, None]
    kv[7, 1, 2] = 0
    blocks = [2, 0, 3, 1]
    cache.write(0, cache.slots(blocks, 0, 20), kv)
    errors = (cache.read(0, torch.tensor(blocks), 20).permute(2, 0, 1, 3) - kv).abs().amax(-1)
    assert (errors <= kv.abs().amax(-1) / 127 * 0.501).all()


def test_demo_predicts_as_well_with_int8_keys_and_values(demo: GPT2) -> None:
    def kept_as(dtype: torch.dtype) -> Attend:
        cache = KVCache(demo.shape, CONTEXT // 16, 16, dtype, "cpu")
        return KernelAttention(cache).prepare([row(0, CONTEXT, list(range(CONTEXT // 16)))])

    plain, bits = predicted(demo, kept_as(torch.float32))
    logits, int8_bits = predicted(demo, kept_as(torch.int8))
    assert 0 < (logits - plain).abs().max() < KV_LOGITS
    assert abs(int8_bits - bits) < KV_BITS


def test_demo_predicts_nearly_as_well_with_int8_weights(demo: GPT2, rounded: GPT2) -> None:
    plain, bits = predicted(demo, causal_attention)
    logits, int8_bits = predicted(rounded, causal_attention)
    difference = (logits - plain).abs()
    assert 0 < abs(int8_bits - bits) < BITS
    assert difference.max() < LOGITS and difference.mean() < MEAN_LOGITS


def test_the_sizes_of_blocks_and_steps_count_the_scales() -> None:
    both = {"kv_dtype": "int8", "linear": "int8"}
    config = build("dynamic", {"model": "gpt2-medium", "device": "cpu", **both}, {})
    cache = KVCache(config.shape, 2, 16, torch.int8, "cpu")
    assert cache.scales is not None and config.multiplied_as == "int8"
    kept = sum(tensor.nbytes for tensor in (*cache.layers, *cache.scales))
    assert 2 * config.block_bytes == kept
    shape = SHAPES["gpt2"]
    assert shape.step_bytes(0, 0, "int8", "int8") == shape.parameters - shape.n_ctx * shape.n_embd
    linear = 12 * shape.n_layer * shape.n_embd**2  # weights of the layers
    assert shape.weight_bytes("float32", "int8") == 4 * shape.parameters - 3 * linear
    full, rounded = (
        shape.step_bytes(8, 256, "bfloat16", kept) - shape.step_bytes(0, 0, "bfloat16", kept)
        for kept in ("bfloat16", "int8")
    )
    assert full / rounded == 128 / 68
