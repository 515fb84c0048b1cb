"""SGLang pull request 34623 and vLLM pull request 55256: several prompts share the budget.

Taken: at most K prompts are computed at once, and the budget is shared among them; K = 1 is
SGLang's rule. Chosen here: equal shares, and what a short prompt leaves goes to the next ones.
"""

from dataclasses import dataclass
from functools import cached_property

from scheduling.inference import Inference
from scheduling.policies.base import View, prefills, setting
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.prefill import Prefill


class Shared(Prefill):
    """Both prompts and decode rows, with at most `k` prompts."""

    def chunk(self, view: View, inference: Inference, prompts: int, left: int) -> int:
        free_rows = max(0, view.limits.max_batch_size - len(view.running))
        joining = min(free_rows, sum(map(len, view.queues)))
        others = min(int(self.k), sum(map(prefills, view.running)) + joining) - prompts
        return -(-left // others) if others > 0 else 0


@dataclass(frozen=True)
class PromptsAtOnce(Dynamic):
    """`dynamic`, but at most some prompts are computed in an iteration, each with its share."""

    prompts_at_once: int = setting(2, "prompts that are computed at once", ge=1)

    @cached_property
    def prefill_rule(self) -> Prefill:
        return Shared("mixed", self.prompts_at_once)
