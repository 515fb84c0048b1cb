"""The handler thread one iteration ahead: it plans and launches the next iteration while the engine
computes one, so that a GPU does not wait for plans and answers.

    plan and launch k + 1  →  wait for k's ids, answer  →  apply k + 1  →  plan and launch k + 2 → …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from batching import BatchingManager
from scheduling.asynchronous import fill, forget_pending, pending, reads_ids, without_ended
from scheduling.inference import Generator, Inference, Iteration, State
from scheduling.records import IterationRecord


class Launched(NamedTuple):
    """An iteration that the engine computes, and that is applied as far as it is known.

    ids: waits for them. answered: the inferences to answer with them.
    """

    iteration: Iteration
    begun: float
    ids: Callable[[], list[int]]
    answered: list[Inference]


class AsynchronousManager(BatchingManager):
    """A manager that plans an iteration before it knows the ids of the one before.

    Texts are those of a `BatchingManager`. A request that arrives while an iteration is computed
    waits for the end of the next one, too. One that a stop string ends has one row too many, and
    one that is cancelled, or whose deadline passes, ends with the iteration that is computed then.
    """

    def __init__(self, *args: object, **settings: object):
        self._launched: Launched | None = None
        self._ends: list[Callable[[], list[Inference]]] = []  # for when no token is pending
        self._ended_at = 0.0  # when the last iteration ended
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    def _end(self, ended: Callable[[], list[Inference]]) -> None:
        with self._changed:
            if self._launched is not None:
                self._ends.append(ended)
            else:
                super()._end(ended)

    def _serve(self, generator: Generator) -> None:
        try:
            while (iteration := self._plan(generator, not self._launched)) or self._launched:
                if iteration is not None:
                    self._launch(generator, iteration)
                else:
                    self._land()
        finally:  # what was launched is answered, whatever ends the thread
            self._land()

    def _launch(self, generator: Generator, iteration: Iteration) -> None:
        """Begin to compute an iteration, land the one before, and apply this one."""
        if self._launched is not None and reads_ids(iteration):
            self._land(iteration)
            iteration = without_ended(iteration)
            if all(row.idle for row in iteration.rows) and not iteration.loads:
                return  # no request waits for it, and it would fail once more
        at = self.clock()
        if self._launched is None:
            self._iteration_started_at = at
        try:
            ids = generator.launch(iteration)
            self._land(iteration)
            with self._changed:  # lest a cancellation come between
                iteration = without_ended(iteration)
                self._iteration_started_at = None
                if not all(row.idle for row in iteration.rows):  # else no request waits for it
                    answered = self._apply(iteration, pending(iteration))
                    begun = self._iteration_started_at = max(at, self._ended_at)
                    self._launched = Launched(iteration, begun, ids, answered)
        except Exception as error:
            self._land(iteration)
            self._iteration_started_at = None
            failed = self._lost(error, iteration)
            self._over(IterationRecord(at, self.clock() - at, iteration), failed)

    def _land(self, *following: Iteration) -> None:
        """Wait for the iteration that is computed now, if there is one, answer, and end what was to
        end meanwhile. If it fails, so does the one that follows, which has ids from it.
        """
        if self._launched is None:
            return
        iteration, begun, ids, _ = self._launched
        try:
            over = self._filled(ids())
        except Exception as error:
            over = self._lost(error, iteration, *following)
        self._iteration_started_at, self._ended_at = None, self.clock()
        self._over(IterationRecord(begun, self._ended_at - begun, iteration), over)
        with self._changed:
            ends, self._ends = self._ends, []
            for ended in ends:
                self._end(ended)

    def _filled(self, ids: Sequence[int]) -> list[Inference]:
        """Take the ids of the iteration that was computed; return the inferences to answer."""
        with self._changed:
            assert self._launched is not None
            iteration, _, _, answered = self._launched
            now = self.clock()
            over = answered + fill(self._scheduler, iteration, ids, now)
            for inference in over:
                inference.answered_at = now
            self._launched = None
            self._failures.clear()
            return over

    def _lost(self, error: Exception, *iterations: Iteration) -> list[Inference]:
        """End the inferences of iterations whose ids will not be known; return those to answer."""
        rows = [row.inference for each in iterations for row in each.rows]
        with self._changed:
            launched, self._launched = self._launched, None
            forget_pending(rows)
            if launched is None:
                return self._fail(rows, error)
            # the last token of these will not come: they end once more, with an error
            for each in (ended := {*launched.answered} & {*rows}):
                each.state = State.RUNNING
            # others have all their tokens, and only now their turn to be answered
            held = [each for each in launched.answered if each not in ended]
            for each in held:
                each.answered_at = self.clock()
            # blocks that were not computed may have been found by a plan since, and are forgotten
            running = self._scheduler.running.values()
            rows += [i for i in running if i.prefix is not None and i.prefix.n_blocks]
            failed = self._fail(rows, error) + held
            self._scheduler.forget_prefixes()
            return failed
