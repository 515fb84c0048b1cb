"""What happens in a server, noted while somebody looks. Nobody looks: nothing is noted, and what
was noted stays until somebody looks again.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from live.history import QUEUE, Bystanders, History
from live.snapshot import QueueSnapshot, snapshot_of
from scheduling.inference import Inference, IterationRecord
from scheduling.scheduler import Scheduler

LEASE_S = 3.0  # for so long after somebody has looked
# what waits to be told at most; who looks less often than a fast engine fills this begins anew
BACKLOG = 20_000
EVERY_S = 0.05  # between two snapshots of the queue


def about(settings: Any, model: str) -> dict[str, Any]:
    """What a page says of a server beside its rows: of its settings, which a Config has and a
    recording, and its model.
    """
    names = ("mode", "order", "max_batch_size", "token_budget", "block_size")
    told = {name: getattr(settings, name) for name in names}
    return {
        "name": settings.mode,
        "model": model,
        **told,
        "n_blocks": settings.n_blocks,
        "simulated": None,
    }


class Manager(Protocol):
    """What tells an observer how a scheduler is now."""

    def clock(self) -> float: ...

    def inspect(self, look: Callable[[Scheduler], QueueSnapshot]) -> QueueSnapshot:
        """Return `look` of the scheduler, while nothing changes there."""
        ...


class Live:
    """An observer of the manager, and what a page asks.

    The handler thread only notes what there is; who asks makes text of it, once for all who look.
    """

    def __init__(
        self,
        manager: Manager,
        about: dict[str, Any],
        prompt: Callable[[Inference], str | None] = lambda inference: None,
    ):
        self._manager = manager
        self._until = self._seen_at = float("-inf")
        self._pending: deque[tuple[Any, ...] | Inference] = deque()
        self._missed = False  # something happened that is not pending
        self._bystanders = Bystanders()
        # a cursor of the server that was here before is none of this one's
        self._history = History(about, prompt=prompt, begin=secrets.randbelow(2**50))
        self._lock = threading.Lock()

    # ---- the handler thread

    def iteration(self, record: IterationRecord) -> None:
        if record.started_at > self._until:
            self._missed = True
            self._bystanders.forget()
            return
        iteration = record.iteration
        aside = self._bystanders.of(iteration)
        self._put((record.started_at, record.seconds, iteration, aside))

    def answered(self, inference: Inference) -> None:
        assert inference.answered_at is not None
        if inference.answered_at > self._until:
            self._missed = True
            return
        self._put(inference)

    def _put(self, what: tuple[Any, ...] | Inference) -> None:
        if len(self._pending) < BACKLOG:
            self._pending.append(what)
        else:
            self._missed = True

    # ---- who looks

    def events(self, cursor: int | None, **more: Any) -> str:
        """JSON of what was noted since; of none, or one that is too old, how it is now."""
        with self._lock:
            now = self._take()
            return self._history.since(cursor, now, **more)

    def _take(self) -> float:
        """Note what is pending; return the time."""
        manager, history = self._manager, self._history
        now = manager.clock()
        self._until = now + LEASE_S  # first: what is missed from now on is missed by the next one
        missed, self._missed = self._missed, False
        if missed:
            self._pending.clear()
            history.restart()
        for _ in range(len(self._pending)):
            what = self._pending.popleft()
            if isinstance(what, Inference):
                history.answered(what)
            else:
                history.iteration(*what)
        if missed or now - self._seen_at >= EVERY_S:
            self._seen_at = now
            history.snapshot(manager.inspect(lambda s: snapshot_of(s, QUEUE, now)))
        return now


class Kept:
    """An observer that keeps all that is served, in virtual time or of a recording: its history.

    zero: the time from which others are told; None: the arrival of who is computed first.
    """

    def __init__(self, scheduler: Scheduler, about: Mapping[str, Any], zero: float | None = None):
        self.history = History(about, keep=None)
        self._zero = zero
        self._scheduler = scheduler
        self._bystanders = Bystanders()
        self._seen_at = float("-inf")
        self._now = 0.0

    def iteration(self, record: IterationRecord) -> None:
        """Only one at a time."""
        self._now = record.started_at + record.seconds
        self._begin(min(row.inference.arrived_at for row in record.iteration.rows))
        iteration = record.iteration
        aside = self._bystanders.of(iteration)
        self.history.iteration(record.started_at, record.seconds, iteration, aside)
        if record.started_at - self._seen_at >= EVERY_S:
            self._seen_at = record.started_at
            snapshot = snapshot_of(self._scheduler, QUEUE, record.started_at)
            self.history.snapshot(snapshot)

    def answered(self, inference: Inference) -> None:
        self._begin(inference.arrived_at)
        self.history.answered(inference)

    def _begin(self, at: float) -> None:
        if self._zero is None:
            self._zero = at
        self.history.zero = self._zero

    def named(self, name: str) -> str:
        """JSON of the whole, under this name."""
        self.history.about["name"] = name
        return self.history.since(None, self._now)
