"""Chapter 5: iteration-level scheduling. In each iteration all running requests are computed, and
waiting requests join, in their order, until one finds no free row or too few free KV blocks.
"""

from __future__ import annotations

from scheduling.policies.base import Plan, Policy, View


class Dynamic(Policy):
    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/05-iterations.md says what it returns")
