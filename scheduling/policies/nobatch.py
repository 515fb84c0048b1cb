"""One request at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from scheduling.policies.base import Plan, Policy, View, share_budget, start


@dataclass(frozen=True)
class NoBatching(Policy):
    """One request at a time, in the queue's order."""

    def max_rows(self, max_batch_size: int) -> int:
        return 1

    def plan(self, view: View) -> Plan:
        if view.running:
            return Plan(run=share_budget(view.running, view))
        return start(islice(view.waiting, 1), view, "idle")
