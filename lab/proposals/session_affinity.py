"""vLLM pull request 51384, "[Core][V1] Add bounded session-affinity scheduler" (open).

Read: its description in part, and its code (session_affinity_scheduler.py). Taken: which
request is promoted, and when none is. Chosen here: a session is a request's `user`; its last turn
is not remembered, so that no session is ever forgotten; of equally cached requests the first
arrival goes. The defaults were not found; those below are ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.orders import Order
from scheduling.queue import Queue


@dataclass(frozen=True)
class SessionAffinity(Order):
    """First come, first served, but for one request an iteration: of the oldest `session_window`,
    that of a known user with the most cached KV blocks goes first, unless the oldest was preempted
    or has waited for `session_max_wait_s`.
    """

    in_order: ClassVar[bool] = False
    session_window: int = setting(16, "oldest requests of which one may go first", ge=1)
    session_min_blocks: int = setting(1, "cached KV blocks without which none does", ge=1)
    session_max_wait_s: float = setting(1.0, "longest wait of the oldest before others", gt=0)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        oldest = list(islice(queue.by_key.values(), self.session_window))
        promoted = self._promoted(oldest, view) if oldest else None
        if promoted is not None:
            yield from (i for i in queue.by_key.values() if i.group == promoted)
        yield from (i for i in queue.by_key.values() if i.group != promoted)

    def _promoted(self, oldest: list[Inference], view: View) -> int | None:
        """Return the group that goes first, if that is not as they came."""
        head, *others = oldest
        waited = view.now - head.arrived_at
        if head.interruptions.preempted_at is not None or waited >= self.session_max_wait_s:
            return None
        hits = {
            i.group: len(view.find(i))
            for i in others
            if i.user is not None and i.interruptions.preempted_at is None
        }
        best = max(hits, key=lambda group: (hits[group], -group), default=None)
        return best if best is not None and hits[best] >= self.session_min_blocks else None
