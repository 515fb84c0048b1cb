"""Static batches that wait for company ("dynamic batching" in Triton and Wallaroo)."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.policies.base import Plan, View, setting
from scheduling.policies.static import Static


@dataclass(frozen=True)
class Windowed(Static):
    """A batch forms when `batch_size_target` rows wait, or the oldest has for `max_batch_delay_ms`.

    The delay is measured from its arrival, so that time spent behind a running batch
    counts. A batch takes at most `batch_size_limit` rows, and can never be larger than its
    limits, so neither can the target.
    """

    max_batch_delay_ms: float = setting(
        10.0,
        "a batch forms when the oldest request has waited this long",
        gt=0,
        allow_inf_nan=False,
    )
    batch_size_target: int = setting(4, "a batch forms when this many rows wait", ge=1)
    batch_size_limit: int | None = setting(None, "rows in a batch at most", "none", ge=1)

    def most_rows(self, max_batch_size: int) -> int:
        return min(self.batch_size_limit or max_batch_size, max_batch_size)

    def warnings(self, max_batch_size: int) -> list[str]:
        if self.batch_size_target <= (most := self.most_rows(max_batch_size)):
            return []
        return [
            f"batch_size_target {self.batch_size_target} can never be reached with "
            f"batch_size_limit {self.batch_size_limit or 'none'} and max_batch_size "
            f"{max_batch_size}: batches form at {most}"
        ]

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        if view.oldest_arrival is None:
            return Plan()
        due = view.oldest_arrival + self.max_batch_delay_ms / 1e3
        if len(view.waiting) >= min(
            self.batch_size_target, self.most_rows(view.limits.max_batch_size)
        ):
            reason = "target"
        elif view.now >= due:
            reason = "delay"
        else:
            return Plan(wake_at=due)
        return self._begin(view, reason)
