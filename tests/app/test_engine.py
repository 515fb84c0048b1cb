"""Fast equals plain: every mode, batch composition and cache layout gives the oracle's tokens, in
float32.

Rounding may decide a near-tie either way, so the oracle also checks that every decision here has a
margin.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from config.resolve import onednn_multiplies_bfloat16
from generate.attention import Attention, KernelAttention, PlainAttention
from generate.cached import CachedGenerator
from generate.forward import KernelForward
from generate.linear import pack
from generate.naive import NaiveGenerator
from generate.norms import KernelAddNorm, fuse_norms
from generate.sampling import ALL, Sample, _largest, _nucleus, sample, sample_on_cpu, uniform
from model import GPT2, KVCache, load_model
from scheduling.inference import Generator, Inference, Iteration, Row, Sampling
from scheduling.policies import Dynamic, NoBatching, Policy, Static, Windowed
from shapes import Shape
from simulate import drive
from tests.counts import nightly_but
from tests.virtual import make_scheduler

SHAPE = Shape(n_layer=2, n_head=2, n_embd=32, n_ctx=1024, vocab_size=300)
N_VOCAB = 257  # the tokenizer has fewer ids than the model
MARGIN = 1e-5
POLICIES: list[Policy] = [
    NoBatching(),
    Static(),
    Static(compact_batches=True),
    Windowed(max_batch_delay_ms=3000, batch_size_target=2),
    Dynamic(),
]


@pytest.fixture(scope="module")
def model() -> GPT2:
    model = load_model(SHAPE, None, seed=3, dtype=torch.float32, device="cpu")
    return enliven(model)


PATHS: dict[str, tuple[Callable[[KVCache], Attention], Sample, str]] = {
    "plain": (PlainAttention, sample, "plain"),
    "kernels": (KernelAttention, sample_on_cpu, "kernel"),
    "kernels in one call": (KernelAttention, sample_on_cpu, "kernel"),
    "kernels and onednn": (KernelAttention, sample_on_cpu, "onednn"),
}
MAX_TOKENS = 1100


def engine(
    model: GPT2, n_blocks: int, block_size: int, path: str = "kernels in one call"
) -> CachedGenerator:
    attend, sampler, linear = PATHS[path]
    if linear != "plain":
        model = copy.deepcopy(model)
        pack(model, linear)
        fuse_norms(model, KernelAddNorm)
    cache = KVCache(model.shape, n_blocks, block_size, model.wte.weight.dtype, "cpu")
    attention = attend(cache)
    generator = CachedGenerator(model, N_VOCAB, attention, sampler, MAX_TOKENS)
    if path == "kernels in one call":
        assert isinstance(attention, KernelAttention)
        generator.one_call = KernelForward(model, attention)
    return generator


@pytest.fixture(params=nightly_but(["plain", "kernels in one call"], PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def enliven(model: GPT2) -> GPT2:
    """Make the blocks matter: random weights of the usual size repeat the last token for ever."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            parameter.mul_(12)
    model.get_parameter("ln_f.weight").mul_(20)
    return model


def workload(n: int, sampling: Sampling, longest_prompt: int = 40) -> list[Inference]:
    rng = random.Random(5)
    return [
        Inference(
            [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, longest_prompt))],
            rng.randint(1, 20),
            replace(sampling, seed=i),
        )
        for i in range(n)
    ]


