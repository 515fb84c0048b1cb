"""Chapter 4: windowed batching. As static, but a batch begins when `window_rows` requests wait, or
when the oldest one has waited for `window_s` since its arrival. `Plan(wake_at=SECONDS)` asks for
another call of `plan` at that time.
"""

from __future__ import annotations

from typing import ClassVar

from scheduling.policies.base import Plan, Policy, View, setting


class Windowed(Policy):
    request_level: ClassVar[bool] = True
    window_rows: int = setting(2, "a batch begins when this many requests wait", ge=1)
    window_s: float = setting(2.0, "a batch begins when the oldest has waited so long", gt=0)

    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/04-windowed.md says what it returns")
