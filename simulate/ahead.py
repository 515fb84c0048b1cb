"""A simulated replica that is one iteration ahead: it plans and launches the next iteration while
its engine computes one, as `ahead.AheadManager` does.
"""

from __future__ import annotations

from typing import Any

from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration
from simulate.loop import END
from simulate.replica import SimulatedReplica, Stretch
from simulate.time import PS


class AheadReplica(SimulatedReplica):
    """A replica of which an iteration takes the longer of two times and not their sum: that of the
    engine, and that of the thread which answers, plans and launches. It computes one iteration at a
    time, without jumps.
    """

    def __init__(self, *args: Any, **settings: Any):
        self._launched: list[tuple[Stretch, list[Inference]]] = []  # with what each answers
        self._engine_free_at = 0
        self._host = 0  # from a plan to its launch
        super().__init__(*args, **settings | {"jump": False})

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or super().has_work

    def fail(self, error: ServingError) -> None:
        unanswered = [inference for _, answered in self._launched for inference in answered]
        self._launched = []
        super().fail(error)
        for inference in unanswered:
            inference.error = error
        self._end(unanswered)

    def _plan(self) -> None:
        n = len(self._launched)
        super()._plan()
        if n and n == len(self._launched) and self._planned_at != self._loop.now:
            self._land_at(0)  # nothing can be launched now

    def _begin(self, iteration: Iteration) -> None:
        launched_at = self._loop.now + self._host
        begun = max(launched_at, self._engine_free_at)
        time = self.costs.of(iteration)
        if self._noise is not None:
            time = self._noise.iteration(begun, time)
        stretch = Stretch(iteration, begun, time, 0, 0, 0, 1)
        self._engine_free_at = end = stretch.end(0)
        # it is known when it ends, so its tokens get their times at once
        answered = self.scheduler.apply(iteration, self._generate(iteration), end / PS)
        self._launched.append((stretch, answered))
        self._stretch = self._launched[0][0]
        if len(self._launched) > 1:
            self._land_at(launched_at)
        else:
            self._host = self._gap(iteration, 0)
            self._plan_at(launched_at)

    def _land_at(self, instant: int) -> None:
        """End the iteration that is computed now, at this instant if it has ended before."""
        if self._next is not None:
            self._next.cancel()
        self._planned_at = None
        instant = max(instant, self._loop.now, self._launched[0][0].end(0))
        self._next = self._loop.at(instant, END, self._land)

    def _land(self) -> None:
        stretch, answered = self._launched.pop(0)
        self._stretch = self._launched[0][0] if self._launched else None
        self._next = None
        self._computed(stretch)
        self._host = self._gap(stretch.iteration, len(answered))
        if not self._launched:
            self._free_at, self._host = self._loop.now + self._host, 0
        self._end(answered)
        if self.scheduler.has_work:
            self._plan_at(self._loop.now)
        elif self._launched:
            self._land_at(self._loop.now + self._host)

    def _gap(self, iteration: Iteration, answered: int) -> int:
        gap = self.costs.between(iteration, answered)
        return gap if self._noise is None else self._noise.gap(gap)
