"""A simulated replica that is one iteration ahead: it plans and launches the next iteration while
its engine computes one, as `server.asynchronous.AsynchronousManager` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration
from simulate.loop import END, PS, not_before
from simulate.replica import SimulatedReplica, Stretch


class AsynchronousReplica(SimulatedReplica):
    """A replica of which an iteration takes the longer of two times and not their sum: that of the
    engine, and that of the thread which answers, plans and launches. It computes one iteration at a
    time, without jumps.

    An iteration is applied when it begins, with the time at which it will end. Stop strings, which
    a replayed trace has, are therefore known at once: no row is wasted as on a server.
    """

    def __init__(self, *args: Any, **settings: Any):
        self._launched: list[tuple[Stretch, list[Inference]]] = []  # with what each answers
        self._engine_free_at = 0
        self._n_early = 0  # requests that are over before their last token is
        super().__init__(*args, **settings | {"jump": False})

    @property
    def has_work(self) -> bool:
        return bool(self._launched or self._n_early) or super().has_work

    @property
    def _awaits_blocks(self) -> bool:
        return bool(self._launched) or super()._awaits_blocks

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
            self._land_next()  # nothing can be launched before

    def _begin(self, iteration: Iteration) -> None:
        begun = max(self._loop.now, self._engine_free_at)
        stretch = Stretch(iteration, begun, self.costs.of(iteration), 0, 0, 0, 1)
        self._engine_free_at = end = stretch.end(0)
        answered = self.scheduler.apply(iteration, self._generate(iteration), end / PS)
        self._launched.append((stretch, answered))
        self._stretch = self._launched[0][0]
        if len(self._launched) > 1:
            self._land_next()
        else:
            self._plan_at(self._loop.now + self.costs.between(iteration, 0))

    def _land_next(self) -> None:
        """End the iteration that is computed now as soon as it has ended."""
        if self._next is not None:
            self._next.cancel()
        self._planned_at = None
        at = max(self._loop.now, self._free_at, self._launched[0][0].end(0))
        self._next = self._loop.at(at, END, self._land)

    def _land(self) -> None:
        stretch, answered = self._launched.pop(0)
        self._stretch = self._launched[0][0] if self._launched else None
        self._next = None
        self._computed(stretch)
        self._free_at = self._loop.now + self.costs.between(stretch.iteration, len(answered))
        self._end(answered)
        if self.scheduler.has_work:
            self._plan_at(self._loop.now)
        elif self._launched:
            self._land_next()

    def _end(self, inferences: Iterable[Inference]) -> None:
        """End inferences, none before its last token; a failed one at once."""
        now, over = self._loop.now, list[Inference]()
        for inference in inferences:
            times = inference.token_times
            while inference.error is not None and times and not_before(times[-1]) > now:
                del times[-1], inference.tokens[-1]
            if times and (last := not_before(times[-1])) > now:
                inference.answered_at = times[-1]
                self._n_early += 1
                self._loop.at(last, END, self._end_early, inference)
            else:
                over.append(inference)
        super()._end(over)

    def _end_early(self, inference: Inference) -> None:
        self._n_early -= 1
        super()._end([inference])