def serve(
    policy: Policy, generator: Generator, inferences: Sequence[Inference], **limits: Any
) -> list[list[int]]:
    defaults: dict[str, Any] = {
        "max_batch_size": 5,
        "token_budget": 24,
        "n_blocks": 80,
        "block_size": 4,
    }
    scheduler = make_scheduler(policy, **(defaults | limits))
    two_an_iteration = [(float(i // 2), [inference]) for i, inference in enumerate(inferences)]
    drive(scheduler, two_an_iteration, lambda _: 1.0, generator.generate)
    assert scheduler.pool.free_blocks == scheduler.pool.n_blocks
    return [inference.tokens for inference in inferences]


class Oracle(NaiveGenerator):
    """The naive generator, which also checks that no decision hangs on rounding noise."""

    def generate(self, iteration: Iteration) -> list[int]:
        for row in iteration.rows:
            if row.samples and not row.idle:
                logits = self.logits(row.inference, row.start + row.n_tokens)[0, :N_VOCAB]
                sampling, index = row.inference.sampling, len(row.inference.tokens)
                if sampling.temperature == 0:
                    best, second = logits.topk(2).values
                    assert best - second > MARGIN, (
                        "choose another seed: this decision is a near-tie"
                    )
                else:
                    scaled = restricted(
                        logits / sampling.temperature, sampling.top_k, sampling.top_p
                    )
                    edges = scaled.double().softmax(-1).cumsum(-1)
                    distance = (edges - uniform(sampling.seed, index)).abs().min()
                    assert distance > 1e-7, "choose another seed: this draw is a near-tie"
        return super().generate(iteration)


def restricted(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """One row through the batch's function."""
    n = logits.numel()
    k, p = (
        torch.tensor([min(top_k or n, n)]),
        torch.tensor([ALL if top_p in (None, 1.0) else top_p], dtype=torch.float64),
    )
    return _nucleus(_largest(logits[None], k, int(k)), p)[0]


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.3, top_k=20),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.7, top_k=50, top_p=0.8),
]


@pytest.mark.parametrize("sampling", nightly_but([SAMPLINGS[0], SAMPLINGS[-1]], SAMPLINGS), ids=str)
def test_every_mode_and_both_generators_give_the_oracles_tokens(
    model: GPT2, sampling: Sampling, path: str
) -> None:
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, sampling))
    assert len({token for tokens in expected for token in tokens}) > 20, (
        "a model that repeats itself proves little"
    )
    assert max(token for tokens in expected for token in tokens) < N_VOCAB
    for policy in POLICIES:
        cached = engine(model, 80, 4, path)
        assert serve(policy, cached, workload(14, sampling)) == expected
    assert serve(Dynamic(), NaiveGenerator(model, N_VOCAB), workload(14, sampling)) == expected


@pytest.mark.parametrize(
    ("block_size", "n_blocks", "budget"),
    [(1, 400, 24), (4, 80, 1), (16, 20, 7), (64, 5, 1000), (1024, 5, 24), (4, 17, 24)],
    ids=[
        "1-token blocks",
        "1-token chunks",
        "chunks across blocks",
        "one block a row",
        "Orca's slots",
        "a tight pool",
    ],
)
def test_neither_blocks_nor_chunks_change_a_token(
    model: GPT2, block_size: int, n_blocks: int, budget: int, path: str
) -> None:
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, Sampling()))
    cached = engine(model, n_blocks, block_size, path)
    limits = {"block_size": block_size, "n_blocks": n_blocks, "token_budget": budget}
    assert serve(Dynamic(), cached, workload(14, Sampling()), **limits) == expected


def test_scattered_blocks_give_the_same_logits_as_consecutive_ones(model: GPT2, path: str) -> None:
    inference = Inference(list(range(40)), 5)
    together = engine(model, 40, 4, path)
    apart = engine(model, 40, 4, path)
    for start, n in ((0, 17), (17, 22), (39, 1)):
        one = together.logits([Row(inference, start, n, list(range(10)), samples=True, idle=False)])
        other = apart.logits(
            [Row(inference, start, n, list(range(1, 31, 3)), samples=True, idle=False)]
        )
        assert torch.allclose(one, other, atol=1e-5)


def test_a_freed_block_leaves_no_trace_of_its_former_owner(model: GPT2, path: str) -> None:
    first, second = workload(2, Sampling())
    second.prompt_ids, second.num_tokens = second.prompt_ids[:3], 4
    fresh = serve(NoBatching(), engine(model, 20, 4, path), [replace_(second)])
    used = engine(model, 20, 4, path)
    assert serve(NoBatching(), used, [first, replace_(second)])[1:] == fresh


def replace_(inference: Inference) -> Inference:
    return Inference(inference.prompt_ids, inference.num_tokens, inference.sampling)


