"""The noise of a server about its costs, from the very iterations that these are fitted to.

Single iterations are judged by those beside which nothing happened. Levels and drift are judged by
means of slots, since which iteration a request's thread delayed is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from benchmarks.fitting import STALL_S, Observed, expected_s
from simulate import PS
from simulate.costs import Costs
from simulate.noise import Noise

LEAST_S, LEAST = 0.5, 20  # seconds and iterations of a slot
MOST_CORRELATION = 0.95


class Slot(NamedTuple):
    """Iterations of a run, one after another."""

    run: int
    at_s: float
    error: float  # logarithm of their time over the expected one
    n: int


def fit_noise(costs: Costs, runs: Sequence[Sequence[Observed]], http_s: Sequence[float]) -> Noise:
    """Return the noise in these runs. http_s: seconds between client and server in several runs."""
    slots: list[Slot] = []
    stalls: list[float] = []
    squares = products = computed_s = 0.0
    n_squares = n_products = 0
    for number, run in enumerate(runs):
        due = expected_s(costs, run)
        late = np.array([each.whole for each in run]) - due
        stalled = late >= np.maximum(STALL_S, due)
        stalls += late[stalled].tolist()
        computed_s += float(due.sum())
        calm = np.array([each.calm for each in run]) & ~stalled
        errors = np.log([each.seconds * PS / costs.of(each.iteration) for each in run])
        n_slots = max(1, min(len(run) // LEAST, int(due.sum() / LEAST_S)))
        for part in np.array_split(np.arange(len(run)), n_slots):
            kept = part[~stalled[part]]
            if len(kept):
                error = math.log1p(late[kept].sum() / due[kept].sum())
                slots.append(Slot(number, run[part[0]].started_at, error, len(kept)))
            if not (inside := calm[part]).any():
                continue
            apart = np.where(inside, errors[part] - errors[part][inside].mean(), 0.0)
            squares += float((apart**2).sum())
            n_squares += int(inside.sum()) - 1
            products += float((apart[1:] * apart[:-1]).sum())
            n_products += int((inside[1:] & inside[:-1]).sum())
    variance = squares / max(1, n_squares)
    correlation = products / n_products / variance if products > 0 else 0.0
    correlation = min(correlation, MOST_CORRELATION)
    found = levels(slots, variance * (1 + correlation) / (1 - correlation))
    stall_s = float(np.mean(stalls)) if stalls else 0.0
    http = float(np.std(np.log(http_s), ddof=1)) if len(http_s) > 1 else 0.0
    own = math.sqrt(variance), correlation
    return Noise(*found, *own, len(stalls) / computed_s, stall_s, http)


def levels(slots: Sequence[Slot], variance: float) -> tuple[float, float, float, float]:
    """Return bias, level, drift and drift_s of a Noise: the most likely ones, if logarithms are
    normal. variance: of the mean error of n iterations, times n.
    """
    run, at_s, error, n = (np.array(values) for values in zip(*slots))
    same, apart_s = run[:, None] == run, np.abs(at_s[:, None] - at_s)
    own = np.diag(variance / n + 1e-12)

    def fitted(parameters: np.ndarray) -> tuple[float, float]:
        """Return the mean, and twice the negative logarithm of the likelihood."""
        level, drift, drift_s = np.exp(parameters)
        covariance = own + level**2 * same + drift**2 * np.exp(-apart_s / drift_s)
        factor = cho_factor(covariance, lower=True)
        weights = cho_solve(factor, np.ones(len(n)))
        mean = float(weights @ error / weights.sum())
        rest = error - mean
        determinant = 2 * np.log(np.diag(factor[0])).sum()
        return mean, float(rest @ cho_solve(factor, rest) + determinant)

    wide = math.log(max(float(error.std()), 1e-3))
    bounds = [(math.log(1e-4), 0.0)] * 2 + [(math.log(LEAST_S), math.log(100.0))]
    best = minimize(lambda at: fitted(at)[1], (wide, wide, math.log(3.0)), bounds=bounds).x
    level, drift, drift_s = np.exp(best).tolist()
    return fitted(best)[0], level, drift, drift_s
