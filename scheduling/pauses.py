"""Running inferences that an iteration does not compute: their KV is kept meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sortedcontainers import SortedDict

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row, State
from scheduling.policies.orders import Order
from scheduling.queue import Timers, WaitingQueue


class PausedRows(Extension):
    """Paused rows in the order. Those, and waiting requests, are promoted after too long a time."""

    def __init__(self, order: Order, queue: WaitingQueue):
        self.rows: dict[int, Inference] = {}  # of the last iteration, and those admitted since
        self.paused: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self._order, self._queue = order, queue
        self._longest = order.promote_after_s
        self._since: Timers[tuple[Inference, float]] = Timers(
            lambda entry: entry[0].answered_at is not None or entry[0].uncomputed_since != entry[1]
        )

    def wait(self, inference: Inference, now: float) -> None:
        self._watch(inference, now)

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
                self._pause(inference)

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
                self._pause(inference)
                inference.interruptions.paused_at = now
                self._watch(inference, now)
        for inference in chosen.values() if self.paused else ():
            self._resume(inference, now)
        self.rows = chosen

    def end(self, inference: Inference, now: float) -> None:
        self._resume(inference, now)

    def _pause(self, inference: Inference) -> None:
        inference.standing.key = self._order.place(inference)
        self.paused[inference.standing.key] = inference

    def _resume(self, inference: Inference, now: float) -> None:
        if inference.interruptions.paused_at is not None:
            self.paused.pop(inference.standing.key, None)  # an order may have failed to place it
            self.rows[inference.id] = inference
            inference.interruptions.end(now)

    def _watch(self, inference: Inference, since: float) -> None:
        if self._longest is not None:
            self._since.add(since + self._longest, (inference, since))
