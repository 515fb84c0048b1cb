"""The handler thread: plan → generate → apply, for as long as the server lives.

Knows threads and one lock. The policy decides what runs, the scheduler carries it out, and the
generator computes it. Knows no torch and no HTTP; the clock is handed in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from scheduling.errors import Cancelled, Draining, EngineFailed, GenerationFailed, ServingError
from scheduling.inference import Drafter, Generator, Inference, Iteration, State
from scheduling.planning import next_iteration, nothing_planned, rows_to_draft
from scheduling.records import IterationRecord, Observer, Snapshot
from scheduling.scheduler import Scheduler
from scheduling.user_policies import Deciding, described

# failed iterations in a row after which the engine is given up: a GPU, say, may never recover
FAILURES = 3
LONGEST_WAIT_S = 3600.0  # a thread's wait, within the platform's limit
log = logging.getLogger("effective_batching")

T = TypeVar("T")


class BatchingManager:
    """The handler thread, and the way in for every other thread.

    `load` builds the generator in the handler thread, so that the server answers /health meanwhile.

    The requests of a failed iteration, or all in flight if no iteration could be planned, are
    answered with GenerationFailed, and the loop goes on. A failure to load, FAILURES failures in a
    row, and any other end of the handler thread are for good: the error is kept in `failure`, all
    requests are answered with EngineFailed, and the calls given to `on_failure` are made. A plan
    that hangs keeps the lock; `deciding.hangs_because` reports it without.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        load: Callable[[], Generator],
        *,
        clock: Callable[[], float] = time.perf_counter,
        loop_interval_s: float = 0.0,
    ):
        self.clock = clock
        self.epoch_offset = time.time() - clock()  # clock + this = seconds since the epoch
        self.draining = False
        self.failure: BaseException | None = None
        self._scheduler = scheduler
        self._load = load
        self._observers: list[Observer] = []
        self._loop_interval_s = loop_interval_s
        self._failures: list[str] = []  # reasons of those in a row, the last one last
        self._failure_calls: list[Callable[[BaseException], None]] = []
        self._why_failed = ""
        self._loaded = threading.Event()
        self._closed = False
        self._iteration_started_at: float | None = None
        self.deciding = Deciding(
            [type(each) for each in (scheduler.policy, scheduler.order, scheduler.victim)], clock
        )
        self._changed = threading.Condition()
        # requests' threads stand in line for the lock: the handler thread waits for one, not 700
        self._line = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="handler", daemon=True)
        self._thread.start()

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of all that happens from now on, after earlier observers."""
        self._observers.append(observer)

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Register `call` for when the engine fails for good; call it at once if it has."""
        with self._changed:
            self._failure_calls.append(call)
            failure = self.failure
        if failure is not None:
            call(failure)

    # ---- called from any thread

    def enqueue(self, inferences: Sequence[Inference]) -> None:
        """Queue the inferences of a request, all or none.

        Raises InvalidRequest, Overloaded, Draining, EngineFailed or GenerationFailed.
        """
        with self._line, self._changed:
            if self._why_failed:
                raise self._refusal()
            if self.draining or self._closed:
                raise Draining("The server is shutting down; send the request to another one.")
            for inference in inferences:
                inference.done = threading.Event()
            self._changed.notify()
            try:
                with self.deciding:
                    self._scheduler.enqueue(inferences, self.clock())
            except ServingError:
                raise
            except Exception as error:
                queued = [inference for inference in inferences if inference.id >= 0]
                self._answer(self._fail(queued, error, deciding=True))
                raise GenerationFailed(f"Generation failed: {self._failures[-1]}") from error

    def cancel(self, inferences: Sequence[Inference]) -> None:
        """Give requests up: rows and blocks are free before the next iteration.

        Those already over are left alone.
        """
        error = Cancelled("The request was cancelled.")
        with self._line:
            self._end(lambda: self._scheduler.fail(inferences, error, self.clock()))

    def expire(self) -> None:
        """End requests whose deadline has passed: an iteration, or loading, may take long."""
        with self._line:
            self._end(lambda: self._scheduler.expire(self.clock()))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: nothing computed so far is found any more."""
        self.inspect(lambda scheduler: scheduler.forget_prefixes())

    def drain(self) -> None:
        """Refuse new requests from now on. Takes no lock, so a signal handler may call it."""
        self.draining = True

    def close(self) -> None:
        """End everything in flight with Draining, stop the handler thread and wait for it."""
        with self._changed:
            self._closed = True
            self._fail_all(Draining("The server was stopped before this request was finished."))
        self._thread.join()

    def snapshot(self) -> Snapshot:
        """Return how full the server is now."""
        return self.inspect(lambda scheduler: scheduler.snapshot())

    def inspect(self, look: Callable[[Scheduler], T]) -> T:
        """Return `look(scheduler)`, called while no other thread changes anything there."""
        with self._changed:
            return look(self._scheduler)

    def remaining_tokens(self) -> int:
        """Return how many tokens of the requests in flight are not computed yet."""
        return self.inspect(lambda s: sum([each.remaining_tokens for each in s.in_flight()]))

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    def wait_until_loaded(self, timeout: float | None = None) -> bool:
        """Wait until the generator is loaded and warm; False if `timeout` seconds are too few."""
        return self._loaded.wait(timeout) and self.failure is None

    def not_ready_because(self, stalled_after_s: float = 60.0) -> str | None:
        """Return why requests should not be sent here now; None if they may. Takes no lock."""
        if why := self._why_failed or self.deciding.hangs_because():
            return why
        if not self.loaded:
            return "the model is still loading"
        if self.draining or self._closed:
            return "the server is shutting down"
        started_at = self._iteration_started_at
        if started_at is not None and self.clock() - started_at > stalled_after_s:
            return f"an iteration has been running for more than {stalled_after_s:.0f} s"
        return None

    # ---- the handler thread

    def _run(self) -> None:
        try:
            generator = self._load()
            if generator.n_blocks is not None:
                with self._changed:
                    self._answer(self._scheduler.limit_blocks(generator.n_blocks, self.clock()))
            self._loaded.set()
            self._serve(generator)
        # whatever it is: without this thread no request would ever be answered
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self.loaded:
            self._why_failed = f"loading failed: {error}"
        elif isinstance(error, EngineFailed):
            self._why_failed = str(error)
        else:
            self._why_failed = f"the handler thread ended with {described(error)}"
        with self._changed:
            self.failure = error
            calls = list(self._failure_calls)
            refusal = self._refusal()
            try:
                self._fail_all(refusal)
            except Exception:  # a defect there must not keep requests, or the process, waiting
                log.exception("not all requests in flight could be answered in order")
                left = [i for i in self._scheduler.in_flight() if i.answered_at is None]
                for each in left:
                    each.error, each.state = refusal, State.FAILED
                self._answer(left)
        self._loaded.set()
        for call in calls:
            call(error)

    def _fail_all(self, error: ServingError) -> None:
        self._end(lambda: self._scheduler.fail(self._scheduler.in_flight(), error, self.clock()))

    def _end(self, ended: Callable[[], list[Inference]]) -> None:
        """Answer the requests that `ended` ends and returns."""
        with self._changed:
            self._answer(ended())
            self._changed.notify()

    def _refusal(self) -> EngineFailed:
        return EngineFailed(
            f"This server is broken and ends ({self._why_failed}); send the request to another one."
        )

    def _serve(self, generator: Generator) -> None:
        while (iteration := self._plan(generator)) is not None:
            self._iteration_started_at = started_at = self.clock()
            try:
                answered = self._apply(iteration, generator.generate(iteration))
                with self._changed:
                    self._failures.clear()
            except Exception as error:
                answered = self._fail([row.inference for row in iteration.rows], error)
            self._iteration_started_at = None
            self._over(IterationRecord(started_at, self.clock() - started_at, iteration), answered)

    def _over(self, record: IterationRecord, answered: Iterable[Inference]) -> None:
        """Notify everyone of an iteration that is over, and of what it answered."""
        for observer in self._observers:
            _call(observer.iteration, record)
        # under the lock, lest a cancellation come between and a stream end too early
        with self._changed:
            self._answer(answered)  # first, so that it is counted before its stream ends
            for row in record.iteration.rows:  # most have no listener: many calls are spared
                if row.inference.streamed and row.samples and not row.idle:
                    _call(Inference.notify, row.inference)
        if self._loop_interval_s:
            time.sleep(self._loop_interval_s)

    def _draft(self, drafter: Drafter) -> None:
        """Propose draft tokens for the next iteration, without the lock: a model may do it."""
        if (speculation := self._scheduler.speculation) is None:
            return
        with self._changed, self.deciding:
            rows = rows_to_draft(self._scheduler, self.clock())
        speculation.draft(rows, drafter)

    def _plan(self, generator: Generator, waits: bool = True) -> Iteration | None:
        """Return what runs next, once something can; None when the manager was closed or, unless it
        `waits`, nothing can run now. Raises EngineFailed after FAILURES.
        """
        if generator.drafter is not None:
            self._draft(generator.drafter)
        with self._changed:
            while not self._closed:
                if len(self._failures) >= FAILURES:
                    last = self._failures[-1]
                    raise EngineFailed(
                        f"{FAILURES} iterations in a row failed, the last with {last}"
                    )
                now, at = self.clock(), None
                self._end(lambda: self._scheduler.expire(self.clock()))
                if self._scheduler.has_work:
                    try:
                        with self.deciding:
                            iteration, at = next_iteration(self._scheduler, now)
                        if iteration.rows:
                            return iteration
                        if at is None and waits:
                            raise nothing_planned(self._scheduler)
                    # a defect of a policy must not end the only handler thread
                    except Exception as error:
                        in_flight, at = self._scheduler.in_flight(), now
                        self._end(partial(self._fail, in_flight, error, deciding=True))
                if not waits:
                    break
                self._changed.wait(None if at is None else min(at - now, LONGEST_WAIT_S))
        return None

    def _apply(self, iteration: Iteration, ids: Sequence[int]) -> list[Inference]:
        with self._changed, self.deciding:
            return self._scheduler.apply(iteration, ids, self.clock())

    def _fail(
        self, inferences: Iterable[Inference], error: Exception, deciding: bool = False
    ) -> list[Inference]:
        """End requests; return those to answer. deciding: the policy or the order failed, and not
        the engine. Raises EngineFailed if the scheduler cannot."""
        log.error("generation failed; its requests are answered with an error", exc_info=error)
        self._failures.append(why := self.deciding.in_words(error, deciding))
        with self._changed:
            try:
                failure = GenerationFailed(f"Generation failed: {why}")
                return self._scheduler.fail(inferences, failure, self.clock())
            except Exception:  # the scheduler cannot be relied on any more
                self._failures += FAILURES * [why]
                raise EngineFailed(why) from error

    def _answer(self, inferences: Iterable[Inference]) -> None:
        for inference in inferences:
            for observer in self._observers:
                _call(observer.answered, inference)
            # else its listener is notified of its last token
            if inference.error is not None or not inference.streamed:
                _call(Inference.notify, inference)
            inference.done.set()


def _call(observer: Callable[[Any], None], argument: Any) -> None:
    try:
        observer(argument)
    except Exception:  # an observer cannot break the loop
        log.exception("an observer failed; serving goes on")
