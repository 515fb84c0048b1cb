"""Run to completion: when idle take what waits; nobody joins; all are answered with the longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scheduling.policies.base import Plan, Policy, View, setting, share_budget, start, whole_groups


@dataclass(frozen=True)
class Static(Policy):
    """The batch is what waits when the engine is idle.

    Rows that are done keep being computed (as *idle rows*) until the batch ends, as
    deployed static batching does; with `compact_batches` they are dropped, as
    FasterTransformer does. Either way nobody joins.
    """

    request_level: ClassVar[bool] = True
    compact_batches: bool = setting(
        False, "drop rows that are done instead of computing them idly", "off"
    )

    def plan(self, view: View) -> Plan:
        return self._continue(view) if view.running else self._begin(view, "idle")

    def _begin(self, view: View, reason: str) -> Plan:
        return start(whole_groups(view, self.most_rows(view.limits.max_batch_size)), view, reason)

    def _continue(self, view: View) -> Plan:
        rows = [
            inference
            for inference in view.running
            if not (self.compact_batches and inference.is_over)
        ]
        return Plan(run=share_budget(rows, view))
