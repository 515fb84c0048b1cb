"""Batches of requests whose answers are expected to be equally long (Multi-Bin Batching; Guldogan
et al., arXiv 2412.04504).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scheduling.policies.base import Plan, View, setting
from scheduling.policies.windowed import Delayed


@dataclass(frozen=True)
class MultiBin(Delayed):
    """A queue for each bin; bins are equally frequent ranges of predicted lengths.

    An idle engine serves the bin with the oldest head among those that hold `batch_size_target`
    rows; if none does, the bin of the oldest request, once that has waited for
    `max_batch_delay_ms`. So a rare length waits while others are frequent, unless the order has a
    `max_wait_s`: the bin of a request that has waited so long goes first.
    """

    in_order: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    bins: int = setting(4, "number of queues, by predicted length", ge=1, le=64)

    @property
    def n_bins(self) -> int:
        return self.bins

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        heads = [(queue.oldest, queue) for queue in view.queues if len(queue)]
        if not heads:
            return Plan()
        full = [(head, queue) for head, queue in heads if len(queue) >= self._target(view)]
        oldest, oldest_queue = min(heads, key=lambda entry: entry[0][0].id)
        overdue = view.order.is_overdue(oldest[0], view.now)
        if full and not overdue:
            _, queue = min(full, key=lambda entry: entry[0][0].id)
            return self._begin(queue, view, "target")
        if full or view.now >= (due := self._due(oldest[0])):
            return self._begin(oldest_queue, view, "delay", first=oldest)
        return Plan(wake_at=due)
