"""Errors of the simulator, their intervals, and whether they meet their targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from compare.analysis import CONFIDENCE, Estimate

JUDGED = 0.85  # of the capacity; beyond it errors are reported
MET, BY_SPREAD, MISSED, REPORTED = "met", "met by spread", "missed", "reported"
Rows = Sequence[Mapping[str, Any]]


class Measure(NamedTuple):
    """A number of several runs together: of all their requests, and not a mean of theirs."""

    of: Callable[[Rows], float]
    target: float | None = None  # for the relative error
    least: int = 1  # requests, real ones of all runs, of which it is judged
    absolute: bool = False  # an error in seconds, and not a part of what is measured


def _quantile(name: str, p: float) -> Callable[[Rows], float]:
    return lambda rows: float(np.percentile(np.concatenate([row[name] for row in rows]), p))


def _capacity(rows: Rows) -> float:
    """Tokens per second while every row is busy."""
    return sum(row["busy_tokens"] for row in rows) / sum(row["busy_s"] for row in rows)


CAPACITY = {"capacity": Measure(_capacity, 0.03)}
LATENCIES = {
    "p50_e2e": Measure(_quantile("e2e_s", 50), 0.05),
    "p99_e2e": Measure(_quantile("e2e_s", 99), 0.10, least=2000),
    "p50_ttft": Measure(_quantile("ttft_s", 50), absolute=True),
    "p99_ttft": Measure(_quantile("ttft_s", 99), absolute=True),
    "p50_tpot": Measure(_quantile("tpot_s", 50)),
}


class Error(NamedTuple):
    """simulated / measured - 1, or simulated - measured in seconds."""

    simulated: float
    measured: float
    error: Estimate
    spread: float | None  # by which the real server's repeats are apart, at most
    target: float | None
    verdict: str

    def told(self) -> dict[str, Any]:
        return self._asdict() | {"error": self.error.mean, "half": self.error.half}


def judged(
    measure: Measure,
    measured: Mapping[int, Rows],
    simulated: Mapping[int, Mapping[str, Any]],
    target: float | None,
) -> Error:
    """measured: of each seed its repeats, as many of each; simulated: each seed's."""

    def of_both(seeds: Iterable[int]) -> tuple[float, float]:
        seeds = list(seeds)
        real = [row for seed in seeds for row in measured[seed]]
        return measure.of([simulated[seed] for seed in seeds]), measure.of(real)

    def apart(mine: float, other: float) -> float:
        return mine - other if measure.absolute else mine / other - 1

    error = jackknife(lambda seeds: apart(*of_both(seeds)), list(measured))
    repeats = [measure.of(rows) for rows in zip(*measured.values(), strict=True)]
    spread = max((abs(apart(a, b)) for a, b in combinations(repeats, 2)), default=None)
    return Error(*of_both(measured), error, spread, target, verdict(error.mean, spread, target))


def verdict(error: float, spread: float | None, target: float | None) -> str:
    """Whether an error is below its target, or within what the real server differs from itself."""
    if target is None:
        return REPORTED
    if abs(error) <= target:
        return MET
    return BY_SPREAD if spread is not None and abs(error) <= spread else MISSED


def jackknife(of: Callable[[Sequence[int]], float], seeds: Sequence[int]) -> Estimate:
    """What all seeds together say, with Student's interval from leaving out one at a time.

    A quantile of few requests is biased, so it is not a mean over seeds (Efron and Tibshirani, An
    Introduction to the Bootstrap, chapter 11).
    """
    n, whole = len(seeds), of(seeds)
    if n < 2:
        return Estimate(whole, None)
    without = [of([*seeds[:i], *seeds[i + 1 :]]) for i in range(n)]
    quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return Estimate(whole, quantile * float(np.std(without)) * (n - 1) ** 0.5)


def errors(
    load: float | None,
    measured: Mapping[int, Rows],
    simulated: Mapping[int, Mapping[str, Any]],
) -> dict[str, Error]:
    """Of a case at a load: its capacity where all came at once, else its latencies."""
    measures = CAPACITY if load is None else LATENCIES
    is_judged = load is None or load <= JUDGED
    n = sum(len(row["e2e_s"]) for rows in measured.values() for row in rows)
    return {
        name: judged(
            measure,
            measured,
            simulated,
            measure.target if is_judged and n >= measure.least else None,
        )
        for name, measure in measures.items()
    }


def made_of(rows: Rows) -> dict[str, float]:
    """Where the time of runs goes, of one side: means over runs.

    iterations: how many; iteration_s: one of them; cold: the first hundred, as a part of the median
    times of as many rows; gap_s: between two, while a request is there; http_s: by which the
    client's latency is beyond the server's, median; lag_s: by which requests are sent late, p99;
    rows: live ones in an iteration.
    """
    n = sum(row["iterations"] for row in rows)
    names = (
        "iterations", "http_s", "lag_s", "preemptions", "recomputed_tokens",
        "cached_tokens",
    )  # fmt: skip
    return {name: float(np.mean([row[name] for row in rows])) for name in names} | {
        "gap_s": sum(row["gaps_s"] for row in rows) / n,
        "iteration_s": sum(row["iterations_s"] for row in rows) / n,
        "cold": sum(row["first_s"] for row in rows) / sum(row["first_later_s"] for row in rows),
        "rows": sum(row["rows"] * row["iterations"] for row in rows) / n,
    }
