"""Noise that is known is found again, and its ranges hold as many runs as they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fitting import Observed
from benchmarks.noise import fit_noise
from scheduling.inference import Inference, Iteration, Row
from simulate.costs import Costs, Line
from simulate.noise import Noise, NoisyRun
from simulate.time import PS

MS = PS // 1000
TRUTH = Noise(0.08, 0.06, 0.06, 1.0, 0.12, 0.5, 0.3, 0.2, 0.15)
COSTS = Costs("x", Line(36 * MS), gap=4 * MS)
ROWS = Iteration([Row(Inference([0], 99), 5, 1, [], samples=True, idle=False)], 1, 0, 0)


def observed(noise: Noise, seed: int, n: int) -> list[Observed]:
    """A run of n iterations, at a time far from others'."""
    run, now, seen = NoisyRun(noise, seed), seed * 1000 * PS, []
    for _ in range(n):
        took = run.iteration(now, COSTS.of(ROWS))
        gap = run.gap(COSTS.gap)
        seen.append(Observed(ROWS, now / PS, took / PS, gap / PS, 0, False))
        now += took + gap
    return seen


def test_known_noise_is_found_and_its_ranges_hold_90_percent_of_runs() -> None:
    rng = np.random.default_rng(0)
    http_s = rng.lognormal(-6, TRUTH.http, 40).tolist()
    found = fit_noise(COSTS, [observed(TRUTH, seed, 300) for seed in range(30)], http_s)
    assert found.bias == pytest.approx(TRUTH.bias, abs=0.04)
    for name in ("level", "drift", "iteration", "correlation", "http"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.3), name
    assert 0.4 < found.drift_s < 2.5
    assert found.stalls * found.stall_s == pytest.approx(TRUTH.stalls * TRUTH.stall_s, rel=0.3)
    real, drawn = (
        np.array([sum(each.whole for each in observed(noise, first + k, 100)) for k in range(n)])
        for noise, first, n in ((TRUTH, 100, 300), (found, 1000, 1900))
    )
    least, most = np.percentile(drawn, (5, 95))
    assert 0.82 <= np.mean((least <= real) & (real <= most)) <= 0.97
