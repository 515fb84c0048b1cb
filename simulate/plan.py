"""Capacity planning by simulation: the fewest replicas that meet latency limits, and the certainty
of that. A number suffices if its requests meet the limits and its queue does not grow.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client.draws import WorkloadError
from client.measure import burst_size
from client.progress import Progress
from compare.sweep import enough_requests
from simulate.fleet import Layout
from simulate.trial import Trial, TrialResult

MOST = 1024  # replicas that are tried
ALONE = 0  # in place of a number of replicas: each request has an idle one
SURE = 0.95  # the probability with which the fewest must suffice
FEW = 3  # seeds of the search, before all of them judge a number and its neighbours
LONG_S = 60.0  # of arrivals, unless --numsamples gives a number of requests
FEWEST, MOST_REQUESTS = 1_000, 20_000  # more where the growth of a queue needs them


class PlanError(WorkloadError):
    """No number of replicas is the answer; the message says why."""


@dataclass(frozen=True)
class Judged:
    """So many replicas, judged by the traces of all seeds."""

    replicas: int
    attainments: list[float]
    growing: int  # traces in which the queue grows
    p99_ttft_ms: float
    p99_e2el_ms: float
    suffices: float  # probability
    suffices_between: tuple[float, float]  # its 95% interval (Wilson)
    attainment_between: tuple[float, float]  # range in which that of another trace is expected


@dataclass(frozen=True)
class PlanAnswer:
    """Answer for one variant, and the numbers behind it."""

    name: str
    fewest: int | None  # None: no number suffices
    why_not: str
    judged: list[Judged]
    tried: dict[int, float]  # mean attainment by replicas, of a few traces or of all
    grows: dict[int, float]  # share of these traces in which the queue grows
    simulated_requests: int
    requests: int  # of the first trace
    arrivals_s: float  # in which they come; 0: all at once, or as they are answered
    growth_needs: int  # requests that show whether a queue grows; with fewer it is not judged


class Planner:
    """The search for the fewest replicas of one variant. map: calls, as the builtin one does."""

    def __init__(self, trial: Trial, map: Callable[..., Iterator[TrialResult]], progress: Progress):
        self._trial, self._map, self._progress = trial, map, progress
        self._results: dict[int, dict[int, TrialResult]] = {}  # by replicas and seed
        self._requests = trial.question.requests or 0
        self._growth_needs, self._arrivals_s = 0, 0.0

    def answer(self) -> PlanAnswer:
        """Search by a few seeds; all judge the number and its neighbours. Raises WorkloadError."""
        with self._progress.step(f"{self._trial.name}, how many requests a trace needs"):
            self._prepare()
        fewest, seeds = 1, self._trial.question.seeds
        for some, share in ((seeds[:FEW], 0.5), (seeds, SURE)):
            enough = functools.partial(self._is_enough, some, share)
            if not enough(fewest) and (why_not := self._never(some, share)):
                return self._answer(None, why_not)
            if not (found := _fewest(enough, fewest, MOST)):
                return self._answer(None, self._too_few())
            fewest = found
        while fewest > 1 and enough(fewest - 1):
            fewest -= 1
        if fewest < MOST:
            enough(fewest + 1)  # to show the worth of one more
        return self._answer(fewest)

    def judge(self, replicas: int) -> Judged:
        """Judge a number of replicas by all seeds."""
        results = self._serve(replicas, self._trial.question.seeds)
        attainments, n = [result.attainment for result in results], len(results)
        met, growing = self._count(results)
        p99_ttft_ms = statistics.mean(result.p99_ttft_ms for result in results)
        p99_e2el_ms = statistics.mean(result.p99_e2el_ms for result in results)
        suffices, between = (met / n, wilson(met, n)), (min(attainments), max(attainments))
        return Judged(replicas, attainments, growing, p99_ttft_ms, p99_e2el_ms, *suffices, between)

    def _prepare(self) -> None:
        """Determine how many requests a trace has. One replica serves as many at once as fill it,
        which shows how long a queue needs to show its growth.
        """
        question, traffic = self._trial.question, self._trial.traffic
        n = question.requests
        if n is None and question.rate:
            n = min(MOST_REQUESTS, max(FEWEST, math.ceil(LONG_S * question.rate)))
        trace = traffic.requests(n, question.seeds[0])
        sample = trace[:: max(1, len(trace) // FEWEST)][: burst_size(self._trial.config)]
        one = self._trial._replace(layout=self._layout(1))
        full = one.by_one(sample, None, one.costs)
        fills_s = full.slowest_row_s + float(np.nansum(trace.think_s)) / len(trace.firsts)
        span = float(np.ptp(trace.at))
        if rate := question.rate or (span and len(trace) / span):
            self._growth_needs = enough_requests(rate, fills_s)
        self._requests = len(trace)
        if question.requests is None and question.rate:
            self._requests = n = max(self._requests, self._growth_needs)
        self._arrivals_s = self._requests / rate if rate else 0.0
        self._trial = self._trial._replace(question=replace(question, requests=n))

    def _never(self, seeds: Sequence[int], share: float) -> str:
        """Return why no number suffices in this share of the traces, if even ALONE does not."""
        trial, question = self._trial, self._trial.question
        if ".py:" in trial.config.mode:  # a user's own policy may be faster beside others
            return ""
        results = self._serve(ALONE, seeds)
        met, _ = self._count(results)
        if met >= share * len(results):
            in_doubt = met < len(results) < len(question.seeds)
            return self._never(question.seeds, SURE) if in_doubt else ""
        least, enough = question.attainment, share * len(results)
        unmet = {
            name: limit
            for name, limit in question.slo.items()
            if sum(each.within[name] >= least for each in results) < enough
        }
        return (
            f"no number of replicas meets {replace(question, slo=unmet or question.slo).limits}: "
            f"alone on an idle replica, {_share(results)} of the requests are within the limits, "
            f"enough in {met} of {len(seeds)} traces; relax them, or use a faster engine"
        )

    def _answer(self, fewest: int | None, why_not: str = "") -> PlanAnswer:
        results = {n: [*by_seed.values()] for n, by_seed in sorted(self._results.items())}
        spent = sum(result.requests for rs in results.values() for result in rs)
        results.pop(ALONE, None)
        n_seeds = len(self._trial.question.seeds)
        judged = [self.judge(n) for n, rs in results.items() if len(rs) == n_seeds]
        tried = {n: statistics.mean(r.attainment for r in rs) for n, rs in results.items()}
        grows = {n: self._count(rs)[1] / len(rs) for n, rs in results.items()}
        of_trace = self._requests, self._arrivals_s, self._growth_needs
        return PlanAnswer(self._trial.name, fewest, why_not, judged, tried, grows, spent, *of_trace)

    def _too_few(self) -> str:
        """Return why the most replicas do not suffice, and what to change."""
        results = [*self._results[MOST].values()]
        met, growing = self._count(results)
        return (
            f"{MOST} replicas suffice in only {met} of {len(results)} traces, in which "
            f"{_share(results)} of the requests are within the limits and the queue grows in "
            f"{growing}; name a lower rate, or relax the limits"
        )

    def _is_enough(self, seeds: Sequence[int], share: float, replicas: int) -> bool:
        """True if a number suffices in this share of the traces or more."""
        return self._count(self._serve(replicas, seeds))[0] >= share * len(seeds)

    def _count(self, results: Sequence[TrialResult]) -> tuple[int, int]:
        """Count the trials that suffice, and those in which the queue grows."""
        judges_growth = self._requests >= self._growth_needs
        grows = [result.queue_grows and judges_growth for result in results]
        least = self._trial.question.attainment
        met = [r.attainment >= least and not growing for r, growing in zip(results, grows)]
        return sum(met), sum(grows)

    def _serve(self, replicas: int, seeds: Sequence[int]) -> list[TrialResult]:
        """Return the results of these seeds; each trial is served once."""
        results = self._results.setdefault(replicas, {})
        call, trial, tried = Trial.alone, self._trial, "each request alone on an idle replica"
        if replicas:
            call, trial = Trial.serve, trial._replace(layout=self._layout(replicas))
            tried = f"{replicas} replica{'s' * (replicas > 1)}"
        missing = [seed for seed in seeds if seed not in results]
        title = f"{trial.name}, {tried}"
        with self._progress.step(f"{title}, {len(missing)} traces") as step:
            served = self._map(call, [trial._replace(seed=seed) for seed in missing])
            for k, (seed, result) in enumerate(zip(missing, served), 1):
                results[seed] = result
                step.text = f"{title}, {k} of {len(missing)} traces"
        shown = [results[seed] for seed in seeds]
        met, growing = self._count(shown)
        if missing:
            self._progress.say(
                f"{title}: {_share(shown)} within the limits, enough in {met} of "
                f"{len(shown)} traces" + f", the queue grows in {growing}" * bool(growing)
            )
        return shown

    def _layout(self, replicas: int) -> Layout:
        """Return the layout of so many replicas."""
        own = self._trial.layout
        slow = {k: times for k, times in own.slow.items() if k < replicas}
        return replace(own, replicas=replicas, slow=slow)


def _fewest(is_enough: Callable[[int], bool], first: int, last: int) -> int | None:
    """Return the fewest that are enough, by growing steps and bisection; None if `last` is not."""
    least, most, step = first - 1, first, 1
    while not is_enough(most):
        if most == last:
            return None
        least, most, step = most, min(most + step, last), 2 * step
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most


def _share(results: Sequence[TrialResult]) -> str:
    return f"{100 * statistics.mean(result.attainment for result in results):.1f}%"


def wilson(met: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of a probability, known by `met` of n trials (Wilson, 1927)."""
    z = 1.959964
    centre = (met + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(met * (n - met) / n + z * z / 4)
    return max(0.0, round(centre - half, 9)), min(1.0, round(centre + half, 9))


def coverage(n: int) -> float:
    """Return the probability with which one more value lies between the least and the most of n,
    whatever their distribution (order statistics; Wilks, 1941).
    """
    return (n - 1) / (n + 1)


def plan(
    trials: Sequence[Trial], progress: Progress, calls: Callable[..., Any]
) -> list[PlanAnswer]:
    """Return each variant's answer; `calls` maps, as `map` does. Raises PlanError without any."""
    answers = [Planner(trial, calls, progress).answer() for trial in trials]
    if all(answer.fewest is None for answer in answers):
        raise PlanError("; ".join(f"{answer.name}: {answer.why_not}" for answer in answers))
    return answers
