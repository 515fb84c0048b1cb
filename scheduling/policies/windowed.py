"""Static batches that wait for more requests ("dynamic batching" in Triton and Wallaroo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import POSITIVE, Plan, View, setting
from scheduling.policies.static import Static


@dataclass(frozen=True)
class Delayed(Static):
    """Batches that form when `batch_size_target` rows wait, or the oldest request has waited for
    `max_batch_delay_ms`.

    The delay is measured from its arrival, so that time spent behind a running batch counts, and a
    batch that it starts has the oldest request in it, whatever the order.
    """

    max_batch_delay_ms: float = setting(
        10.0, "a batch forms when the oldest request has waited this long", **POSITIVE
    )
    batch_size_target: int = setting(4, "a batch forms when this many rows wait", ge=1)

    def warnings(self, max_batch_size: int) -> list[str]:
        if self.batch_size_target <= max_batch_size:
            return []
        return [
            f"batch_size_target {self.batch_size_target} can never be reached with max_batch_size "
            f"{max_batch_size}: batches form at that"
        ]

    def _target(self, view: View) -> int:
        """Return how many waiting rows are enough."""
        return min(self.batch_size_target, self.max_rows(view.limits.max_batch_size))

    def _due(self, oldest: Inference) -> float:
        """Return when the oldest request has waited long enough."""
        return oldest.arrived_at + self.max_batch_delay_ms / 1e3


@dataclass(frozen=True)
class Windowed(Delayed):
    """One queue. With `preferred_batch_sizes` (Triton's) a batch is as large as the largest of them
    that the queue fills, and only waits while it fills none.
    """

    repeats: ClassVar[bool] = True
    preferred_batch_sizes: tuple[int, ...] = setting(
        (),
        "instead of batch_size_target: the largest of these that the queue fills goes at once",
        "none",
    )

    def warnings(self, max_batch_size: int) -> list[str]:
        return [] if self.preferred_batch_sizes else super().warnings(max_batch_size)

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        queue = view.queues[0]
        if not (oldest := queue.oldest):
            return Plan()
        most = self.max_rows(view.limits.max_batch_size)
        for size in sorted(self.preferred_batch_sizes, reverse=True):
            if size <= min(len(queue), most):
                plan = self._begin(queue, view, "preferred", size)
                if len(plan.admit) == size:  # requests of several prompts may fill none exactly
                    return plan
        if not self.preferred_batch_sizes and len(queue) >= self._target(view):
            return self._begin(queue, view, "target")
        if view.now >= (due := self._due(oldest[0])):
            return self._begin(queue, view, "delay", first=oldest)
        return Plan(wake_at=due)
