"""Running inferences that an iteration does not compute: their KV is kept meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sortedcontainers import SortedDict

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row, State
from scheduling.policies.base import Order
from scheduling.queue import Timers, WaitingQueue


class PausedRows(Extension):
    """Paused rows in the order."""

    def __init__(self, order: Order):
        self.rows: dict[int, Inference] = {}  # the last iteration's, and those admitted since
        self.paused: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self._order = order

    def admit(self, inference: Inference, now: float) -> None:
        self.rows[inference.id] = inference

    def stop_running(self, inference: Inference, now: float) -> None:
        self._resume(inference, now)
        self.rows.pop(inference.id, None)

    def planned(self, rows: Sequence[Row], now: float) -> None:
        """Pause the running inferences that have no row, and resume those that have one again."""
        if len(rows) == len(self.rows) and not self.paused:
            return  # they are all that run
        chosen = {row.inference.id: row.inference for row in rows}
        for id_ in sorted(self.rows.keys() - chosen.keys()):
            inference = self.rows[id_]
            if not inference.is_over:
                self._pause(inference, now)
        for inference in chosen.values() if self.paused else ():
            self._resume(inference, now)
        self.rows = chosen

    def _pause(self, inference: Inference, now: float) -> None:
        self._place(inference)
        inference.interruptions.paused_at = now

    def _place(self, inference: Inference) -> None:
        inference.standing.key = self._order.place(inference)
        self.paused[inference.standing.key] = inference

    def _resume(self, inference: Inference, now: float) -> None:
        if inference.interruptions.paused_at is not None:
            self.paused.pop(inference.standing.key, None)  # an order may have failed to place it
            self.rows[inference.id] = inference
            inference.interruptions.end(now)

    end = _resume


class PromotedRows(PausedRows):
    """Paused rows that are promoted after too long a time, and waiting requests, too."""

    def __init__(self, order: Order, after_s: float):
        super().__init__(order)
        self._after_s = after_s
        self._since: Timers[tuple[Inference, float]] = Timers(
            lambda entry: entry[0].answered_at is not None or entry[0].uncomputed_since != entry[1]
        )

    def attach(self, scheduler: Any) -> None:
        self._queue: WaitingQueue = scheduler.queue

    def wait(self, inference: Inference, now: float) -> None:
        self._since.add(now + self._after_s, (inference, now))

    def before_plan(self, now: float) -> None:
        """Promote what was not computed for too long."""
        for inference, _ in self._since.due(now):
            waits = inference.state is State.WAITING
            if waits:
                self._queue.take(inference)
            else:
                self.paused.pop(inference.standing.key, None)
            self._order.promote(inference, now)
            if waits:
                self._queue.put(inference)
            else:
                self._place(inference)

    def _pause(self, inference: Inference, now: float) -> None:
        super()._pause(inference, now)
        self.wait(inference, now)