def test_the_whole_context_of_1024_tokens_is_usable(model: GPT2, path: str) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(N_VOCAB) for _ in range(1020)]
    expected = serve(
        NoBatching(), Oracle(model, N_VOCAB), [Inference(prompt, 4)], n_blocks=64, block_size=16
    )
    cached = engine(model, 64, 16, path)
    assert (
        serve(
            Dynamic(), cached, [Inference(prompt, 4)], n_blocks=64, block_size=16, token_budget=256
        )
        == expected
    )


def test_an_idle_row_without_blocks_is_computed_and_writes_nothing(model: GPT2, path: str) -> None:
    live, gone = Inference([5, 6, 7], 2), Inference([8], 1, tokens=[9])
    generator = engine(model, 2, 4, path)
    alone = generator.logits([Row(live, 0, 3, [0], samples=True, idle=False)])
    beside = generator.logits(
        [
            Row(gone, 0, 1, [], samples=True, idle=True),
            Row(live, 0, 3, [0], samples=True, idle=False),
        ]
    )
    assert torch.allclose(alone[0], beside[1], atol=1e-5) and beside.isfinite().all()


def test_padding_rows_change_no_token(model: GPT2, path: str) -> None:
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, Sampling()))
    padded: list[int] = []
    cached = engine(model, 80, 4, path)

    class Noting(Generator):
        def generate(self, iteration: Iteration) -> list[int]:
            padded.append(iteration.padding)
            return cached.generate(iteration)

    assert serve(Dynamic(), Noting(), workload(14, Sampling()), decoder_batch_sizes=[5]) == expected
    assert len(set(padded)) > 2


def test_warm_up_leaves_a_usable_engine(model: GPT2, path: str) -> None:
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), workload(4, Sampling()))
    cached = engine(model, 80, 4, path)
    cached.warm_up(max_batch_size=5, token_budget=60, prompt_tokens=24, block_size=4)
    assert serve(Dynamic(), cached, workload(4, Sampling())) == expected


def test_memory_of_a_kv_block_is_touched_when_it_is_used(model: GPT2, path: str) -> None:
    before = psutil.Process().memory_info().rss
    generator = engine(model, 500_000, 16, path)  # 4 GB of keys and values
    generator.warm_up(max_batch_size=8, token_budget=64, prompt_tokens=64, block_size=16)
    assert generator.generate(
        Iteration([Row(Inference([1] * 40, 1), 0, 40, [0, 9, 499_999], True, False)], 1, 0, 3)
    )
    assert psutil.Process().memory_info().rss - before < 200e6


def test_bfloat16_logits_are_near_float32s(model: GPT2, path: str) -> None:
    if PATHS[path][2] == "onednn" and not onednn_multiplies_bfloat16():
        pytest.skip("oneDNN has no bfloat16 for this processor")
    # bfloat16 keeps 8 bits: logits of size ~20 differ by some tenths
    low = load_model(SHAPE, None, seed=3, dtype=torch.bfloat16, device="cpu")
    low.load_state_dict(model.state_dict())
    row = Row(Inference(list(range(30)), 1), 0, 30, list(range(8)), samples=True, idle=False)
    expected = engine(model, 8, 4, path).logits([row])
    found = engine(low, 8, 4, path).logits([row]).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


# ---- sampling alone


@pytest.fixture(params=[sample, sample_on_cpu])
def sampler(request: pytest.FixtureRequest) -> Sample:
    function: Sample = request.param
    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 6.0], ids=["flat", "peaked"])
