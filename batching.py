"""The handler thread: plan → generate → apply, for as long as the server lives.

Knows threads and one lock; what to run is the policy's, what happens to it the scheduler's, how it is
computed the generator's. Knows no torch and no HTTP; the clock is handed in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from errors import Cancelled, Draining, GenerationFailed
from inference import Generator, Inference, Iteration, IterationRecord, Sampling
from scheduler import Scheduler, Snapshot

__all__ = [
    "LONGEST_WAIT_S",
    "BatchingManager",
    "Inference",
    "Iteration",
    "IterationRecord",
    "Observer",
    "Sampling",
    "Scheduler",
]

LONGEST_WAIT_S = 3600.0  # what a thread waits for at most before it looks again; the platform's limit is beyond it
log = logging.getLogger("effective_batching")


class Observer(Protocol):
    """Told of all that happens, by the handler thread or under its lock: quickly, please. What it raises is logged."""

    def iteration(self, record: IterationRecord) -> None:
        """An iteration is over."""

    def answered(self, inference: Inference) -> None:
        """An inference has its answer or its error, and its caller is about to be woken."""


class BatchingManager:
    """The handler thread, and the way in for every other thread.

    `load` builds the generator in the handler thread, so that the server answers /health meanwhile. If it
    raises, the error is kept in `load_error` and `on_load_failure` is called. Stopping: `drain()` takes no new
    requests and finishes those in flight; `close()` ends them with `Draining` and joins the thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        load: Callable[[], Generator],
        *,
        clock: Callable[[], float] = time.perf_counter,
        loop_interval_s: float = 0.0,
        on_load_failure: Callable[[Exception], None] = lambda error: None,
    ):
        self.clock = clock
        self.epoch_offset = time.time() - clock()  # clock + this = seconds since the epoch
        self.draining = False
        self.load_error: Exception | None = None
        self._scheduler = scheduler
        self._load = load
        self._observers: list[Observer] = []
        self._loop_interval_s = loop_interval_s
        self._on_load_failure = on_load_failure
        self._loaded = threading.Event()
        self._closed = False
        self._iteration_started_at: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="handler", daemon=True)
        self._thread.start()

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of all that happens from now on, after those that were there before."""
        self._observers.append(observer)

    # ---- called from any thread

    def enqueue(self, inferences: Sequence[Inference]) -> None:
        """Queue a request's inferences, all or none. Raises InvalidRequest, Overloaded or Draining."""
        with self._changed:
            if self.draining or self._closed:
                raise Draining("The server is shutting down; send the request to another one.")
            self._scheduler.enqueue(inferences, self.clock())
            self._changed.notify()

    def cancel(self, inferences: Sequence[Inference]) -> None:
        """Give requests up: rows and blocks are free before the next iteration. Those already over are left alone."""
        with self._changed:
            self._answer(self._scheduler.fail(inferences, Cancelled("The request was cancelled."), self.clock()))
            self._changed.notify()

    def expire(self) -> None:
        """End what has passed its deadline. Between iterations that happens by itself; one, or loading, may take long."""
        with self._changed:
            self._answer(self._scheduler.expire(self.clock()))

    def drain(self) -> None:
        """Refuse new requests from now on. Takes no lock, so a signal handler may call it."""
        self.draining = True

    def close(self) -> None:
        """End everything in flight with Draining, stop the handler thread and wait for it."""
        with self._changed:
            self._closed = True
            error = Draining("The server was stopped before this request was finished.")
            self._answer(self._scheduler.fail(self._scheduler.in_flight(), error, self.clock()))
            self._changed.notify()
        self._thread.join()

    def snapshot(self) -> Snapshot:
        """How full the server is now."""
        with self._changed:
            return self._scheduler.snapshot()

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    def wait_until_loaded(self, timeout: float | None = None) -> bool:
        """Wait until the generator is loaded and warm; False if it is not after `timeout` seconds."""
        return self._loaded.wait(timeout) and self.load_error is None

    def not_ready_because(self, stalled_after_s: float = 60.0) -> str | None:
        """Why requests should not be sent here now, or None if they may."""
        if self.load_error is not None:
            return f"loading failed: {self.load_error}"
        if not self.loaded:
            return "the model is still loading"
        if self.draining or self._closed:
            return "the server is shutting down"
        if not self._thread.is_alive():
            return "the handler thread has ended"
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
        except Exception as error:
            self.load_error = error
            self._loaded.set()
            self._on_load_failure(error)
            return
        self._loaded.set()
        while (iteration := self._plan()) is not None:
            self._iteration_started_at = started_at = self.clock()
            try:
                answered = self._apply(iteration, generator.generate(iteration))
            except Exception as error:
                answered = self._fail((row.inference for row in iteration.rows), error)
            self._iteration_started_at = None
            record = IterationRecord(started_at, self.clock() - started_at, iteration)
            for observer in self._observers:
                _tell(observer.iteration, record)
            with self._changed:  # else a cancellation could come between, and a stream learn of its end too early
                self._answer(answered)  # first, so that who has its last token finds itself counted
                for row in iteration.rows:
                    if row.samples and not row.idle:
                        row.inference.tell()
            if self._loop_interval_s:
                time.sleep(self._loop_interval_s)

    def _plan(self) -> Iteration | None:
        """Wait until there is something to run; None when the manager was closed."""
        with self._changed:
            while not self._closed:
                now = self.clock()
                self._answer(self._scheduler.expire(now))
                if not self._scheduler.has_work:
                    self._changed.wait()
                    continue
                try:
                    iteration, wake_at = self._scheduler.schedule(now)
                except Exception as error:  # a defect of a policy must not end the only handler thread
                    self._answer(self._fail(self._scheduler.in_flight(), error))
                    continue
                if iteration.rows:
                    return iteration
                times = [t for t in (wake_at, self._scheduler.next_deadline()) if t is not None]
                self._changed.wait(min(max(0.0, min(times) - now), LONGEST_WAIT_S) if times else None)
        return None

    def _apply(self, iteration: Iteration, ids: Sequence[int]) -> list[Inference]:
        with self._changed:
            return self._scheduler.apply(iteration, ids, self.clock())

    def _fail(self, inferences: Iterable[Inference], error: Exception) -> list[Inference]:
        log.error("generation failed; its requests are answered with an error", exc_info=error)
        with self._changed:
            failure = GenerationFailed(f"Generation failed: {type(error).__name__}: {error}")
            return self._scheduler.fail(inferences, failure, self.clock())

    def _answer(self, inferences: Iterable[Inference]) -> None:
        for inference in inferences:
            for observer in self._observers:
                _tell(observer.answered, inference)
            if inference.error is not None:  # else its stream was told with its last token
                inference.tell()
            inference.done.set()


def _tell(listener: Callable[[Any], None], what: Any) -> None:
    try:
        listener(what)
    except Exception:  # an observer cannot break the loop
        log.exception("an observer failed; serving goes on")
