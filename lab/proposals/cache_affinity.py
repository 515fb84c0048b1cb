"""vLLM RFC 42185, "Cache-affinity-aware request ordering for the V1 scheduler" (closed as stale).

Read: its description in part, and the author's branch (cache_affinity_scheduler.py). Taken: the
order and its defaults. Left out: priorities before the cache, which are `--order priority` here.
Not said: the order of those that have waited too long, which is that of arrival here.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.orders import Order, oldest_sorted
from scheduling.queue import Queue


@dataclass(frozen=True)
class CacheAffinity(Order):
    """The bucket of the most cached KV blocks first; within one, as they came. Before them
    preempted requests, and then those that waited for more than `affinity_max_wait_s`.
    """

    in_order: ClassVar[bool] = False
    affinity_max_wait_s: float = setting(0.05, "longest wait before any that is cached", gt=0)
    affinity_min_blocks: int = setting(2, "cached KV blocks that count at least", ge=1)
    affinity_buckets: tuple[int, ...] = setting(
        (4, 16, 64, 256), "cached KV blocks at which buckets begin", "4,16,64,256"
    )
    affinity_guard_s: float = setting(0.01, "requests this close go as they came", ge=0)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        edges = sorted(self.affinity_buckets)

        def bucket(members: Sequence[Inference]) -> int:
            blocks = max(len(view.find(member)) for member in members)
            return 1 + bisect_right(edges, blocks) if blocks >= self.affinity_min_blocks else 0

        def place(members: Sequence[Inference]) -> tuple[Any, ...]:
            first = members[0]
            if first.interruptions.preempted_at is not None:
                return 0, first.arrived_at
            if view.now - first.arrived_at > self.affinity_max_wait_s:
                return 1, first.arrived_at
            return 2, -bucket(members), first.arrived_at

        arrivals = [inference.arrived_at for inference in queue.by_arrival.values()]
        if not arrivals or arrivals[-1] - arrivals[0] < self.affinity_guard_s:
            return super().ordered(queue, view)
        return oldest_sorted(queue, len(queue), place)
