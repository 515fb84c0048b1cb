"""vLLM RFC 52906, "Adaptive prefill token budget based on scheduling pressure" (open): P-PAS.

Read: its description in part, a comment, and the author's patch of vLLM 0.22.1. Taken: what
pressure is, and that it caps the prompt tokens of an iteration. There the cap is 2,048 tokens of
16,384; chosen here: the same share of `--token-budget`.
"""

from dataclasses import dataclass, replace

from scheduling.policies.base import Plan, View, setting
from scheduling.policies.dynamic import Dynamic


@dataclass(frozen=True)
class PressureBudget(Dynamic):
    """`dynamic`, but while rows decode and `pressure_prompts` or more prompts run or wait, an
    iteration computes at most a share of the token budget of them.
    """

    pressure_prompts: int = setting(2, "prompts that are pressure", ge=1)
    pressure_share: float = setting(0.125, "share of token_budget for them", gt=0, le=1)

    def plan(self, view: View) -> Plan:
        decoding = sum(inference.decodes for inference in view.running)
        prompts = len(view.running) - decoding + sum(map(len, view.queues))
        if not decoding or prompts < self.pressure_prompts:
            return super().plan(view)
        most = view.limits.token_budget
        cap = max(1, int(self.pressure_share * most)) + (decoding if self.counts_decoded else 0)
        limits = replace(view.limits, token_budget=min(most, cap))
        return super().plan(view._replace(limits=limits))
