"""Chapter 7: KV blocks on demand. A request joins with blocks for the tokens that it computes now,
and gets more as it fills them. When none is free, the newest running request is preempted.
"""

from __future__ import annotations

from scheduling.policies.base import Plan, Policy, View


class Preemption(Policy):
    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/07-blocks.md says what it returns")