def test_both_samplers_draw_the_same_ids(dtype: torch.dtype, size: float) -> None:
    rng = random.Random(0)
    logits = (torch.randn(300, 5100, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    choices = [
        (t, k, p)
        for t in (0.0, 0.3, 1.0, 2.5)
        for k in (None, 1, 7, 5000, 99999)
        for p in (None, 1e-9, 0.5, 0.95, 1.0)
    ]
    draws = [(Sampling(*rng.choice(choices), seed=i), i) for i in range(300)]
    assert sample_on_cpu(logits, draws, 5000) == sample(logits, draws, 5000)


def test_a_draw_does_not_depend_on_the_neighbours_in_the_batch(sampler: Sample) -> None:
    logits = torch.randn(64, 50257, generator=torch.Generator().manual_seed(0)) * 3
    draws = [(Sampling(temperature=1.0, seed=i), i) for i in range(64)]
    together = sampler(logits, draws, 50257)
    assert together == [sampler(logits[i : i + 1], draws[i : i + 1], 50257)[0] for i in range(64)]
    order = list(range(63, -1, -1))
    assert sampler(logits[order], [draws[i] for i in order], 50257) == [together[i] for i in order]


def test_draws_follow_the_distribution(sampler: Sample) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20_000, 1)
    ids = sampler(logits, [(Sampling(temperature=0.5, seed=i), 0) for i in range(20_000)], 4)
    expected = (torch.tensor([0.0, 1.0, 2.0, -1.0]) / 0.5).softmax(-1)
    found = torch.bincount(torch.tensor(ids), minlength=4) / 20_000
    assert (found - expected).abs().max() < 0.015  # over four standard errors


def test_temperature_0_is_greedy_and_takes_the_lowest_of_equals(sampler: Sample) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 9.0]])
    assert sampler(logits, [(Sampling(temperature=0), 0)], 3) == [1]


def test_top_k_and_top_p_keep_the_fewest_that_suffice() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def kept(k: int | None, p: float | None) -> list[bool]:
        return list(restricted(logits, k, p).isfinite().tolist())

    assert kept(2, None) == [True, True, False, False]
    assert kept(None, 0.5) == [True, False, False, False]
    assert kept(None, 0.51) == [True, True, False, False]
    assert kept(None, 1.0) == [True] * 4
    assert kept(3, 0.9) == [True, True, True, False]
    assert kept(9, 1e-9) == [True, False, False, False]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1e-46), Sampling(temperature=1e-6), Sampling(temperature=1e6)]
)
def test_extreme_temperatures_draw_ids_and_tiny_ones_the_largest(
    sampler: Sample, sampling: Sampling
) -> None:
    logits = torch.randn(50, 257, generator=torch.Generator().manual_seed(0)) * 30
    ids = sampler(logits, [(replace(sampling, seed=i), 0) for i in range(50)], 257)
    assert all(0 <= id_ < 257 for id_ in ids)
    assert sampling.temperature > 1 or ids == logits.argmax(-1).tolist()


def test_a_top_p_of_almost_one_keeps_every_row_valid(sampler: Sample) -> None:
    logits = torch.randn(200, 257, generator=torch.Generator().manual_seed(0))
    ids = sampler(
        logits,
        [(Sampling(temperature=1.0, top_p=0.9999999999999999, seed=i), 0) for i in range(200)],
        257,
    )
    assert all(0 <= id_ < 257 for id_ in ids)


def test_only_ids_that_the_tokenizer_can_decode_are_drawn(sampler: Sample) -> None:
    logits = torch.full((200, 300), -1e9)
    logits[:, 257:] = 50.0
    logits[:, 3] = 0.0
    assert set(
        sampler(logits, [(Sampling(temperature=1.0, seed=i), 0) for i in range(200)], 257)
    ) == {3}


def test_logits_that_are_no_numbers_break_nothing(sampler: Sample) -> None:
    logits = torch.randn(6, 5100, generator=torch.Generator().manual_seed(0))
    logits[::2, 7:] = torch.nan
    logits[3] = torch.nan
    draws = [
        (Sampling(temperature=1.0, top_k=k, top_p=p, seed=1), 0)
        for k in (None, 9)
        for p in (None, 0.5, 0.9)
    ]
    assert all(0 <= id_ < 5000 for id_ in sampler(logits, draws, 5000))


def test_uniform_depends_on_seed_and_index_alone_and_stays_below_one() -> None:
    values = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= value < 1 for value in values) and len(set(values)) == len(values)
    assert math.isclose(sum(values) / len(values), 0.5, abs_tol=0.01)
    assert uniform(7, 3) == uniform(7, 3)
