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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from client.progress import Progress, ProgressStep
from client.results import share
from compare.analysis import Estimate, difference
from compare.sweep import enough_requests
from simulate.space import Candidate, Space
from simulate.trial import SAMPLE, Question, Trial, TrialResult

SURE = 0.95  # share of the traces in which a setting must meet the limits
FEW = 3  # traces of the first round
WITHOUT_ONE = 4  # settings of which the best without one limit is looked for
LONG_S = 60.0  # seconds of arrivals, unless --numsamples gives a number of requests
FEWEST, MOST_REQUESTS = SAMPLE, 20_000  # more where the growth of a queue needs them


@dataclass
class Search:
    """Looks for the best of a space, and keeps the results of all trials.

    trial: of any seed and setting, which are replaced. calls: maps, as `map` does.
    """

    space: Space
    trial: Trial
    calls: Callable[..., Iterator[Any]]
    progress: Progress
    step: ProgressStep
    best: Candidate | None = None
    why_not: str = ""  # none is the best
    stopped: KeyboardInterrupt | None = None
    without: dict[str, Candidate | None] = field(default_factory=dict)  # the best without a limit
    results: dict[str, dict[int, TrialResult]] = field(default_factory=dict)  # by name and seed
    tried: list[Candidate] = field(default_factory=list)
    growth_needs: int = 0  # requests that show whether a queue grows; with fewer it is not judged
    requests: int = 0  # requests of the first trace

    @property
    def question(self) -> Question:
        return self.trial.question

    @property
    def allowed(self) -> int:
        """Traces in which a setting may miss the limits."""
        return math.floor((1 - SURE) * len(self.question.seeds) + 1e-9)

    def run(self) -> None:
        """Find the best, and the best without each limit; Ctrl-C keeps what was tried, if anything
        was (`stopped`). Raises WorkloadError.
        """
        try:
            self._run()
        except KeyboardInterrupt as stopped:
            self.tried = [one for one in self.tried if self.results[one.name]]
            if not self.tried:
                raise
            self.stopped, self.why_not = stopped, "none was found to be the best by then"

    def _run(self) -> None:
        self._prepare()
        find = self._fewest if self.space.replicas else self._best
        self.best = find("")
        if not self.best:
            self.why_not = self._nearest()
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

    def share(self, one: Candidate) -> float:
        """Return the mean share of requests within all limits."""
        return statistics.fmean(each.shares[""] for each in self.results[one.name].values())

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
            missed = {
                one.name: self.misses(one, without) / len(self.results[one.name]) for one in able
            }
            able.sort(
                key=lambda one: (n < len(seeds) and missed[one.name], -self._score(one, without))
            )
            near = [one for one in able if not self._is_worse(able[0], one, without)]
            most = math.ceil(len(racing) / 2) if n < len(seeds) else 1
            left = near[: min(most, WITHOUT_ONE) if without else most]
            if len(racing) > 1 and not without:
                self.progress.say(
                    f"{len(racing)} settings, {n} traces each: {len(racing) - len(able)} cannot "
                    f"meet the limits, {len(able) - len(near)} surely worse, "
                    f"{len(near) - len(left)} more behind"
                )
            if n == len(seeds) or not left:
                return left[0] if left else None
            n *= 2

    def _is_worse(self, best: Candidate, one: Candidate, without: str) -> bool:
        gap = self.gap(best, one, without).times(self.question.sign)
        return gap.shown and gap.mean < 0

    def _fewest(self, without: str) -> Candidate | None:
        """Return the best setting with the fewest replicas with which one meets the limits. Growing
        steps and bisection find the fewest that few traces do not rule out; from there on up.
        """
        numbers = self.space.replicas
        last = numbers.index(self.best.replicas) if without and self.best else len(numbers) - 1

        def is_able(i: int) -> bool:
            settings = [one.times(numbers[i]) for one in self.space.settings]
            self._serve(settings, self.question.seeds[:FEW])
            return any(self.misses(one, without) <= self.allowed for one in settings)

        least, most, step = -1, 0, 1
        while most < last and not is_able(most):
            least, most, step = most, min(most + step, last), 2 * step
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if is_able(middle) else (middle, most)
        able = (self._best(without, number) for number in numbers[most : last + 1])
        return next(filter(None, able), None)

    def _nearest(self) -> str:
        """Return in words how near the limits were."""
        nearest = self.sentence(max(self.tried, key=self.share))
        return (
            f"none meets the limits; the nearest is {nearest}; relax the limits, lower the rate, "
            "or add replicas to --find"
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
        own = self.trial.layout
        slow = {k: times for k, times in own.slow.items() if k < one.replicas}
        layout = replace(own, replicas=one.replicas, slow=slow)
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
        self.tried += [one for one in settings if not self.results[one.name]]
        trials = [self._trial(one, seed) for one, seed in missing]
        for (one, seed), result in zip(missing, self.calls(Trial.serve, trials)):
            self.results[one.name][seed] = result
            step.ended += 1
        if self.space.replicas:
            self.progress.say(self.sentence(min(settings, key=self.misses)))

    def sentence(self, one: Candidate) -> str:
        """Return in words how a setting did."""
        results = self.results[one.name].values()
        n, growing = len(results), sum(map(self.grows, results))
        text = f"{one.name}: {share(100 * self.share(one), 1)}% within the limits, enough in "
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
