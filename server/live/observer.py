"""Observers that keep the history of a server: of a live one while its page is open, and of a saved
run as a whole.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from batching import BatchingManager
from scheduling.inference import Inference, Iteration, State
from scheduling.records import IterationRecord
from scheduling.scheduler import Scheduler
from server.live.history import NO_BUDGET, PAUSED, QUEUE, History, QueueSnapshot, Skipped

LEASE_S = 3.0  # time after a page's request in which events are noted
BACKLOG = 20_000  # pending events at most; a page that polls too seldom begins anew
EVERY_S = 0.05  # between two snapshots of the queue


def about(settings: Any, model: str) -> dict[str, Any]:
    """Return the facts that a page shows beside the rows. settings: a Config, or a recording's."""
    names = ("mode", "order", "max_batch_size", "token_budget", "block_size")
    values = {name: getattr(settings, name) for name in names}
    facts = {"name": settings.mode, "model": model, **values}
    return facts | {"n_blocks": settings.n_blocks, "simulated": None}


def snapshot_of(scheduler: Scheduler, n: int, now: float) -> QueueSnapshot:
    """Return the blocks and the first n waiting requests. Changes nothing."""
    pool, queue = scheduler.pool, list(islice(scheduler.view(now).waiting, n))
    blocks = pool.free_blocks, pool.shared_blocks, pool.cached_blocks
    return QueueSnapshot(*blocks, queue, pool.n_blocks)


class SkipFinder:
    """Finder of running requests that an iteration does not compute: those of the iteration before
    that still run and are not finished (a compacted batch computes no finished ones).
    """

    def __init__(self) -> None:
        self._running: list[Inference] = []  # at the last iteration

    def find(self, iteration: Iteration) -> Sequence[Skipped]:
        """Return the skipped requests. Call it after each iteration, before anything changes."""
        rows = [row[0] for row in iteration.rows]
        before, self._running = self._running, rows
        if iteration.running == len(rows):
            return ()
        others = dict.fromkeys(before)
        for inference in rows:
            others.pop(inference, None)
        skipped = [
            Skipped(i, NO_BUDGET if i.interruptions.paused_at is None else PAUSED, i.computed)
            for i in others
            if i.state is State.RUNNING and not i.is_over
        ]
        self._running = rows + [skip.inference for skip in skipped]
        return skipped

    def forget(self) -> None:
        self._running = []


class Live:
    """An observer of the manager, and the events for its pages.

    Nothing is noted unless a page has polled within LEASE_S. The handler thread only appends to a
    queue; a page's thread makes text of it, once for all pages.
    """

    def __init__(
        self,
        manager: BatchingManager,
        about: dict[str, Any],
        prompt: Callable[[Inference], str | None] = lambda inference: None,
    ):
        self._manager = manager
        self._until = self._snapshot_at = float("-inf")
        self._pending: deque[tuple[Any, ...] | Inference] = deque()
        self._missed = False  # events have happened that were not noted
        self._skips = SkipFinder()
        # no cursor of an earlier server is one of this server's
        self._history = History(about, prompt=prompt, begin=secrets.randbelow(2**50))
        self._lock = threading.Lock()

    def iteration(self, record: IterationRecord) -> None:
        """Called by the handler thread, as `answered` is."""
        if record.started_at > self._until:
            self._missed = True
            self._skips.forget()
            return
        iteration = record.iteration
        skipped = self._skips.find(iteration)
        self._put((record.started_at, record.seconds, iteration, skipped, record.drafts))

    def answered(self, inference: Inference) -> None:
        assert inference.answered_at is not None
        if inference.answered_at > self._until:
            self._missed = True
            return
        self._put(inference)

    def _put(self, event: tuple[Any, ...] | Inference) -> None:
        if len(self._pending) < BACKLOG:
            self._pending.append(event)
        else:
            self._missed = True

    def events(self, cursor: int | None, **more: Any) -> str:
        """Return the events since a cursor, as JSON; without a known one, all that are kept."""
        with self._lock:
            now = self._note_pending()
            return self._history.since(cursor, now, **more)

    def _note_pending(self) -> float:
        """Note pending events; return the time."""
        manager, history = self._manager, self._history
        now = manager.clock()
        self._until = now + LEASE_S  # first, so that no event is lost between the next two lines
        missed, self._missed = self._missed, False
        if missed:
            self._pending.clear()
            history.restart()
        for _ in range(len(self._pending)):
            event = self._pending.popleft()
            if isinstance(event, Inference):
                history.answered(event)
            else:
                history.iteration(*event)
        if missed or now - self._snapshot_at >= EVERY_S:
            self._snapshot_at = now
            history.snapshot(manager.inspect(lambda s: snapshot_of(s, QUEUE, now)))
        return now


class RunObserver:
    """Keeper of a whole history. zero: time written as 0; None: the first request's arrival."""

    def __init__(self, scheduler: Scheduler, about: Mapping[str, Any], zero: float | None = None):
        self.history = History(about, keep=None)
        self.history.zero = zero or 0.0
        self._has_zero = zero is not None
        self._scheduler = scheduler
        self._skips = SkipFinder()
        self._snapshot_at = float("-inf")
        self._now = 0.0

    def iteration(self, record: IterationRecord) -> None:
        """Note an iteration; not several at once."""
        self._now = record.started_at + record.seconds
        iteration = record.iteration
        if not self._has_zero:
            self._begin(min(row.inference.arrived_at for row in iteration.rows))
        skipped = self._skips.find(iteration)
        begun, seconds = record.started_at, record.seconds
        self.history.iteration(begun, seconds, iteration, skipped, record.drafts)
        if record.started_at - self._snapshot_at >= EVERY_S:
            self._snapshot_at = record.started_at
            self.history.snapshot(snapshot_of(self._scheduler, QUEUE, record.started_at))

    def answered(self, inference: Inference) -> None:
        if not self._has_zero:
            self._begin(inference.arrived_at)
        self.history.answered(inference)

    def _begin(self, at: float) -> None:
        self.history.zero, self._has_zero = at, True

    def json(self, name: str) -> str:
        """Return the history, under this name."""
        self.history.about["name"] = name
        return self.history.since(None, self._now)
