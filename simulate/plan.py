"""How many replicas? The fewest that meet latency limits, by simulation, with what chance does to
the answer. A number suffices if its requests meet the limits and its queue does not grow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client.draws import WorkloadError
from client.traces import Request
from compare.measure import burst_size
from compare.sweep import enough_requests
from simulate.fleet import Layout
from simulate.trial import Case, Found, found, serve

MOST = 1024  # replicas that are tried
SURE = 0.95  # the probability with which the fewest must suffice
ATTAINMENT = 0.99  # unless it is said
SEEDS = 40  # the least and the most of so many hold 95% of others (`predicted`)
FEW = 3  # seeds by which the number is looked for, before all of them judge its neighbours
LONG_S = 60.0  # of arrivals, unless --numsamples says how many requests
FEWEST, MOST_REQUESTS = 1_000, 20_000  # more where the growth of a queue needs them


def requests_for(rate: float) -> int:
    """Requests of a trace at so many a second."""
    return min(MOST_REQUESTS, max(FEWEST, math.ceil(LONG_S * rate)))


class PlanError(WorkloadError):
    """No number of replicas is the answer; the message says why."""


@dataclass(frozen=True)
class Judged:
    """So many replicas, over seeds."""

    replicas: int
    attainments: list[float]
    growing: int  # traces in which the queue grows
    mean_replicas: float  # fewer than `replicas` where autoscaling has no need of them
    p99_ttft_ms: float
    p99_e2el_ms: float
    suffices: float  # the probability
    suffices_between: tuple[float, float]  # Wilson's interval of it, 95%
    attainment_between: tuple[float, float]  # where that of another trace is expected


@dataclass(frozen=True)
class Answer:
    """Of one variant: the fewest replicas, None where none is enough, and what was tried."""

    name: str
    fewest: int | None
    why_not: str
    judged: list[Judged]
    tried: dict[int, float]  # mean share within the limits, of a few traces or of all
    grows: dict[int, float]  # of those traces the part in which the queue grows
    simulated_requests: int
    autoscaled: bool  # numbers are the most that there may be
    requests: int  # of the first trace
    arrivals_s: float  # in which they come; 0: all at once, or as they are answered
    growth_needs: int  # requests that tell whether a queue grows; of fewer it is not judged


class Planner:
    """Asks for one variant how many replicas suffice."""

    def __init__(
        self,
        case: Case,
        processes: ProcessPoolExecutor,
        say: Callable[[str], None],
    ):
        self._case, self._processes, self._say = case, processes, say
        self._found: dict[int, dict[int, Found]] = {}  # by replicas and seed
        self._judged: dict[int, Judged] = {}
        self._rule = case.layout.autoscaling
        self._requests = case.question.requests or 0
        self._growth_needs, self._arrivals_s, self._spent = 0, 0.0, 0

    @property
    def _bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas that are tried."""
        return (self._rule.min_replicas, self._rule.max_replicas) if self._rule else (1, MOST)

    def answer(self) -> Answer:
        """Look for the fewest by a few seeds, then judge them and their neighbours by all. Raises
        WorkloadError.
        """
        if why := self._prepare():
            return self._answered(None, why)
        first, last = self._bounds
        least, most = first - 1, first  # the least does not suffice
        while not self._enough(most):
            if most == last:
                return self._answered(None, self._too_few(most))
            least, most = most, min(2 * most, last)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self._enough(middle) else (middle, most)
        fewest, farthest = most, min(2 * most, last)
        while self.judge(fewest).suffices < SURE:
            if fewest == farthest:
                return self._answered(None, self._too_few(fewest))
            fewest += 1
        while fewest > first and self.judge(fewest - 1).suffices >= SURE:
            fewest -= 1
        if fewest < last:
            self.judge(fewest + 1)  # what one more is good for
        return self._answered(fewest)

    def _prepare(self) -> str:
        """Settle how many requests a trace has. Return why no number can suffice, if none can.

        One replica serves some of the requests one at a time, which shows whether any number can
        meet the limits; and as many at once as fill it, which shows how long a queue needs to show
        its growth.
        """
        question, traffic = self._case.question, self._case.traffic
        n = question.requests
        if n is None and question.rate:
            n = requests_for(question.rate)
        trace = traffic.requests(n, question.seeds[0])
        some = trace[:: max(1, len(trace) // FEWEST)]
        alone, full = self._idle(some, 1), self._idle(some[: burst_size(self._case.config)], None)
        self._spent = alone.requests + full.requests
        fills_s = full.slowest_row_s + float(np.nansum(trace.think_s)) / len(trace.firsts)
        if rule := self._rule:  # until it follows the load
            fills_s += rule.look_back_period_s + rule.upscale_delay_s + self._case.layout.start_s
        span = float(np.ptp(trace.at))
        if rate := question.rate or (span and len(trace) / span):
            self._growth_needs = enough_requests(rate, fills_s)
        self._requests = len(trace)
        if question.requests is None and question.rate:
            self._requests = n = max(self._requests, self._growth_needs)
        self._arrivals_s = self._requests / rate if rate else 0.0
        self._case = self._case._replace(question=replace(question, requests=n))
        if alone.attainment >= question.attainment:
            return ""
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in question.slo.items())
        return (
            f"no number of replicas meets {limits}: of requests that come one at a time, each "
            f"alone on its replica, {100 * alone.attainment:.1f}% do; relax the limits, or use a "
            "faster engine"
        )

    def _idle(self, requests: Sequence[Request], users: int | None) -> Found:
        """One replica serves them: `users` at a time, or all at once. A later turn of a
        conversation comes as if it were alone, which is faster.
        """
        come: dict[str, Any] = {"at": 0.0, "users": users, "after": None, "think_s": None}
        layout = replace(self._layout(1), autoscaling=None)
        case = self._case._replace(layout=layout)
        return found(case, [each.model_copy(update=come) for each in requests], case.costs)

    def _answered(self, fewest: int | None, why_not: str = "") -> Answer:
        by_number = {n: by_seed.values() for n, by_seed in sorted(self._found.items())}
        return Answer(
            self._case.name,
            fewest,
            why_not,
            [self._judged[n] for n in sorted(self._judged)],
            {n: statistics.mean(each.attainment for each in of) for n, of in by_number.items()},
            {n: statistics.mean(self._grows(each) for each in of) for n, of in by_number.items()},
            self._spent + sum(each.requests for of in by_number.values() for each in of),
            self._rule is not None,
            self._requests,
            self._arrivals_s,
            self._growth_needs,
        )

    def _too_few(self, replicas: int) -> str:
        """Why neither so many suffice nor more would."""
        known = self._found[replicas].values()
        enough, growing = (sum(map(each, known)) for each in (self._suffices, self._grows))
        share = statistics.mean(each.attainment for each in known)
        if self._rule:
            fix = (
                "give --autoscale a higher max_replicas or shorter delays, or begin with more "
                "--replicas"
            )
        elif replicas == MOST:
            fix = "name a lower rate"
        else:
            fix = (
                "more are no better: the limits are within what chance and uncertain costs do; "
                "relax them"
            )
        number = f"{replicas} replica{'s' * (replicas > 1)}{' at most' * bool(self._rule)}"
        return (
            f"{number} suffice{'s' * (replicas == 1)} in only {enough} of {len(known)} traces, in "
            f"which {100 * share:.1f}% of the requests are within the limits and the queue grows "
            f"in {growing}; {fix}"
        )

    def judge(self, replicas: int) -> Judged:
        """So many replicas by all seeds."""
        if replicas in self._judged:
            return self._judged[replicas]
        self._serve(replicas, self._case.question.seeds)
        found = list(self._found[replicas].values())
        attained = [each.attainment for each in found]
        met, growing = (sum(map(each, found)) for each in (self._suffices, self._grows))
        self._say(
            f"{self._case.name}, {replicas} replica{'s' * (replicas > 1)}: "
            f"{100 * statistics.mean(attained):.1f}% within the limits, enough in {met} of "
            f"{len(found)} traces" + f", the queue grows in {growing}" * bool(growing)
        )
        self._judged[replicas] = Judged(
            replicas,
            attained,
            growing,
            statistics.mean(each.mean_replicas for each in found),
            statistics.mean(each.p99_ttft_ms for each in found),
            statistics.mean(each.p99_e2el_ms for each in found),
            met / len(found),
            wilson(met, len(found)),
            predicted(attained),
        )
        return self._judged[replicas]

    def _enough(self, replicas: int) -> bool:
        """By a few seeds, of which most must do."""
        seeds = self._case.question.seeds[:FEW]
        self._serve(replicas, seeds)
        suffices = [self._suffices(self._found[replicas][seed]) for seed in seeds]
        return 2 * sum(suffices) >= len(suffices)

    def _suffices(self, found: Found) -> bool:
        return found.attainment >= self._case.question.attainment and not self._grows(found)

    def _grows(self, found: Found) -> bool:
        return found.grows and self._requests >= self._growth_needs

    def _serve(self, replicas: int, seeds: Sequence[int]) -> None:
        known = self._found.setdefault(replicas, {})
        layout = self._layout(replicas)
        missing = [seed for seed in seeds if seed not in known]
        cases = [self._case._replace(layout=layout, seed=seed) for seed in missing]
        known.update(zip(missing, self._processes.map(serve, cases)))

    def _layout(self, replicas: int) -> Layout:
        """So many; of a fleet that autoscales at most, and at first those it begins with."""
        own = self._case.layout
        slow = {k: times for k, times in own.slow.items() if k < replicas}
        if (rule := self._rule) is None:
            return replace(own, replicas=replicas, slow=slow)
        first = max(rule.min_replicas, min(own.replicas, replicas))
        rule = replace(rule, max_replicas=max(rule.min_replicas, replicas))
        return replace(own, replicas=first, slow=slow, autoscaling=rule)


def wilson(met: int, n: int) -> tuple[float, float]:
    """The 95% interval of a probability of which `met` of n trials are known (Wilson, 1927)."""
    z = 1.959964
    centre = (met + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(met * (n - met) / n + z * z / 4)
    return max(0.0, round(centre - half, 9)), min(1.0, round(centre + half, 9))


def predicted(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value lies that comes about as these did: between the least and the most of
    them, with probability `coverage(n)` or more, whatever their distribution (order statistics;
    Wilks, 1941), as far as the costs are right.
    """
    return min(values), max(values)


def coverage(n: int) -> float:
    """Of an interval by n values (`predicted`)."""
    return (n - 1) / (n + 1)


def plan(
    cases: Sequence[Case], say: Callable[[str], None], processes: int | None = None
) -> list[Answer]:
    """The answer of each variant. Raises PlanError if none has one."""
    with ProcessPoolExecutor(processes) as pool:
        answers = [Planner(case, pool, say).answer() for case in cases]
    if all(answer.fewest is None for answer in answers):
        raise PlanError("; ".join(f"{answer.name}: {answer.why_not}" for answer in answers))
    return answers
