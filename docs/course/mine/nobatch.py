"""Chapter 2: one request at a time. If nothing runs, the first waiting request is admitted; if one
runs, it alone is computed.
"""

from __future__ import annotations

from scheduling.policies.base import Plan, Policy, View


class NoBatch(Policy):
    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/02-cache.md says what it returns")
