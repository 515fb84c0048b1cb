"""One request at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from scheduling.policies.base import Plan, Policy, View, start


@dataclass(frozen=True)
class NoBatching(Policy):
    """One request at a time, in the queue's order, once its KV blocks are free."""

    repeats: ClassVar[bool] = True

    def max_rows(self, max_batch_size: int) -> int:
        return 1

    def plan(self, view: View) -> Plan:
        first = () if view.running else islice(view.waiting, 1)
        fits = [i for i in first if view.limits.blocks(i.total_tokens) <= view.pool.free_blocks]
        return start(fits, view, "idle")
