"""Linear layers on weights and tokens rounded to int8: how near what is served comes to float32,
and that it is the same in every batch.
"""

from __future__ import annotations

import copy

import pytest
import torch

import kernels
from config import ConfigError, build, resolve
from demo.evaluate import bits_of_bytes, causal_logits
from generate import load_generator
from generate.cached import CachedGenerator
from generate.linear import Int8Linear, pack
from generate.norms import KernelAddNorm, fuse_norms
from model import GPT2, Block, load_model
from scheduling.policies import Dynamic, Policy
from tests.app.test_engine import N_VOCAB, POLICIES, serve
from tests.app.test_int8_kv import TEXT, conversations, texts_of
from tests.counts import nightly_but
from weights import locate

# Of demo's held-out text against float32, whose logits have a standard deviation of 7: the largest
# difference, the mean one, and of 1.214 bits per byte; found were 1.05, 0.091 and 0.0007 to
# 0.0009. With one scale a layer instead of one an output they would be 0.98, 0.114 and 0.0019.
LOGITS, MEAN_LOGITS, BITS_PER_BYTE = 1.5, 0.1, 0.0015
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


def test_demo_predicts_nearly_as_well_as_with_float32(demo: GPT2, rounded: GPT2) -> None:
    plain, int8 = (
        bits_of_bytes(model, TEXT[: 8 * CONTEXT + 1], CONTEXT, CONTEXT)[0].mean().item()
        for model in (demo, rounded)
    )
    assert 0 < abs(int8 - plain) < BITS_PER_BYTE
    ids = torch.tensor(list(TEXT[: 8 * CONTEXT])).view(8, CONTEXT)
    positions = torch.arange(CONTEXT).expand(8, -1)
    with torch.inference_mode():
        difference = causal_logits(rounded, ids, positions) - causal_logits(demo, ids, positions)
    assert difference.abs().max() < LOGITS and difference.abs().mean() < MEAN_LOGITS


@pytest.mark.parametrize("kept", nightly_but([torch.int8], [torch.float32, torch.int8]), ids=str)
@pytest.mark.parametrize("policy", nightly_but([POLICIES[1], POLICIES[-1]], POLICIES), ids=str)
def test_texts_are_the_same_in_every_mode_batch_and_chunk_with_prefix_caching_and_without(
    rounded: GPT2, policy: Policy, kept: torch.dtype
) -> None:
    """Greedy, so that the noise of another chunk's or block's order of sums does not show, unless
    it turns a rounding.
    """
    texts = texts_of(rounded, policy, kept)
    assert all(text == texts[0] for text in texts)
    assert len({tuple(text) for text in texts[0]}) > 1


def test_both_come_with_the_settings() -> None:
    """What is served with --linear int8 --kv-dtype int8 is what the parts above make of it."""
    settings = {"model": "demo", "linear": "int8", "kv_dtype": "int8", "kv_cache": "80blocks"}
    config = build("dynamic", settings, {})
    generator = load_generator(config, locate(config), N_VOCAB)
    assert isinstance(generator, CachedGenerator)
    asks = conversations(16, caching=False)
    texts = serve(Dynamic(), generator, asks, block_size=16)
    assert config.multiplied_as == config.kept_as == "int8"
    assert generator.attention.cache.layers[0].dtype == torch.int8
    block = generator.model.h[0]
    assert isinstance(block, Block)
    layers = [block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj]
    assert all(isinstance(each, Int8Linear) for each in (*layers, generator.model.lm_head))
    assert all(len(text) == 20 for text in texts)


def test_where_it_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**settings: str) -> str:
        with pytest.raises(ConfigError) as caught:
            build("dynamic", {"model": "demo", "linear": "int8"} | settings, {})
        return str(caught.value)

    assert refused(generator="naive") == (
        "--linear has no meaning with --generator naive; leave one of them out"
    )
    assert "--linear 'int4': input should be 'kernel', 'int8'" in refused(linear="int4")
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "gpu_is_usable", lambda: True)
        assert refused(device="cuda") == (
            "linear int8 runs on a CPU alone; leave --linear out, or use --device cpu"
        )
    monkeypatch.setattr(kernels, "why_unavailable", lambda: "no C++ compiler 'c++'; install g++")
    assert refused() == (
        "linear int8 cannot be used here: no C++ compiler 'c++'; install g++; or leave --linear out"
    )
