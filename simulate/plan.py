"""Capacity planning by simulation: the fewest replicas that meet latency limits, and the certainty
of that. A number suffices if its requests meet the limits and its queue does not grow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client.draws import WorkloadError
from client.traces import Request
from compare.measure import burst_size
from compare.sweep import enough_requests
from simulate.fleet import Layout
from simulate.trial import Trial, TrialResult

MOST = 1024  # replicas that are tried
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
    mean_replicas: float  # fewer than `replicas` where autoscaling has no need of them
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
    autoscaled: bool  # numbers of replicas are upper limits
    requests: int  # of the first trace
    arrivals_s: float  # in which they come; 0: all at once, or as they are answered
    growth_needs: int  # requests that show whether a queue grows; with fewer it is not judged


class Planner:
    """The search for the fewest replicas of one variant. map: calls, as the builtin one does."""

    def __init__(
        self, trial: Trial, map: Callable[..., Iterator[TrialResult]], report: Callable[[str], None]
    ):
        self._trial, self._map, self._report = trial, map, report
        self._results: dict[int, dict[int, TrialResult]] = {}  # by replicas and seed
        self._judged: dict[int, Judged] = {}
        self._rule = trial.layout.autoscaling
        # the fewest and the most replicas that are tried
        rule = self._rule
        self._bounds = (rule.min_replicas, rule.max_replicas) if rule else (1, MOST)
        self._requests = trial.question.requests or 0
        self._growth_needs, self._arrivals_s, self._spent = 0, 0.0, 0

    def answer(self) -> PlanAnswer:
        """Search by a few seeds; all judge the number and its neighbours. Raises WorkloadError."""
        if why_not := self._prepare():
            return self._answer(None, why_not)
        first, last = self._bounds
        least, most = first - 1, first  # the least does not suffice
        while not self._is_enough(most):
            if most == last:
                return self._answer(None, self._too_few(most))
            least, most = most, min(2 * most, last)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self._is_enough(middle) else (middle, most)
        fewest, farthest = most, min(2 * most, last)
        while self.judge(fewest).suffices < SURE:
            if fewest == farthest:
                return self._answer(None, self._too_few(fewest))
            fewest += 1
        while fewest > first and self.judge(fewest - 1).suffices >= SURE:
            fewest -= 1
        if fewest < last:
            self.judge(fewest + 1)  # to show the worth of one more
        return self._answer(fewest)

    def judge(self, replicas: int) -> Judged:
        """Judge a number of replicas by all seeds."""
        if replicas in self._judged:
            return self._judged[replicas]
        results = self._serve(replicas, self._trial.question.seeds)
        attainments, mean = [result.attainment for result in results], statistics.mean
        met, growing = self._count(results)
        self._report(
            f"{self._trial.name}, {replicas} replica{'s' * (replicas > 1)}: "
            f"{100 * mean(attainments):.1f}% within the limits, enough in {met} of "
            f"{len(results)} traces" + f", the queue grows in {growing}" * bool(growing)
        )
        self._judged[replicas] = Judged(
            replicas, attainments, growing, mean(result.mean_replicas for result in results),
            mean(result.p99_ttft_ms for result in results),
            mean(result.p99_e2el_ms for result in results),
            met / len(results), wilson(met, len(results)), (min(attainments), max(attainments)),
        )  # fmt: skip
        return self._judged[replicas]

    def _prepare(self) -> str:
        """Determine how many requests a trace has. Return why no number can suffice, if none can.

        One replica serves a sample of the requests one at a time, which shows whether any number
        can meet the limits; and as many at once as fill it, which shows how long a queue needs to
        show its growth.
        """
        question, traffic = self._trial.question, self._trial.traffic
        n = question.requests
        if n is None and question.rate:
            n = min(MOST_REQUESTS, max(FEWEST, math.ceil(LONG_S * question.rate)))
        trace = traffic.requests(n, question.seeds[0])
        sample = trace[:: max(1, len(trace) // FEWEST)]
        alone = self._by_one(sample, users=1)
        full = self._by_one(sample[: burst_size(self._trial.config)], users=None)
        self._spent = alone.requests + full.requests
        fills_s = full.slowest_row_s + float(np.nansum(trace.think_s)) / len(trace.firsts)
        if rule := self._rule:  # until it follows the load
            fills_s += rule.look_back_period_s + rule.upscale_delay_s + self._trial.layout.start_s
        span = float(np.ptp(trace.at))
        if rate := question.rate or (span and len(trace) / span):
            self._growth_needs = enough_requests(rate, fills_s)
        self._requests = len(trace)
        if question.requests is None and question.rate:
            self._requests = n = max(self._requests, self._growth_needs)
        self._arrivals_s = self._requests / rate if rate else 0.0
        self._trial = self._trial._replace(question=replace(question, requests=n))
        if alone.attainment >= question.attainment:
            return ""
        return (
            f"no number of replicas meets {question.limits}: of requests that come one at a time, "
            f"each alone on its replica, {100 * alone.attainment:.1f}% do; relax the limits, or "
            "use a faster engine"
        )

    def _by_one(self, requests: Sequence[Request], users: int | None) -> TrialResult:
        """Serve requests by one replica, `users` at a time, or all at once. A later turn of a
        conversation comes as if it were alone, which is faster.
        """
        fields: dict[str, Any] = {"at": 0.0, "users": users, "after": None, "think_s": None}
        trial = self._trial._replace(layout=replace(self._layout(1), autoscaling=None))
        return trial.result(
            [request.model_copy(update=fields) for request in requests], trial.costs
        )

    def _answer(self, fewest: int | None, why_not: str = "") -> PlanAnswer:
        by_number = {n: [*by_seed.values()] for n, by_seed in sorted(self._results.items())}
        return PlanAnswer(
            self._trial.name, fewest, why_not,
            [self._judged[n] for n in sorted(self._judged)],
            {n: statistics.mean(r.attainment for r in rs) for n, rs in by_number.items()},
            {n: self._count(rs)[1] / len(rs) for n, rs in by_number.items()},
            self._spent + sum(result.requests for rs in by_number.values() for result in rs),
            self._rule is not None, self._requests, self._arrivals_s, self._growth_needs,
        )  # fmt: skip

    def _too_few(self, replicas: int) -> str:
        """Return why so many do not suffice, nor would more."""
        results = [*self._results[replicas].values()]
        met, growing = self._count(results)
        share = statistics.mean(result.attainment for result in results)
        if self._rule:
            fix = (
                "give --autoscale a higher max_replicas or shorter delays, or begin with more "
                "--replicas"
            )
        elif replicas == MOST:
            fix = "name a lower rate"
        else:
            fix = (
                "more are no better: chance and uncertain costs alone can exceed the limits; relax "
                "them"
            )
        number = f"{replicas} replica{'s' * (replicas > 1)}{' at most' * bool(self._rule)}"
        return (
            f"{number} suffice{'s' * (replicas == 1)} in only {met} of {len(results)} traces, in "
            f"which {100 * share:.1f}% of the requests are within the limits and the queue grows "
            f"in {growing}; {fix}"
        )

    def _is_enough(self, replicas: int) -> bool:
        """True if a number suffices in half of a few traces or more."""
        results = self._serve(replicas, self._trial.question.seeds[:FEW])
        return 2 * self._count(results)[0] >= len(results)

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
        trial = self._trial._replace(layout=self._layout(replicas))
        missing = [seed for seed in seeds if seed not in results]
        trials = [trial._replace(seed=seed) for seed in missing]
        results.update(zip(missing, self._map(Trial.serve, trials)))
        return [results[seed] for seed in seeds]

    def _layout(self, replicas: int) -> Layout:
        """Return the layout of so many replicas; with autoscaling, of so many at most."""
        own = self._trial.layout
        slow = {k: times for k, times in own.slow.items() if k < replicas}
        if (rule := self._rule) is None:
            return replace(own, replicas=replicas, slow=slow)
        first = max(rule.min_replicas, min(own.replicas, replicas))
        rule = replace(rule, max_replicas=max(rule.min_replicas, replicas))
        return replace(own, replicas=first, slow=slow, autoscaling=rule)


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
    trials: Sequence[Trial], report: Callable[[str], None], calls: Callable[..., Any]
) -> list[PlanAnswer]:
    """Return each variant's answer; `calls` maps, as `map` does. Raises PlanError without any."""
    answers = [Planner(trial, calls, report).answer() for trial in trials]
    if all(answer.fewest is None for answer in answers):
        raise PlanError("; ".join(f"{answer.name}: {answer.why_not}" for answer in answers))
    return answers
