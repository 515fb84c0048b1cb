"""The search of --find: of the settings that meet all limits the best by a measure, with the fewest
replicas if these are asked for.

A setting meets the limits if it does in SURE of the traces; one that no longer can is ruled out.
The others race (successive halving: Karnin et al., ICML 2013): all serve the same few traces, then
the better half twice as many, and so on. A setting leaves sooner once it is surely worse than the
best: by the interval of their differences, paired by trace. Knows no page and no command line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from client.progress import Progress, Step
from compare.analysis import Estimate, difference
from compare.sweep import enough_requests
from simulate.space import Candidate, Space
from simulate.trial import SAMPLE, Question, Trial, TrialResult

SURE = 0.95  # share of the traces in which a setting must meet the limits
FEW = 3  # traces of the first round
WITHOUT_ONE = 4  # settings of which the best without one limit is looked for
LONG_S = 60.0  # of arrivals, unless --numsamples gives a number of requests
FEWEST, MOST_REQUESTS = SAMPLE, 20_000  # more where the growth of a queue needs them
Calls = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Round:
    """Settings that served so many traces, and how many left, by why."""

    traces: int
    settings: int
    ruled_out: int
    surely_worse: int
    behind: int


@dataclass
class Search:
    """Looks for the best of a space, and keeps the results of all trials.

    trial: of any seed and setting, which are replaced. calls: maps, as `map` does.
    """

    space: Space
    trial: Trial
    calls: Calls
    progress: Progress
    step: Step
    best: Candidate | None = None
    why_not: str = ""  # none is the best
    without: dict[str, Candidate | None] = field(default_factory=dict)  # the best without a limit
    rounds: list[Round] = field(default_factory=list)
    results: dict[str, dict[int, TrialResult]] = field(default_factory=dict)  # by name and seed
    tried: list[Candidate] = field(default_factory=list)
    growth_needs: int = 0  # requests that show whether a queue grows; with fewer it is not judged
    requests: int = 0  # of the first trace

    @property
    def question(self) -> Question:
        return self.trial.question

    @property
    def allowed(self) -> int:
        """Traces in which a setting may miss the limits."""
        return math.floor((1 - SURE) * len(self.question.seeds) + 1e-9)

    def run(self) -> None:
        """Find the best, and the best without each limit. Raises WorkloadError."""
        self._prepare()
        find = self._fewest if self.space.replicas else self._best
        self.best = find("")
        if not self.best:
            self.why_not = self.why_not or self._nearest()
        for limit in self.question.slo:
            self.without[limit] = find(limit)
        if not self.space.replicas:
            self._serve([self.space.default], self.question.seeds)

    # ---- what results say

    def misses(self, one: Candidate, without: str = "") -> int:
        """Count the traces in which a setting does not meet the limits, or its queue grows."""
        least, of_trace = self.question.attainment, self.results.get(one.name, {}).values()
        return sum(not each.meets(least, without) or self.grows(each) for each in of_trace)

    def grows(self, result: TrialResult) -> bool:
        return result.queue_grows and self.requests >= self.growth_needs

    def values(self, one: Candidate, without: str = "") -> list[float]:
        """Return the measure of each trace, by seed."""
        return [each.values[without] for _, each in sorted(self.results[one.name].items())]

    def gap(self, one: Candidate, other: Candidate, without: str = "") -> Estimate:
        """Return other - one, paired by the traces that both served."""
        first, second = self.values(one, without), self.values(other, without)
        n = min(len(first), len(second))
        return difference(first[:n], second[:n])

    def ranked(self) -> list[Candidate]:
        """Return all that were tried, the best first: by replicas, traces, misses and measure."""

        def place(one: Candidate) -> tuple[float, ...]:
            n = len(self.results[one.name])
            first = not self.is_best(one), one.replicas if self.space.replicas else 0, -n
            return *first, self.misses(one), -self._score(one)

        return sorted(self.tried, key=place)

    def is_best(self, one: Candidate) -> bool:
        return self.best is not None and one.name == self.best.name

    def _score(self, one: Candidate, without: str = "") -> float:
        return self.question.sign * statistics.fmean(self.values(one, without))

    # ---- the search

    def _best(self, without: str, replicas: int = 1) -> Candidate | None:
        """Return the best setting that meets the limits; None if none does."""
        settings = self.space.settings
        if self.space.replicas:
            settings = [one.times(replicas) for one in settings]
        while left := [one for one in settings if self.misses(one, without) <= self.allowed]:
            if best := self._race(left, without):
                return best
        return None

    def _race(self, left: Sequence[Candidate], without: str) -> Candidate | None:
        """Return the winner; None if all that were not behind are ruled out."""
        seeds, n = self.question.seeds, FEW
        while True:
            racing, n = left, min(n, len(seeds))
            self._serve(racing, seeds[:n])
            able = [one for one in racing if self.misses(one, without) <= self.allowed]
            misses = {one.name: self.misses(one, without) * (n < len(seeds)) for one in able}
            able.sort(key=lambda one: (misses[one.name], -self._score(one, without)))
            near = [one for one in able if not self._is_worse(able[0], one, without)]
            most = math.ceil(len(racing) / 2) if n < len(seeds) else 1
            left = near[: min(most, WITHOUT_ONE) if without else most]
            if len(racing) > 1 and not without:
                counts = [len(each) for each in (racing, able, near, left)]
                self._report(Round(n, counts[0], *(a - b for a, b in pairwise(counts))))
            if n == len(seeds) or not left:
                return left[0] if left else None
            n *= 2

    def _is_worse(self, best: Candidate, one: Candidate, without: str) -> bool:
        gap = self.gap(best, one, without).times(self.question.sign)
        return gap.shown and gap.mean < 0

    def _report(self, done: Round) -> None:
        self.rounds.append(done)
        self.progress.say(
            f"{done.settings} settings, {done.traces} traces each: {done.ruled_out} cannot meet "
            f"the limits, {done.surely_worse} surely worse, {done.behind} more behind"
        )

    def _fewest(self, without: str) -> Candidate | None:
        """Return the best setting with the fewest replicas with which one meets the limits: by
        growing steps and bisection, first with few traces.
        """
        numbers, seeds = self.space.replicas, self.question.seeds
        found: dict[int, Candidate | None] = {}
        last = len(numbers) - 1
        if without and self.best:
            last = numbers.index(self.best.replicas)

        def likely(i: int) -> bool:
            settings = [one.times(numbers[i]) for one in self.space.settings]
            self._serve(settings, seeds[:FEW])
            return any(2 * self.misses(one, without) <= len(seeds[:FEW]) for one in settings)

        def surely(i: int) -> bool:
            found[i] = self._best(without, numbers[i])
            return found[i] is not None

        at = 0
        for enough, traces, most in ((likely, FEW, FEW // 2), (surely, len(seeds), self.allowed)):
            if not enough(at) and (why := self._never(seeds[:traces], most, without)):
                self.why_not = self.why_not or why
                return None
            if (near := _fewest(enough, at, last)) is None:
                return None
            at = near
        while at and surely(at - 1):
            at -= 1
        return found[at]

    def _never(self, seeds: Sequence[int], most: int, without: str) -> str:
        """Return why no number of replicas is enough, if requests that are alone miss the limits in
        more than `most` of these traces.
        """
        alone = [one._replace(replicas=0, name=f"{one.name}, alone") for one in self.space.settings]
        if any(".py:" in one.config.mode for one in alone):  # a policy may be faster beside others
            return ""
        self._serve(alone, seeds)
        if (fewest := min(self.misses(one, without) for one in alone)) <= most:
            return ""
        least = self.question.attainment
        results = [each for one in alone for each in self.results[one.name].values()]
        unmet = [name for name in self.question.slo if max(r.within[name] for r in results) < least]
        return (
            f"no number of replicas meets {self.question.limits(unmet)}: alone on an idle replica, "
            f"{_percent(results)} of the requests are within the limits, enough in "
            f"{len(seeds) - fewest} of {len(seeds)} traces; relax them, or use a faster engine"
        )

    def _nearest(self) -> str:
        """Return in words how near the limits were."""

        def share(one: Candidate) -> float:
            return statistics.fmean(each.shares[""] for each in self.results[one.name].values())

        return (
            f"none meets the limits; the nearest is {self.sentence(max(self.tried, key=share))}; "
            "relax the limits, lower the rate, or add replicas to --find"
        )

    # ---- trials

    def _prepare(self) -> None:
        """Determine how many requests a trace has. A server serves as many at once as fill it,
        which shows how long a queue needs to show its growth.
        """
        question, traffic = self.question, self.trial.traffic
        n = question.requests
        if n is None and question.rate:
            n = min(MOST_REQUESTS, max(FEWEST, math.ceil(LONG_S * question.rate)))
        self.trial = self.trial._replace(question=replace(question, requests=n))
        trace = traffic.requests(n, question.seeds[0])
        fills = self.calls(
            Trial.fills_s, [self._trial(one, question.seeds[0]) for one in self.space.settings]
        )
        fills_s = max(fills) + float(np.nansum(trace.think_s)) / len(trace.firsts)
        span, self.requests = float(np.ptp(trace.at)), len(trace)
        if rate := question.rate or (span and len(trace) / span):
            self.growth_needs = enough_requests(rate, fills_s)
        if question.requests is None and question.rate:
            self.requests = n = max(len(trace), self.growth_needs)
        self.trial = self.trial._replace(question=replace(question, requests=n))

    def _trial(self, one: Candidate, seed: int) -> Trial:
        """Return a setting's trial with a seed's trace."""
        own, n = self.trial.layout, max(1, one.replicas)
        slow = {k: times for k, times in own.slow.items() if k < n}
        layout = replace(own, replicas=n, slow=slow)
        return self.trial._replace(name=one.name, config=one.config, layout=layout, seed=seed)

    def _serve(self, settings: Sequence[Candidate], seeds: Sequence[int]) -> None:
        """Serve these traces; none is served twice."""
        missing = [
            (one, seed)
            for one in settings
            for seed in seeds
            if seed not in self.results.setdefault(one.name, {})
        ]
        if not missing:
            return
        n, step = len(self.question.seeds), self.step
        step.text = settings[0].name if len(settings) == 1 else f"{len(settings)} settings"
        step.text += f", {len(seeds)} traces"
        step.total = step.ended + len(missing) + _expected(len(settings), len(seeds), n)
        call = Trial.serve if settings[0].replicas else Trial.alone
        self.tried += [one for one in settings if one.replicas and not self.results[one.name]]
        trials = [self._trial(one, seed) for one, seed in missing]
        for (one, seed), result in zip(missing, self.calls(call, trials)):
            self.results[one.name][seed] = result
            step.ended += 1
        if self.space.replicas:
            self.progress.say(self.sentence(min(settings, key=self.misses)))

    def sentence(self, one: Candidate) -> str:
        """Return in words how a setting did."""
        results = self.results[one.name].values()
        n, growing = len(results), sum(map(self.grows, results))
        text = f"{one.name}: {_percent(results)} within the limits, enough in "
        text += f"{n - self.misses(one)} of {n} traces"
        return text + f", the queue grows in {growing}" * bool(growing)


def _expected(settings: int, traces: int, most: int) -> int:
    """Return how many trials halving still needs at most, after so many traces of settings."""
    total = 0
    while traces < most:
        settings, before = math.ceil(settings / 2), traces
        traces = min(2 * traces, most)
        total += settings * (traces - before)
    return total


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


def _percent(results: Collection[TrialResult]) -> str:
    """Return the share of requests within all limits."""
    return f"{100 * statistics.fmean(each.shares[''] for each in results):.1f}%"


def wilson(met: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of a probability, known by `met` of n trials (Wilson, 1927)."""
    z = 1.959964
    centre = (met + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(met * (n - met) / n + z * z / 4)
    return max(0.0, round(centre - half, 9)), min(1.0, round(centre + half, 9))
