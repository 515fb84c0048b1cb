"""The handler thread one iteration ahead: it plans and launches the next iteration while the engine
computes one, so that a GPU does not wait for plans and answers.

    plan and launch k + 1  →  wait for k's ids, answer, notify  →  plan and launch k + 2  → …
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from batching import BatchingManager
from scheduling.asynchronous import (
    Unknown,
    as_computed,
    fill,
    forget_unknown,
    is_known,
    known_to,
    reads_ids,
    unknown,
    unknown_of,
    without_ended,
)
from scheduling.errors import (
    Cancelled,
    DeadlinePassed,
    EngineFailed,
    GenerationFailed,
    ServingError,
)
from scheduling.inference import Generator, Inference, Iteration, State
from scheduling.records import IterationRecord
from scheduling.scheduler import EXITS
from scheduling.user_policies import described


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


class AsynchronousManager(BatchingManager):
    """A manager that plans an iteration before it knows the ids of the one before.

    Texts are those of a `BatchingManager`. A request that arrives while an iteration is computed
    waits for the end of the next one, too, and one that a stop string ends has one row too many.
    """

    def __init__(self, *args: object, **settings: object):
        self._launched: list[Launched] = []  # two at most, in order
        self._late: list[Inference] = []  # to answer once their tokens are known
        # those that failed while a plan may read their tokens; None: no plan does
        self._failed: list[Inference] | None = None
        self._ended_at = 0.0  # of the last iteration
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    def enqueue(self, inferences: Sequence[Inference]) -> None:
        for inference in inferences:
            if inference.stop is not None:
                inference.stop = known_to(inference.stop)
        super().enqueue(inferences)

    def cancel(self, inferences: Sequence[Inference]) -> None:
        super().cancel(inferences)
        with self._changed:
            self._end_unanswered(Cancelled("The request was cancelled."), inferences)

    def expire(self) -> None:
        super().expire()
        with self._changed:
            now = self.clock()
            late = [i for i in self._unanswered if i.deadline is not None and i.deadline <= now]
            self._end_unanswered(
                DeadlinePassed("The request's deadline passed before its answer."), late
            )

    def _serve(self, generator: Generator) -> None:
        while (iteration := self._planned(generator)) is not None or self._launched:
            if iteration is not None:
                if self._launched and reads_ids(iteration, self._scheduler.limits.block_size):
                    self._land()
                    iteration = without_ended(iteration)
                self._launch(generator, iteration)
            self._forget_failed()
            if iteration is None or len(self._launched) > 1:
                self._land()

    def _planned(self, generator: Generator) -> Iteration | None:
        """Return the next iteration; None if there is nothing to launch before the one that is
        computed has ended, or ever.
        """
        with self._changed:
            self._failed = []
        try:
            return self._plan(generator)
        except _Nothing:
            return None
        except EngineFailed:  # what was launched before is answered
            self._forget_failed()
            while self._launched:
                self._land()
            raise

    def _wait(self, seconds: float | None) -> None:
        if self._launched:
            raise _Nothing
        super()._wait(seconds)

    def _launch(self, generator: Generator, iteration: Iteration) -> None:
        """Begin to compute an iteration, and apply it as far as it is known."""
        at, before = self.clock(), [len(row.inference.tokens) for row in iteration.rows]
        if not self._launched:
            self._iteration_started_at = at
        try:
            ids = generator.launch(iteration)
            n = sum(row.samples for row in iteration.rows)
            answered = self._apply(iteration, [unknown(place) for place in range(n)])
        except Exception as error:
            self._land()
            self._iteration_started_at = None
            failed = self._fail([row.inference for row in iteration.rows], error)
            self._over(IterationRecord(at, self.clock() - at, iteration), failed)
            return
        tokens = unknown_of(iteration, before)
        self._launched.append(Launched(iteration, at, ids, tokens, answered))

    def _land(self) -> None:
        """Wait for the iteration that is computed now, if there is one, and answer."""
        if not self._launched:
            return
        iteration, at, wait, tokens, _ = self._launched[0]
        try:
            over = self._filled(wait())
        except Exception as error:
            over = self._fail_launched(error)
        begun, self._ended_at = max(at, self._ended_at), self.clock()
        self._iteration_started_at = self._ended_at if self._launched else None
        computed = as_computed(iteration, tokens)
        self._over(IterationRecord(begun, self._ended_at - begun, computed), over)

    def _filled(self, ids: Sequence[int]) -> list[Inference]:
        """Take the ids of the iteration that was computed; return the inferences to answer."""
        with self._changed:
            scheduler, now = self._scheduler, self.clock()
            over = fill(scheduler, self._launched[0].tokens, ids, now)
            over += self._launched.pop(0).answered
            as_a_whole = scheduler.policy.request_level
            for following in self._launched:  # stopped, and planned to end later
                stopped = [each for each in following.answered if each.stopped and is_known(each)]
                over += [each for each in stopped if each.streamed or not as_a_whole]
            over += [inference for inference in self._late if is_known(inference)]
            self._late = [inference for inference in self._late if not is_known(inference)]
            over = [inference for inference in over if inference.error is None]
            for inference in over:
                inference.answered_at = now
            for following in self._launched:
                following.answered[:] = [each for each in following.answered if each not in over]
            self._failures.clear()
            return over

    def _fail_launched(self, error: Exception) -> list[Inference]:
        """End what is launched, since each iteration has ids from the one before it."""
        rows = [row.inference for each in self._launched for row in each.iteration.rows]
        failed = self._fail(rows, error)
        with self._changed:
            self._end_unanswered(GenerationFailed(f"Generation failed: {described(error)}"))
            self._scheduler.forget_prefixes()  # which may not have been computed
            self._launched = []
        return failed

    def _fail_all(self, error: ServingError) -> None:
        super()._fail_all(error)
        self._end_unanswered(error)

    @property
    def _unanswered(self) -> list[Inference]:
        """Requests that lack nothing but the ids of their last tokens."""
        return [i for each in self._launched for i in each.answered if i.error is None] + self._late

    def _end_unanswered(
        self, error: ServingError, among: Collection[Inference] | None = None
    ) -> None:
        """End those, or those among some, with an error."""
        lost = [each for each in self._unanswered if among is None or each in among]
        for inference in lost:
            inference.error, inference.state = error, EXITS.get(type(error), State.FAILED)
        self._late = [inference for inference in self._late if inference.error is None]
        self._answer(lost)

    def _answer(self, inferences: Iterable[Inference]) -> None:
        known = list[Inference]()
        for inference in inferences:
            if inference.error is not None:
                self._forget(inference)
            is_late = inference.error is None and not is_known(inference)
            (self._late if is_late else known).append(inference)
        super()._answer(known)

    def _forget(self, inference: Inference) -> None:
        """Remove the unknown tokens of an inference that failed, as soon as no plan reads them."""
        if self._failed is not None:
            self._failed.append(inference)
        else:
            self._scheduler.completion_tokens -= forget_unknown(inference)

    def _forget_failed(self) -> None:
        with self._changed:
            failed, self._failed = self._failed or (), None
            for inference in failed:
                self._forget(inference)
