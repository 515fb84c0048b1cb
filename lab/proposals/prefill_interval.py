"""vLLM pull request 54627, "[Core][V1] Apply prefill_schedule_interval outside data parallelism"
(open).

Read: its description in part, and comments on it. Taken: the interval, counted from the last
iteration with prompts, and that nothing waits while no row decodes. Not said in what was read:
whether prompts are computed at once when too many wait, as the description of 44558 has it, which
brought the setting for data parallelism; they are not here. The text's default, 1, is off; the one
below was the best in 44558.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.history import History, Memory
from scheduling.policies.base import Plan, View, setting
from scheduling.policies.dynamic import Dynamic


@dataclass(frozen=True)
class PrefillInterval(Dynamic):
    """`dynamic`, but while rows decode, prompts are computed in every Nth iteration only."""

    prefill_interval: int = setting(2, "iterations from one with prompts to the next", ge=1)

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        return [*super().remembers, History]

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        without_prompts = view.memories[History].without_prompts
        decoding = [row for row in plan.run if row[0].decodes]
        if not decoding or without_prompts + 1 >= self.prefill_interval:
            return plan
        return Plan(plan.preempt, run=decoding)
