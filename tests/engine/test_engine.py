"""Fast equals plain: every mode, batch composition and cache layout gives the oracle's tokens, in
float32.
"""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from config.resolve import onednn_multiplies_bfloat16
from generate.checkpoint import load_model
from generate.naive import NaiveGenerator
from model import GPT2
from scheduling.inference import Generator, Inference, Iteration
from scheduling.policies import Dynamic, NoBatching
from scheduling.sampling import Sampling
from tests.counts import nightly_but
from tests.oracle import N_VOCAB, PATHS, POLICIES, SHAPE, Oracle, engine, row, serve, workload

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.3, top_k=20),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.7, top_k=50, top_p=0.8),
]


@pytest.fixture(params=nightly_but(["plain", "kernels in one call"], PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def greedy(model: GPT2) -> list[list[int]]:
    """The oracle's tokens of workload(14, Sampling())."""
    return serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, Sampling()))


@pytest.mark.parametrize("sampling", nightly_but([SAMPLINGS[0], SAMPLINGS[-1]], SAMPLINGS), ids=str)
def test_every_mode_and_both_generators_give_the_oracles_tokens(
    model: GPT2, sampling: Sampling, path: str
) -> None:
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, sampling))
    kinds = {token for tokens in expected for token in tokens}
    assert len(kinds) > 20, "a model that repeats itself proves little"
    assert max(kinds) < N_VOCAB
    for policy in POLICIES:
        cached = engine(model, 80, 4, path)
        assert serve(policy, cached, workload(14, sampling)) == expected
    assert serve(Dynamic(), NaiveGenerator(model, N_VOCAB), workload(14, sampling)) == expected


@pytest.mark.parametrize(
    ("block_size", "n_blocks", "budget"),
    [
        pytest.param(1, 400, 24, id="1-token blocks"),
        pytest.param(4, 80, 1, id="1-token chunks"),
        pytest.param(16, 20, 7, id="chunks across blocks"),
        pytest.param(64, 5, 1000, id="one block a row"),
        pytest.param(1024, 5, 24, id="Orca's slots"),
        pytest.param(4, 17, 24, id="a tight pool"),
    ],
)
def test_neither_blocks_nor_chunks_change_a_token(
    model: GPT2, greedy: list[list[int]], block_size: int, n_blocks: int, budget: int, path: str
) -> None:
    cached = engine(model, n_blocks, block_size, path)
    limits = {"block_size": block_size, "n_blocks": n_blocks, "token_budget": budget}
    assert serve(Dynamic(), cached, workload(14, Sampling()), **limits) == greedy


def test_the_whole_context_of_1024_tokens_is_usable(model: GPT2, path: str) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(N_VOCAB) for _ in range(1020)]
    pool = {"n_blocks": 64, "block_size": 16, "token_budget": 256}
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), [Inference(prompt, 4)], **pool)
    assert serve(Dynamic(), engine(model, 64, 16, path), [Inference(prompt, 4)], **pool) == expected


def test_padding_rows_change_no_token(model: GPT2, greedy: list[list[int]], path: str) -> None:
    padded: list[int] = []
    cached = engine(model, 80, 4, path)

    class Noting(Generator):
        def generate(self, iteration: Iteration) -> list[int]:
            padded.append(iteration.padding)
            return cached.generate(iteration)

    assert serve(Dynamic(), Noting(), workload(14, Sampling()), decoder_batch_sizes=[5]) == greedy
    assert len(set(padded)) > 2


def test_memory_of_a_kv_block_is_touched_when_it_is_used(model: GPT2, path: str) -> None:
    before = psutil.Process().memory_info().rss
    generator = engine(model, 500_000, 16, path)  # 4 GB of keys and values
    generator.warm_up(max_batch_size=8, token_budget=64, prompt_tokens=64, block_size=16)
    rows = [row(0, 40, [0, 9, 499_999])]
    assert generator.generate(Iteration(rows, running=1, waiting=0, blocks_used=3))
    assert psutil.Process().memory_info().rss - before < 200e6


def test_bfloat16_logits_are_near_float32s(model: GPT2, path: str) -> None:
    if PATHS[path][2] == "onednn" and not onednn_multiplies_bfloat16():
        pytest.skip("oneDNN has no bfloat16 for this processor")
    # bfloat16 keeps 8 bits: logits of size ~20 differ by some tenths
    low = load_model(SHAPE, None, seed=3, dtype=torch.bfloat16, device="cpu")
    low.load_state_dict(model.state_dict())
    rows = [row(0, 30, list(range(8)))]
    expected = engine(model, 8, 4, path).logits(rows)
    difference = engine(low, 8, 4, path).logits(rows).float() - expected
    assert difference.abs().max() < 0.05 * expected.abs().max()
