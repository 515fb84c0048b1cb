"""Iteration-level scheduling (Orca, OSDI 2022, section 3.1): join and leave between iterations."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.inference import Inference
from scheduling.policies.base import Plan, Policy, View, start


@dataclass(frozen=True)
class Dynamic(Policy):
    """Orca's algorithm 1.

    An inference joins as soon as a row is free and KV blocks for its whole life can be reserved, so
    nothing is ever preempted. Nobody overtakes a head of queue that does not fit.
    """

    def plan(self, view: View) -> Plan:
        admit: list[Inference] = []
        rows, blocks = view.limits.max_batch_size - len(view.running), view.free_blocks
        for inference in view.waiting:
            needed = view.limits.blocks(inference.whole_life)
            if len(admit) == rows or needed > blocks:
                break
            blocks -= needed
            admit.append(inference)
        return start(admit, view, "join")
