"""A simulated replica that is one iteration ahead: it plans and launches the next iteration while
its engine computes one, as `server.asynchronous.AsynchronousManager` does.
"""

from __future__ import annotations

from typing import Any

from scheduling.asynchronous import without_ended
from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration
from simulate.loop import END, PS, not_before
from simulate.replica import SimulatedReplica, Stretch


class AsynchronousReplica(SimulatedReplica):
    """A replica of which an iteration takes the longer of two times and not their sum: that of the
    engine, and that of the thread which answers, plans and launches. It computes one iteration at a
    time, without jumps.

    An iteration is applied when the one before has ended, with the time at which it will end. Stop
    strings, which a replayed trace has, are then known at once: no row is wasted as on a server.
    """

    def __init__(self, *args: Any, **settings: Any):
        self._answered: list[Inference] = []  # with the iteration that is computed now
        self._following: Stretch | None = None  # launched beside it
        super().__init__(*args, **settings | {"jump": False})

    @property
    def has_work(self) -> bool:
        return self._stretch is not None or super().has_work

    @property
    def _awaits_blocks(self) -> bool:
        return self._stretch is not None or super()._awaits_blocks

    def fail(self, error: ServingError) -> None:
        answered, self._answered, self._following = self._answered, [], None
        for inference, *_ in self._stretch.iteration.rows if self._stretch else ():
            times = inference.token_times
            if times and not_before(times[-1]) > self._loop.now:
                del times[-1], inference.tokens[-1]
        super().fail(error)
        for inference in answered:
            inference.error = error
        self._end(answered)

    def _expire(self) -> None:
        if self._stretch is None:  # else once it has ended
            super()._expire()

    def _plan(self) -> None:
        computes = self._stretch is not None
        super()._plan()
        if computes and self._following is None and self._planned_at != self._loop.now:
            self._land_next()  # nothing can be launched before

    def _begin(self, iteration: Iteration) -> None:
        now, before = self._loop.now, self._stretch
        begun = now if before is None else max(now, before.end(0))
        launched = Stretch(iteration, begun, self.costs.of(iteration), 0, 0, 0, 1)
        if before is None:
            self._compute(launched)
            self._plan_at(now + self.costs.between(iteration, 0))
        else:
            self._following = launched
            self._land_next()

    def _compute(self, stretch: Stretch) -> None:
        iteration = without_ended(stretch.iteration)
        self._stretch = stretch._replace(iteration=iteration)
        ids, end = self._generate(iteration), stretch.end(0) / PS
        self._answered = self.scheduler.apply(iteration, ids, end)

    def _land_next(self) -> None:
        """End the iteration that is computed now as soon as it has ended."""
        assert self._stretch is not None
        if self._next is not None:
            self._next.cancel()
        self._planned_at = None
        at = max(self._loop.now, self._free_at, self._stretch.end(0))
        self._next = self._loop.at(at, END, self._land)

    def _land(self) -> None:
        stretch, following = self._stretch, self._following
        assert stretch is not None
        self._next = self._stretch = self._following = None
        self._computed(stretch)
        self._free_at = self._loop.now + self.costs.between(stretch.iteration, len(self._answered))
        self._end(self._answered)
        self._expire()
        if following is not None:
            self._compute(following)
        if self.scheduler.has_work:
            self._plan_at(self._loop.now)
        elif self._stretch is not None:
            self._land_next()
