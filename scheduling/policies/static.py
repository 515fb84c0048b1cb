"""Run to completion: an idle engine takes the waiting requests, and answers them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scheduling.extensions import Group
from scheduling.policies.base import Plan, Policy, View, setting, share_budget, start, whole_groups
from scheduling.queue import Queue


@dataclass(frozen=True)
class Static(Policy):
    """The batch is the requests that wait when the engine is idle; none joins it.

    Rows that are done keep being computed (as *idle rows*) until the batch ends, as deployed static
    batching does; with `compact_batches` they are dropped, as FasterTransformer does.
    """

    request_level: ClassVar[bool] = True
    repeats: ClassVar[bool] = True
    compact_batches: bool = setting(
        False, "drop rows that are done instead of computing them idly", "off"
    )

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        return self._begin(view.queues[0], view, "idle")

    def _begin(
        self, queue: Queue, view: View, reason: str, rows: int | None = None, first: Group = ()
    ) -> Plan:
        """Begin a batch of at most so many rows from the head of a queue, with `first` in it."""
        most = self.max_rows(view.limits.max_batch_size) if rows is None else rows
        return start(whole_groups(view, most, queue, first), view, reason)

    def _continue(self, view: View) -> Plan:
        dropped = self.compact_batches
        rows = [inference for inference in view.running if not (dropped and inference.is_over)]
        return Plan(run=share_budget(rows, view))
