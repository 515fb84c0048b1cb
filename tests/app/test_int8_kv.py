"""Keys and values kept as int8: how near what is served comes to float32, and what it saves."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.nn import functional as F

from config import ConfigError, build, resolve
from generate.attention import KernelAttention, PlainAttention
from generate.cached import CachedGenerator
from generate.sampling import sample_on_cpu
from model import GPT2, KVCache, load_model
from scheduling.inference import Inference, Row
from scheduling.policies import Policy
from scheduling.prefix_cache import block_keys
from shapes import SHAPES, Shape
from tests.app.test_engine import N_VOCAB, POLICIES, serve
from tests.counts import nightly_but
from weights import DEMO, locate

# Of demo's held-out text against float32, whose logits have a standard deviation of 7; found were
# 0.13 and 0.0002.
LOGITS, BITS_PER_BYTE = 0.5, 0.001
TEXT = (DEMO / "held_out.txt").read_bytes()


@pytest.fixture(scope="module")
def demo() -> GPT2:
    config = build("dynamic", {"model": "demo"}, {})
    return load_model(config.shape, locate(config), 0, torch.float32, "cpu")


def test_what_is_kept_is_within_half_a_step_whatever_the_size_of_the_numbers() -> None:
    shape = Shape(n_layer=1, n_head=3, n_embd=30)
    cache = KVCache(shape, 4, 5, torch.int8, "cpu")
    kv = torch.randn(20, 2, 3, 10) * 10.0 ** torch.arange(-10, 10)[:, None, None, None]
    kv[7, 1, 2] = 0
    blocks = [2, 0, 3, 1]
    cache.write(0, cache.slots(blocks, 0, 20), kv)
    errors = (cache.read(0, torch.tensor(blocks), 20).permute(2, 0, 1, 3) - kv).abs().amax(-1)
    assert (errors <= kv.abs().amax(-1) / 127 * 0.501).all()


@pytest.mark.parametrize("attention", [PlainAttention, KernelAttention])
def test_demo_predicts_as_well_as_with_float32(
    demo: GPT2, attention: type[PlainAttention] | type[KernelAttention]
) -> None:
    n = 512
    logits: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [], torch.int8: []}
    bits = dict.fromkeys(logits, 0.0)
    windows = [torch.tensor(list(TEXT[at : at + n + 1])) for at in range(0, 8 * n, n)]
    for kept, ids in itertools.product(logits, windows):
        cache = KVCache(demo.shape, n // 16, 16, kept, "cpu")
        row = Row(Inference([0] * n, 1), 0, n, list(range(n // 16)), samples=True, idle=False)
        attend = attention(cache).prepare([row])
        with torch.inference_mode():
            found = demo(ids[:-1], torch.arange(n), attend, torch.arange(n))
        logits[kept].append(found)
        bits[kept] += F.cross_entropy(found, ids[1:]).item() / math.log(2) / len(windows)
    difference = torch.stack(logits[torch.int8]) - torch.stack(logits[torch.float32])
    assert 0 < difference.abs().max() < LOGITS
    assert abs(bits[torch.int8] - bits[torch.float32]) < BITS_PER_BYTE


def conversations(block_size: int, caching: bool) -> list[Inference]:
    """Prompts of the held-out text, some that begin alike."""
    rng = random.Random(2)
    prompts = []
    for i in range(9):
        at, n = 1000 * (i % 3), 30 + rng.randrange(60)
        prompts.append(list(TEXT[at : at + n]))
    return [
        Inference(ids, 20, keys=block_keys(ids, block_size) if caching else None) for ids in prompts
    ]


def texts_of(model: GPT2, policy: Policy, kept: torch.dtype) -> list[list[list[int]]]:
    """What is answered in several batches, chunks and blocks, with caching and without."""
    texts = []
    for block_size, budget, rows, caching in (
        (16, 256, 1, False),
        (16, 256, 5, False),
        (16, 13, 3, False),
        (16, 40, 3, True),
        (4, 256, 9, True),
    ):
        asks = conversations(block_size, caching)
        cache = KVCache(model.shape, 120, block_size, kept, "cpu")
        generator = CachedGenerator(model, N_VOCAB, KernelAttention(cache), sample_on_cpu, 300)
        limits = {"max_batch_size": rows, "token_budget": budget, "n_blocks": 120}
        texts.append(serve(policy, generator, asks, block_size=block_size, **limits))
        assert bool(sum(ask.cached_tokens for ask in asks)) == caching
    return texts


@pytest.mark.parametrize("policy", nightly_but([POLICIES[1], POLICIES[-1]], POLICIES), ids=str)
def test_texts_are_the_same_in_every_mode_batch_and_chunk_with_prefix_caching_and_without(
    demo: GPT2, policy: Policy
) -> None:
    """Greedy. What is kept of a token depends on the token alone, and a chunk reads its own tokens
    as they are kept, too.
    """
    texts = texts_of(demo, policy, torch.int8)
    assert all(text == texts[0] for text in texts)


def test_a_pool_of_so_many_bytes_holds_more_blocks() -> None:
    for dtype, least in (("bfloat16", 1.85), ("float32", 3.7)):
        settings = {"model": "gpt2-medium", "dtype": dtype, "device": "cpu", "kv_cache": "0.5GB"}
        auto, int8 = (
            build("dynamic", settings | {"kv_dtype": kept}, {}) for kept in ("auto", "int8")
        )
        assert int8.n_blocks / auto.n_blocks > least
        cache = KVCache(auto.shape, 2, 16, torch.int8, "cpu")
        assert cache.scales is not None
        kept = sum(tensor.nbytes for tensor in (*cache.layers, *cache.scales))
        assert 2 * int8.block_bytes == kept


def test_where_it_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**settings: str) -> str:
        with pytest.raises(ConfigError) as caught:
            build("dynamic", {"model": "demo", "kv_dtype": "int8"} | settings, {})
        return str(caught.value)

    assert refused(generator="naive") == (
        "--kv-dtype has no meaning with --generator naive; leave one of them out"
    )
    assert refused(kv_dtype="int4") == "--kv-dtype 'int4': input should be 'auto' or 'int8'"
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    assert refused(device="cuda") == (
        "kv_dtype int8 runs on a CPU alone; leave --kv-dtype out, or use --device cpu"
    )


def test_a_step_reads_fewer_bytes() -> None:
    shape = SHAPES["gpt2"]
    of_keys = [
        shape.step_bytes(8, 256, "bfloat16", kept) - shape.step_bytes(0, 0, "bfloat16", kept)
        for kept in ("bfloat16", "int8")
    ]
    assert of_keys[0] / of_keys[1] == 128 / 68
