"""vLLM RFC 30256, SLA-tiered scheduling, and its pull requests 30293, 30297 and 30449, "[Core] Add
SLA-tiered scheduling (opt-in)" (closed).

Read: the descriptions of the pull requests; the RFC itself was not found. Taken: three tiers before
arrival, the same for preemption, batch as the default, and a cap on the interactive tokens of a
batch. Not said: the cap's value, and what it counts. Chosen here: half of `--token-budget`, prompt
tokens to compute. A request has one number, so that its `priority` is its tier.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, prefills, setting
from scheduling.policies.orders import Order
from scheduling.queue import Queue

INTERACTIVE, BATCH, BACKGROUND = 1, 2, 3


@dataclass(frozen=True)
class SlaTiers(Order):
    """Interactive requests (priority 1) before batch (2, or none) and background ones (3 and more),
    each as they came; blocks are taken from the last tier. Interactive prompts beyond the cap wait
    for the next iteration. Background requests may starve.
    """

    in_order: ClassVar[bool] = False
    interactive_share: float = setting(0.5, "share of token_budget for them", gt=0, le=1)

    def rank(self, inference: Inference) -> int:
        return min(inference.priority or BATCH, BACKGROUND)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def tokens(inference: Inference) -> int:
            return inference.uncomputed - view.cached_tokens(inference)

        cap = self.interactive_share * view.limits.token_budget
        running = (i for i in view.running if self.rank(i) == INTERACTIVE and prefills(i))
        taken = sum(tokens(inference) for inference in running)
        for _, members in groupby(queue.by_key.values(), key=lambda i: i.group):
            request = list(members)
            if self.rank(request[0]) == INTERACTIVE:
                more = sum(map(tokens, request))
                if taken and taken + more > cap:
                    continue
                taken += more
            yield from request
