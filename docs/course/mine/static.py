"""Chapter 3: static batching. If nothing runs, the waiting requests that fit are admitted. No
request joins a batch that runs. Finished rows are computed, idly, until the longest one ends.
"""

from __future__ import annotations

from typing import ClassVar

from scheduling.policies.base import Plan, Policy, View


class Static(Policy):
    request_level: ClassVar[bool] = True  # finished rows stay in view.running until all are

    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/03-static.md says what it returns")
