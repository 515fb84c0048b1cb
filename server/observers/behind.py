"""Observers called by a thread of their own, behind the handler thread: in order, and none is left
out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from scheduling.inference import Inference
from scheduling.records import IterationRecord, Observer

BACKLOG = 10_000  # that may wait; then the handler thread waits, too
log = logging.getLogger("effective_batching")


class Behind:
    """An observer that hands on what it is told. What others read is whole after `flush`."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = observers
        self._queue: SimpleQueue[IterationRecord | Inference | threading.Event] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="observers", daemon=True)
        self._thread.start()

    def iteration(self, record: IterationRecord) -> None:
        if self._queue.qsize() > BACKLOG:
            self.flush()
        self._queue.put(record)

    def answered(self, inference: Inference) -> None:
        self._queue.put(inference)

    def flush(self) -> None:
        """Wait until all that was told so far is observed."""
        self._queue.put(observed := threading.Event())
        while self._thread.is_alive() and not observed.wait(1.0):
            pass

    def close(self) -> None:
        """Observe the rest, and end the thread."""
        self._closed = True
        self.flush()
        self._thread.join()

    def _run(self) -> None:
        while not (self._closed and self._queue.empty()):
            told = self._queue.get()
            if isinstance(told, threading.Event):
                told.set()
                continue
            for observer in self._observers:
                try:
                    if isinstance(told, Inference):
                        observer.answered(told)
                    else:
                        observer.iteration(told)
                except Exception:  # an observer cannot break the others
                    log.exception("an observer failed; serving goes on")
