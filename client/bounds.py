"""Bounds of each replay, at which it ends though requests are left; and its warm-up, which no
measure counts: the same requests of a trace in every variant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from client.draws import WorkloadError
from client.load import TICK_S, Watch
from client.outcomes import Outcome
from client.results import Result
from client.traces import Trace


@dataclass(frozen=True, slots=True)
class Bounds:
    """max_seconds: from the first send. max_failures: failed requests. warm_up: requests that no
    measure counts, those that are due first.
    """

    max_seconds: float | None = None
    max_failures: int | None = None
    warm_up: int = 0

    def check(self, n: int) -> None:
        """Raise WorkloadError if the warm-up leaves none of n requests."""
        if self.warm_up >= n:
            raise WorkloadError(
                f"--warm-up {self.warm_up} leaves none of {n} requests to measure; name fewer"
            )

    def warming_up(self, trace: Trace) -> np.ndarray:
        """Return the numbers of the requests of the warm-up."""
        due = trace.at.copy()
        for i in np.flatnonzero(trace.after >= 0):  # at the earliest
            due[i] = due[trace.after[i]] + trace.think_s[i]
        return np.argsort(due, kind="stable")[: self.warm_up]


UNBOUNDED = Bounds()


class BoundedWatch(Watch):
    """Ends a replay at its bounds, counts requests in flight at every tick, and notifies another
    watch of all events. cut: the flag of the bound that was reached.
    """

    def __init__(self, other: Watch, bounds: Bounds):
        self._other, self._bounds, self._failures = other, bounds, 0
        self.in_flight = 0
        self.ticks = self.counted = 0  # counted: in flight at all ticks together
        self.cut = ""

    def sent(self) -> None:
        self.in_flight += 1
        self._other.sent()

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self._other.ended(outcome)
        self._failures += bool(outcome.error)
        if outcome.error and self._failures == self._bounds.max_failures:
            self._end(f"--max-failures {self._failures}")

    def tick(self) -> None:
        self.skip(1)
        self._other.tick()

    def skip(self, ticks: int) -> None:
        most_s = self._bounds.max_seconds
        if most_s and self.ticks + ticks >= (most := math.ceil(most_s / TICK_S)):
            ticks = most - self.ticks
            self._end(f"--max-seconds {most_s:g}")
        self.ticks += ticks
        self.counted += ticks * self.in_flight

    def _end(self, cut: str) -> None:
        self.cut, self.over = self.cut or cut, True


def cut_in_words(name: str, results: Sequence[Result]) -> str:
    """Return where replays of a server were cut, and what is missing; empty if none was."""
    if not (cuts := [cut for result in results if (cut := result.cut)]):
        return ""
    bounds = " and ".join(dict.fromkeys(cut["at"] for cut in cuts))
    of = f" in {len(cuts)} of {len(results)} seeds" if len(results) > 1 else ""
    in_flight, unsent = (sum(cut[what] for cut in cuts) for what in ("in_flight", "unsent"))
    left = f"{in_flight:,} requests in flight and {unsent:,} not sent"
    return f"{name} ended at {bounds}{of}, with {left}"


def warm_up_in_words(n: int) -> str:
    return (
        f"The first {n:,} requests of each trace were its warm-up: latencies, throughput, goodput "
        "and failures are of the others; rows and what the server itself counts are of all."
    )
