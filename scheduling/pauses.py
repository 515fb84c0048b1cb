"""Which of those that run are computed, and which are paused: their KV is kept, and they wait for
their turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sortedcontainers import SortedDict

from scheduling.inference import Inference, Row
from scheduling.policies import Order
from scheduling.timers import Timers


class Pauses:
    """Kept by the scheduler, which also asks it whom the order promotes."""

    def __init__(self, order: Order):
        self.rows: dict[int, Inference] = {}  # of the last iteration, and those admitted since
        self.paused: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self._order = order
        self._longest = order.promote_after_s
        self._since: Timers[tuple[Inference, float]] = Timers(
            lambda entry: entry[0].answered_at is not None or entry[0].uncomputed_since != entry[1]
        )

    def begin(self, inference: Inference) -> None:
        """It runs from now on."""
        self.rows[inference.id] = inference

    def end(self, inference: Inference, now: float) -> None:
        """It runs no longer."""
        self.resume(inference, now)
        self.rows.pop(inference.id, None)

    def resume(self, inference: Inference, now: float) -> None:
        """It is paused no longer, if it was."""
        if inference.paused_at is not None:
            del self.paused[inference.key]
            self.rows[inference.id] = inference
            inference.resume(now)

    def settle(self, rows: Sequence[Row], now: float) -> None:
        """An iteration computes these rows; the others that run are paused."""
        if len(rows) == len(self.rows) and not self.paused:
            return  # they are all that run
        chosen = {row.inference.id: row.inference for row in rows}
        for id_ in sorted(self.rows.keys() - chosen.keys()):
            inference = self.rows[id_]
            if not inference.is_over:
                inference.paused_at, inference.key = now, self._order.turn(inference)
                self.paused[inference.key] = inference
                self.watch(inference)
        for inference in chosen.values() if self.paused else ():
            self.resume(inference, now)
        self.rows = chosen

    def watch(self, inference: Inference) -> None:
        """It is not computed from now on."""
        if self._longest is None:
            return
        if (since := inference.uncomputed_since) is not None:
            self._since.add(since + self._longest, (inference, since))

    def uncomputed_too_long(self, now: float) -> Iterator[Inference]:
        """Those that wait or are paused, and whose time for the first level has come."""
        return (inference for inference, _ in self._since.due(now))

    def promote(self, inference: Inference, now: float) -> None:
        """Give one that is paused a new turn."""
        del self.paused[inference.key]
        self._order.promote(inference, now)
        inference.key = self._order.turn(inference)
        self.paused[inference.key] = inference
