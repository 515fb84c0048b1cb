"""Both samplers draw alike, from each row's own logits alone, whatever these are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from generate.sampling import Draws, Sample, sample, sample_on_cpu, uniform
from scheduling.sampling import Sampling
from tests.oracle import restricted

Ids = Callable[[Tensor, Draws, int], list[int]]


@pytest.fixture(params=[sample, sample_on_cpu])
def sampler(request: pytest.FixtureRequest) -> Ids:
    function: Sample = request.param
    return lambda *logits_and_draws: function(*logits_and_draws).tolist()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def draws(sampling: Sampling, n: int) -> list[tuple[Sampling, int]]:
    return [(replace(sampling, seed=i), 0) for i in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 6.0], ids=["flat", "peaked"])
def test_both_samplers_draw_the_same_ids(dtype: torch.dtype, size: float) -> None:
    rng = random.Random(0)
    top_k, top_p = (None, 1, 7, 5000, 99999), (None, 1e-9, 0.5, 0.95, 1.0)
    choices = [*itertools.product((0.0, 0.3, 1.0, 2.5), top_k, top_p)]
    logits = (noise(300, 5100) * size).to(dtype)
    mixed = [(Sampling(*rng.choice(choices), seed=i), i) for i in range(300)]
    assert torch.equal(sample_on_cpu(logits, mixed, 5000), sample(logits, mixed, 5000))


def test_a_draw_does_not_depend_on_the_other_rows_of_the_batch(sampler: Ids) -> None:
    logits, of = noise(64, 50257) * 3, draws(Sampling(temperature=1.0), 64)
    together = sampler(logits, of, 50257)
    assert together == [sampler(logits[i : i + 1], of[i : i + 1], 50257)[0] for i in range(64)]
    order = list(range(63, -1, -1))
    assert sampler(logits[order], [of[i] for i in order], 50257) == [together[i] for i in order]


def test_draws_follow_the_distribution(sampler: Ids) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    ids = sampler(logits.repeat(20_000, 1), draws(Sampling(temperature=0.5), 20_000), 4)
    shares = torch.bincount(torch.tensor(ids), minlength=4) / 20_000
    assert (shares - (logits / 0.5).softmax(-1)).abs().max() < 0.015  # over four standard errors


def test_temperature_0_is_greedy_and_takes_the_lowest_of_equals(sampler: Ids) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 9.0]])
    assert sampler(logits, [(Sampling(temperature=0), 0)], 3) == [1]


@pytest.mark.parametrize(
    ("k", "p", "n_kept"),
    [(2, None, 2), (None, 0.5, 1), (None, 0.51, 2), (None, 1.0, 4), (3, 0.9, 3), (9, 1e-9, 1)],
)
def test_top_k_and_top_p_keep_the_fewest_ids(k: int | None, p: float | None, n_kept: int) -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    kept = restricted(logits, k, p).isfinite().tolist()
    assert kept == [True] * n_kept + [False] * (4 - n_kept)


@pytest.mark.parametrize("how", [
    *(Sampling(temperature) for temperature in (1e-46, 1e-6, 1e6)),
    Sampling(1.0, top_p=0.9999999999999999),
    *(Sampling(1.0, k, p) for k in (None, 9) for p in (None, 0.5, 0.9)),
])  # fmt: skip
def test_every_id_can_be_decoded_whatever_the_settings_and_the_logits(
    how: Sampling, sampler: Ids
) -> None:
    logits = noise(100, 300) * 30
    logits[:, 257:] = 5000.0  # ids that the tokenizer has not
    ids = sampler(logits, draws(how, 100), 257)
    assert all(0 <= id_ < 257 for id_ in ids)
    assert how.temperature >= 1 or ids == logits[:, :257].argmax(-1).tolist(), "tiny: greedy"
    logits[::2, 7:] = torch.nan
    logits[3] = torch.nan
    assert all(0 <= id_ < 257 for id_ in sampler(logits, draws(how, 100), 257))


def test_uniform_depends_on_seed_and_index_alone_and_stays_below_one() -> None:
    values = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= value < 1 for value in values) and len(set(values)) == len(values)
    assert math.isclose(sum(values) / len(values), 0.5, abs_tol=0.01)
