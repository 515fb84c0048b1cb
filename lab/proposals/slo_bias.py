"""vLLM pull request 53571, "[feat]Add SLO-aware scheduling policy" (open).

Read: its description in part, and its targets and scores (slo_policy.py). Taken: both, with their
constants. Left out: the share of an iteration's tokens that is kept for urgent prompts
(`slo_waiting_token_reserve_ratio`), since an order has no say in the budget. Chosen here: a context
of 1,024 tokens, GPT-2's, for `max_model_len`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.lengths import LONGEST
from scheduling.policies.orders import Order, oldest_sorted
from scheduling.queue import Queue

BASE_S, MIDDLE_S, MOST_S = 20.0, 40.0, 120.0  # limits of the first token
URGENCY, BONUS = 200, 10  # points: of a wait as long as the limit, of the shortest prompt


def between(low: float, high: float, x: float) -> float:
    """Return a value from low to high, by the cubic smoothstep of x from 0 to 1."""
    x = min(max(x, 0.0), 1.0)
    return low + (high - low) * x * x * (3 - 2 * x)


@dataclass(frozen=True)
class SloBias(Order):
    """The most urgent first: the wait as a share of a limit for the first token, and a bonus for a
    short prompt. A bias of -10 to 10 sets the limits of short and of long prompts apart.
    """

    in_order: ClassVar[bool] = False
    slo_bias: float = setting(0.0, "above 0 short prompts are favoured, below long", ge=-10, le=10)
    slo_short_tokens: int = setting(2048, "longest prompt that is short", ge=1)

    def limit_s(self, prompt: int) -> float:
        """Return the limit of the first token for a prompt of so many tokens."""
        size = abs(self.slo_bias)
        further = (size - 1) / 9
        if (prompt <= self.slo_short_tokens) == (self.slo_bias >= 0):  # it is favoured
            return between(BASE_S, MIDDLE_S, further)
        return between(BASE_S, MIDDLE_S, size) if size <= 1 else between(MIDDLE_S, MOST_S, further)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def points(members: Sequence[Inference]) -> float:
            prompt = max(len(member.prompt_ids) for member in members)
            waited = view.now - members[0].arrived_at
            return URGENCY * waited / self.limit_s(prompt) + BONUS * (1 - prompt / LONGEST)

        return oldest_sorted(queue, len(queue), lambda members: -points(members))
