"""Features that the four modes do not need: pauses of preemptive orders, and response ordering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from sortedcontainers import SortedDict

from scheduling.inference import Inference, Row
from scheduling.policies import Order
from scheduling.queue import Timers


class PausedRows:
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
        if inference.interruptions.paused_at is not None:
            del self.paused[inference.standing.key]
            self.rows[inference.id] = inference
            inference.interruptions.end(now)

    def settle(self, rows: Sequence[Row], now: float) -> None:
        """An iteration computes these rows; the others that run are paused."""
        if len(rows) == len(self.rows) and not self.paused:
            return  # they are all that run
        chosen = {row.inference.id: row.inference for row in rows}
        for id_ in sorted(self.rows.keys() - chosen.keys()):
            inference = self.rows[id_]
            if not inference.is_over:
                inference.interruptions.paused_at, inference.standing.key = (
                    now,
                    self._order.turn(inference),
                )
                self.paused[inference.standing.key] = inference
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
        del self.paused[inference.standing.key]
        self._order.promote(inference, now)
        inference.standing.key = self._order.turn(inference)
        self.paused[inference.standing.key] = inference


class ResponseOrder:
    """Plain answers that are finished and wait for an earlier one. A stream, which is read as it
    comes, neither waits nor is waited for.
    """

    def __init__(self) -> None:
        self.held: dict[int, Inference] = {}
        self._unanswered: dict[int, Inference] = {}  # plain ones, as they came

    def expect(self, group: Iterable[Inference]) -> None:
        self._unanswered |= {each.id: each for each in group if not each.streamed}

    def hold(self, finished: Iterable[Inference]) -> list[Inference]:
        """Keep those that are plain; return the others."""
        plain = [inference for inference in finished if not inference.streamed]
        self.held |= {inference.id: inference for inference in plain}
        return [inference for inference in finished if inference.streamed]

    @property
    def free(self) -> list[Inference]:
        """Held ones before which nobody is left that has no answer."""
        return [self.held[id] for id in takewhile(self.held.__contains__, self._unanswered)]

    def forget(self, inference: Inference) -> None:
        """It is answered, whatever with."""
        self.held.pop(inference.id, None)
        self._unanswered.pop(inference.id, None)
