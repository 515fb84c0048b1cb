"""vLLM pull request 51375, "[Core][V1] Add residual-aware SJF scheduling policy" (open).

Read: its description in part, and its waiting queue and tests (request_queue.py). Taken: all of the
order. Left out: the wait for KV that comes from another server, which there is none of here. Not
said: the order of a request with several prompts, which goes by the sum of their blocks here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.orders import Order, oldest_sorted
from scheduling.queue import Queue


@dataclass(frozen=True)
class ResidualSjf(Order):
    """The fewest KV blocks to compute first, those in the prefix cache aside; of equals the first
    arrival. Before them preempted requests, and then those that waited for `residual_max_wait_s`.
    """

    in_order: ClassVar[bool] = False
    residual_max_wait_s: float = setting(10.0, "longest wait behind shorter ones", gt=0)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def cost(member: Inference) -> int:
            return view.limits.blocks(member.uncomputed - view.cached_tokens(member))

        def place(members: Sequence[Inference]) -> tuple[Any, ...]:
            first = members[0]
            if first.interruptions.preempted_at is not None:
                return 0, first.arrived_at
            if view.now - first.arrived_at >= self.residual_max_wait_s:
                return 1, first.arrived_at
            return 2, sum(map(cost, members)), first.arrived_at

        return oldest_sorted(queue, len(queue), place)
