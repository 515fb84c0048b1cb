"""Both samplers draw alike, from each row's own logits alone, whatever these are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from generate.sampling import Draws, Sample, sample, sample_on_cpu, uniforms
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


def test_an_id_is_the_one_at_which_the_sum_passes_the_number(sampler: Ids) -> None:
    """Of equal logits that is the number's leading bits, which so are the same in both."""
    how = [(Sampling(1.0, seed=31**i), 7 * i) for i in range(12)]
    equal = torch.zeros(1, 2**16).expand(len(how), -1)
    assert sampler(equal, how, 2**16) == [int(u * 2**16) for u in uniforms(how)]


def outputs(state: int) -> Iterator[int]:
    """SplitMix64 as its authors wrote it: a state that each output moves on."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def test_numbers_are_splitmix64s_from_its_first_output_for_the_seed_on() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [*itertools.islice(outputs(1234567), 3)] == published
    for seed in (0, 1, 7, 2**63 - 1):
        own = [bits >> 11 for bits in itertools.islice(outputs(next(outputs(seed))), 50)]
        numbers = uniforms([(Sampling(seed=seed), index) for index in range(50)])
        assert [u * 2**53 for u in numbers] == own


def test_numbers_are_uniform_and_those_of_near_seeds_and_indices_independent() -> None:
    n = 200
    numbers = uniforms([(Sampling(seed=seed), i) for seed in range(n) for i in range(n)])
    u = np.array(numbers).reshape(n, n)
    assert u.min() >= 0 and u.max() < 1 and len({*numbers}) == n * n
    for x, y in ((u, u), (u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        bins = [1, 400] if x is y else [20, 20]
        counts = np.histogram2d(x.ravel(), y.ravel(), bins, [[0, 1], [0, 1]])[0]
        assert 0.001 < stats.chisquare(counts.ravel()).pvalue < 0.999
