"""vllm-ascend pull request 10285, LAPS: three lanes by the length of prompts.

Taken: short prompts go before middle ones, and long prompts earn tokens while they wait and go
first when they have as many as they compute. Not said in what was read: the lanes' limits and the
rate; chosen here: 64 and 512 tokens, and a quarter of the tokens that the server computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import Order, View, setting
from scheduling.policies.orders import oldest_sorted
from scheduling.queue import Queue


@dataclass(frozen=True)
class Laps(Order):
    """Long prompts that have earned their tokens, then short, middle and other long ones."""

    in_order: ClassVar[bool] = False
    by_service: ClassVar[bool] = True
    laps_short_tokens: int = setting(64, "tokens of a short prompt at most", ge=1)
    laps_long_tokens: int = setting(512, "tokens of a long prompt at least", ge=1)
    laps_rate: float = setting(0.25, "share of computed tokens that a long prompt earns", gt=0)

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        for member in group:
            member.standing.state = processed

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def place(members: Sequence[Inference]) -> tuple[Any, ...]:
            first = members[0]
            n, came = len(first.prompt_ids), first.arrived_at
            if n < self.laps_long_tokens:
                return 1 + (n > self.laps_short_tokens), came
            earned = self.laps_rate * (view.processed - first.standing.state)
            return 0 if earned >= n else 3, came

        return oldest_sorted(queue, len(queue), place)
