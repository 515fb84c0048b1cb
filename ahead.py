"""The handler thread one iteration ahead: it plans and launches the next iteration while the engine
computes one, so that a GPU does not wait for plans and answers.

    plan and launch k + 1  →  wait for k's ids, answer, notify  →  plan and launch k + 2  → …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from batching import BatchingManager
from scheduling.ahead import (
    Unknown,
    as_computed,
    fill,
    forget_unknown,
    is_known,
    known_to,
    launched,
    reads_ids,
    unknown,
    unknown_of,
    without_ended,
)
from scheduling.errors import GenerationFailed, ServingError
from scheduling.inference import Generator, Inference, Iteration, State
from scheduling.policies.own import described
from scheduling.records import IterationRecord


class Launched(NamedTuple):
    """An iteration that the engine computes, or will when it has computed the one before.

    ids: waits for them. answered: the inferences to answer once `tokens` are known.
    """

    iteration: Iteration
    at: float
    ids: Callable[[], list[int]]
    tokens: list[Unknown]
    answered: list[Inference]


class _Nothing(Exception):
    """Nothing can be launched beside the iteration that is computed."""


class AheadManager(BatchingManager):
    """A manager that plans an iteration before it knows the ids of the one before.

    Texts are those of a `BatchingManager`. A request that arrives while an iteration is computed
    waits for the end of the next one, too, and one that a stop string ends has one row too many.
    """

    def __init__(self, *args: object, **settings: object):
        self._launched: list[Launched] = []  # two at most, in order
        self._late: list[Inference] = []  # to answer once their tokens are known
        self._ended_at = 0.0  # of the last iteration
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    def enqueue(self, inferences: Sequence[Inference]) -> None:
        for inference in inferences:
            if inference.stop is not None:
                inference.stop = known_to(inference.stop)
        super().enqueue(inferences)

    def _serve(self, generator: Generator) -> None:
        while (iteration := self._planned(generator)) is not None or self._launched:
            if iteration is not None:
                if self._launched and reads_ids(iteration):
                    self._land()
                    iteration = without_ended(iteration)
                self._launch(generator, iteration)
            if iteration is None or len(self._launched) > 1:
                self._land()

    def _planned(self, generator: Generator) -> Iteration | None:
        try:
            return self._plan(generator)
        except _Nothing:
            return None

    def _wait(self, seconds: float | None) -> None:
        if self._launched:
            raise _Nothing
        super()._wait(seconds)

    def _launch(self, generator: Generator, iteration: Iteration) -> None:
        """Begin to compute an iteration, and apply it as far as it is known."""
        at = self.clock()
        if not self._launched:
            self._iteration_started_at = at
        try:
            ids = launched(generator, iteration)
            n = sum(row.samples for row in iteration.rows)
            answered = self._apply(iteration, [unknown(place) for place in range(n)])
        except Exception as error:
            self._land()
            failed = self._fail([row.inference for row in iteration.rows], error)
            self._over(IterationRecord(at, self.clock() - at, iteration), failed)
            return
        self._launched.append(Launched(iteration, at, ids, unknown_of(iteration), answered))

    def _land(self) -> None:
        """Wait for the iteration that is computed now, if there is one, and answer."""
        if not self._launched:
            return
        iteration, at, wait, tokens, answered = self._launched[0]
        try:
            ids = wait()
        except Exception as error:
            over = self._fail_launched(error)
        else:
            with self._changed:
                now = self.clock()
                over = [inference for inference in answered if inference.error is None]
                over += fill(self._scheduler, tokens, ids, now)
                over += [inference for inference in self._late if is_known(inference)]
                self._late = [inference for inference in self._late if not is_known(inference)]
                for inference in over:
                    inference.answered_at = now
                del self._launched[0]
            self._failed_in_a_row.clear()
        begun, self._ended_at = max(at, self._ended_at), self.clock()
        self._iteration_started_at = self._ended_at if self._launched else None
        computed = as_computed(iteration, tokens)
        self._over(IterationRecord(begun, self._ended_at - begun, computed), over)

    def _fail_launched(self, error: Exception) -> list[Inference]:
        """End what is launched, since each iteration has ids from the one before it."""
        rows = [row.inference for each in self._launched for row in each.iteration.rows]
        failed = self._fail(rows, error)
        with self._changed:
            failure = GenerationFailed(f"Generation failed: {described(error)}")
            failed += self._end_unanswered(failure)
            self._launched = []
        return failed

    def _fail_all(self, error: ServingError) -> None:
        super()._fail_all(error)
        self._answer(self._end_unanswered(error))

    def _end_unanswered(self, error: ServingError) -> list[Inference]:
        """End, with an error, the requests that lack nothing but the ids of their last tokens."""
        lost = [i for each in self._launched for i in each.answered if i.error is None]
        lost += self._late
        for inference in lost:
            inference.error, inference.state = error, State.FAILED
        self._late = []
        return lost

    def _answer(self, inferences: Iterable[Inference]) -> None:
        known = list[Inference]()
        for inference in inferences:
            if inference.error is not None:
                forget_unknown(inference)
            (known if is_known(inference) else self._late).append(inference)
        super()._answer(known)
