"""vLLM feature request 57413, for limits of concurrent partial prefills, and the pull requests
57427, "Restore concurrent partial prefill limit (max_concurrent_prefills) in V1 scheduler" (open),
and 55256, "[Core][V1] Add max_concurrent_prefills to bound simultaneous prefills" (closed).

Read: the descriptions in part, and comments. Taken: what is counted, and that only admission is
bounded. The text's default, 0, bounds nothing; the limit below is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduling.policies.base import Plan, View, setting
from scheduling.policies.dynamic import Dynamic


@dataclass(frozen=True)
class FewPrefills(Dynamic):
    """`dynamic`, but no request joins while `max_prefills` prompts are being computed."""

    max_prefills: int = setting(2, "prompts that are being computed at most", ge=1)

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        running = sum(not inference.decodes for inference in view.running)
        admit = plan.admit[: max(0, self.max_prefills - running)]
        left_out = {inference.id for inference, _ in plan.admit[len(admit) :]}
        run = [row for row in plan.run if row[0].id not in left_out]
        return replace(plan, run=run, admit=admit, reason="join" if admit else "")
