"""Drawing in one launch, in Triton's interpreter, which takes about a second for a row."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from generate import assembly, auto
from generate.auto import build
from generate.sampling import sample, sample_on_gpu, uniforms
from scheduling.sampling import Sampling
from tests.counts import ALL, nightly_but

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
import triton
import triton.language as tl

from generate.kernels import draw

KINDS = ("flat", "peaked", "tied")
TOP_K, TOP_P = (None, 1, 7, 200, 99999), (None, 1e-9, 0.5, 0.95, 1.0)


def logits(kind: str, n: int, n_vocab: int) -> torch.Tensor:
    normal = torch.randn(n, n_vocab, generator=torch.Generator().manual_seed(0))
    # ties, 0 and -0 among them, and ids that may not come
    tied = (normal * 2).round().masked_fill(normal > 1.5, -torch.inf)
    return {"flat": normal, "peaked": normal * 6, "tied": tied}[kind]


@pytest.mark.parametrize(("kind", "dtype"), nightly_but(
    [("flat", torch.float32), ("peaked", torch.bfloat16), ("tied", torch.bfloat16)],
    itertools.product(KINDS, (torch.float32, torch.bfloat16)),
), ids=str)  # fmt: skip
def test_a_launch_draws_as_sample_does(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "TILE", 256)  # so that a row takes two
    rng, n = random.Random(0), 300 if ALL else 8
    choices = [*itertools.product((0.0, 0.3, 1.0, 2.5), TOP_K, TOP_P)]
    how = [(Sampling(*rng.choice(choices), seed=i), i) for i in range(n)]
    found = logits(kind, n, 320).to(dtype)
    assert torch.equal(sample_on_gpu(found, how, 300), sample(found, how, 300))


@pytest.mark.parametrize("kind", nightly_but(["peaked"], KINDS))
def test_more_than_can_be_collected_are_searched_in_the_row(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TILE": 256, "ROOM": 8}.items():
        monkeypatch.setattr(draw, name, value)
    found = logits(kind, 8, 300).to(torch.bfloat16)
    cuts = [(7, None), (8, 0.6), (9, None), (200, 0.9), (None, 0.05), (None, 0.4), (None, 0.95)]
    how = [(Sampling(1.0, *cut, seed=i), i) for i, cut in enumerate([*cuts, (299, 0.3)])]
    assert torch.equal(sample_on_gpu(found, how, 300), sample(found, how, 300))


def test_ties_of_the_last_one_kept_are_kept_whether_or_not_they_can_be_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draw, "ROOM", 8)
    n = 24 if ALL else 6
    found = torch.full((n, 300), -3.0)
    for row in range(n):  # 7 to 9 ties, each in a four of its own
        found[row, 1 : 30 * (7 + row % 3) : 30] = 5.0
    how = [(Sampling(1.0, 5, (None, 0.5)[i % 2], seed=i), i) for i in range(n)]
    assert torch.equal(sample_on_gpu(found, how, 300), sample(found, how, 300))


def test_an_id_depends_on_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "TILE", 256)
    how = [(Sampling(1.0, seed=i), i) for i in range(12)]
    found = logits("flat", 12, 700)
    together = sample_on_gpu(found, how, 700)
    assert torch.equal(sample_on_gpu(found.flip(0), how[::-1], 700), together.flip(0))
    alone = [sample_on_gpu(found[i : i + 1], how[i : i + 1], 700) for i in range(12)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, of the interpreter
@pytest.mark.parametrize("how", [
    *(Sampling(temperature) for temperature in (0.0, 1e-46, 1e6)), Sampling(1.0, 9, 0.9),
], ids=str)  # fmt: skip
def test_every_id_can_be_decoded_whatever_the_logits(how: Sampling) -> None:
    found = logits("peaked", 4, 300) * 5
    found[:, 257:] = 5000.0  # ids that the tokenizer has not
    found[1, 7:], found[2], found[3, 9] = torch.nan, torch.nan, torch.inf
    with np.errstate(invalid="ignore"):
        ids = sample_on_gpu(found, [(how, i) for i in range(4)], 257).tolist()
    assert all(0 <= id_ < 257 for id_ in ids)
    assert how.temperature >= 1 or ids[0] == found[0, :257].argmax(), "tiny: greedy"


def numbers(settings: Any, out: Any) -> None:
    at = tl.program_id(0)
    seed, index = tl.load(settings + 2 * at), tl.load(settings + 2 * at + 1)
    tl.store(out + at, draw.uniform(seed, index))


def test_its_numbers_have_the_bits_of_the_other_samplers() -> None:
    rng = random.Random(0)
    how = [(Sampling(seed=rng.randrange(2**63)), rng.randrange(2**20)) for _ in range(50)]
    how += [(Sampling(seed=seed), index) for seed in (0, 1, 2**63 - 1) for index in (0, 1)]
    settings = torch.tensor([(sampling.seed, index) for sampling, index in how])
    out = torch.empty(len(how), dtype=torch.float64)
    triton.jit(numbers)[(len(how),)](settings, out)
    assert out.tolist() == [*uniforms(how)]


def test_it_is_used_beside_our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    settings = {"model": "gpt2", "weights": "random"}
    for linear, expected in (("triton", sample_on_gpu), ("plain", sample)):
        config = build("dynamic", settings | {"linear": linear}, {})
        assert assembly._sampler(config) is expected
