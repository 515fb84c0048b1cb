"""Weights and tokens, keys and values rounded to int8: how near the answers come to float32's."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from config import build
from demo.evaluate import bits_of_bytes, causal_logits
from generate.attention import KernelAttention
from generate.checkpoint import load_model
from generate.handover import read, write
from generate.linear import pack
from generate.norms import KernelAddNorm, fuse_norms
from generate.swap import HostPool
from model import GPT2, KVCache
from shapes import SHAPES, Shape
from tests.oracle import row
from weights import DEMO, locate

TEXT = (DEMO / "held_out.txt").read_bytes()
# Of demo's held-out text against float32, whose logits have a standard deviation of 7: the largest
# difference, and of 1.214 bits per byte. Measured were 0.13 and 0.0002 for keys and values; for
# weights 1.05, on average 0.091, and 0.0007 to 0.0009. With one scale a layer instead of one an
# output they would be 0.98, 0.114 and 0.0019.
KV_LOGITS, KV_BITS = 0.5, 0.001
LOGITS, MEAN_LOGITS, BITS = 1.5, 0.1, 0.0015
CONTEXT = 512


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


def test_the_host_keeps_steps_besides() -> None:
    cache = KVCache(Shape(n_layer=2, n_head=3, n_embd=30), 4, 5, torch.int8, "cpu")
    kept = [*cache.layers, *(cache.scales or ())]
    for i, tensor in enumerate(kept):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 101 + i)
    first, second = ([tensor[block].clone() for tensor in kept] for block in (0, 2))
    HostPool(cache, 2).copy([(0, 1), (2, 0)], [(1, 3), (0, 0)])
    assert all(map(torch.equal, [tensor[3] for tensor in kept], first))
    assert all(map(torch.equal, [tensor[0] for tensor in kept], second))
    write(cache, [2, 1], read(cache, [3, 0]))
    assert all(map(torch.equal, [tensor[2] for tensor in kept], first))
    assert all(map(torch.equal, [tensor[1] for tensor in kept], second))


def test_demo_predicts_as_well_with_int8_keys_and_values(demo: GPT2) -> None:
    n = CONTEXT
    logits: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [], torch.int8: []}
    bits = dict.fromkeys(logits, 0.0)
    windows = [torch.tensor(list(TEXT[at : at + n + 1])) for at in range(0, 8 * n, n)]
    for kept, ids in itertools.product(logits, windows):
        cache = KVCache(demo.shape, n // 16, 16, kept, "cpu")
        attend = KernelAttention(cache).prepare([row(0, n, list(range(n // 16)))])
        with torch.inference_mode():
            computed = demo(ids[:-1], torch.arange(n), attend, torch.arange(n))
        logits[kept].append(computed)
        bits[kept] += F.cross_entropy(computed, ids[1:]).item() / math.log(2) / len(windows)
    difference = torch.stack(logits[torch.int8]) - torch.stack(logits[torch.float32])
    assert 0 < difference.abs().max() < KV_LOGITS
    assert abs(bits[torch.int8] - bits[torch.float32]) < KV_BITS


def test_demo_predicts_nearly_as_well_with_int8_weights(demo: GPT2, rounded: GPT2) -> None:
    plain, int8 = (
        bits_of_bytes(model, TEXT[: 8 * CONTEXT + 1], CONTEXT, CONTEXT)[0].mean().item()
        for model in (demo, rounded)
    )
    assert 0 < abs(int8 - plain) < BITS
    ids = torch.tensor(list(TEXT[: 8 * CONTEXT])).view(8, CONTEXT)
    positions = torch.arange(CONTEXT).expand(8, -1)
    with torch.inference_mode():
        difference = causal_logits(rounded, ids, positions) - causal_logits(demo, ids, positions)
    assert difference.abs().max() < LOGITS and difference.abs().mean() < MEAN_LOGITS


def test_the_sizes_of_blocks_and_steps_count_the_scales() -> None:
    both = {"kv_dtype": "int8", "linear": "int8"}
    config = build("dynamic", {"model": "gpt2-medium", "device": "cpu", **both}, {})
    assert config.multiplied_as == "int8"
    cache = KVCache(config.shape, 2, 16, torch.int8, "cpu")
    assert cache.scales is not None
    kept = sum(tensor.nbytes for tensor in (*cache.layers, *cache.scales))
    assert 2 * config.block_bytes == kept
    shape = SHAPES["gpt2"]
    assert shape.step_bytes(0, 0, "int8", "int8") == shape.parameters - shape.n_ctx * shape.n_embd
    bfloat16, int8 = (
        shape.step_bytes(8, 256, "bfloat16", kept) - shape.step_bytes(0, 0, "bfloat16", kept)
        for kept in ("bfloat16", "int8")
    )
    assert bfloat16 / int8 == 128 / 68
