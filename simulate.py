"""Virtual time: the server's own scheduler without its thread, its clock and its tensors.

Knows no torch, no HTTP and no clock. Tests, benchmarks and what else plans ahead drive the
scheduler by this one loop, which does what the handler thread of `batching` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration
from scheduling.scheduler import Scheduler

Arrival = tuple[float, Sequence[Inference]]  # when, and who comes together


def any_ids(iteration: Iteration) -> list[int]:
    """An id for each row that samples, where nobody reads the text."""
    return [0] * sum(row.samples for row in iteration.rows)


def drive(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    cost_s: Callable[[Iteration], float],
    generate: Callable[[Iteration], Sequence[int]] = any_ids,
    planned: Callable[[float, Iteration], None] = lambda now, iteration: None,
    ended: Callable[[float, Inference], Iterable[Arrival]] = lambda now, inference: (),
) -> float:
    """Serve groups of inferences to the end, and return the time at which it is.

    They have their stamps and tokens then. arrivals: (seconds, group), by time, drawn as they come.
    cost_s: how long an iteration takes. planned: told of each iteration before it is computed, and
    when. ended: told of each inference that is answered, expired or refused, and when; what it
    returns arrives too, no earlier than that, such as the next turn of a conversation. A group that
    is refused keeps the refusal as its members' `error`. Raises RuntimeError if nothing runs and
    nothing is waited for while work is left.
    """
    now = 0.0
    coming = _Coming(arrivals)
    while coming.at is not None or scheduler.has_work:
        while coming.at is not None and coming.at <= now:
            at, group = coming.pop()
            for refused in _enqueue(scheduler, group, at):
                coming.add(ended(at, refused))
        for late in scheduler.expire(now):
            coming.add(ended(now, late))
        if coming.at is not None and coming.at <= now:
            continue  # whoever was late is back at once
        iteration, wake_at = scheduler.schedule(now)
        planned(now, iteration)
        if iteration.rows:
            now += cost_s(iteration)
            for answered in scheduler.apply(iteration, generate(iteration), now):
                coming.add(ended(now, answered))
            continue
        events = [at for at in (coming.at, wake_at, scheduler.next_deadline()) if at is not None]
        if scheduler.has_work and not (events and min(events) > now):
            raise RuntimeError(
                f"{scheduler.policy} neither runs nor waits for anything at {now:g} s, and work is "
                f"left"
            )
        now = min(events, default=now)
    return now


class _Coming:
    """Arrivals by time: of those at one instant the trace's first, then the others as they were
    added. Of the trace only the next one is held.
    """

    def __init__(self, trace: Iterable[Arrival]):
        self._trace = iter(trace)
        self._heap: list[tuple[float, int, Sequence[Inference]]] = []
        self._added = itertools.count(1)
        self._draw()

    def _draw(self) -> None:
        for at, group in itertools.islice(self._trace, 1):
            heapq.heappush(self._heap, (at, 0, group))

    def add(self, arrivals: Iterable[Arrival]) -> None:
        for at, group in arrivals:
            heapq.heappush(self._heap, (at, next(self._added), group))

    @property
    def at(self) -> float | None:
        """When the next ones come; None: nobody does."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Arrival:
        at, number, group = heapq.heappop(self._heap)
        if number == 0:
            self._draw()
        return at, group


def _enqueue(scheduler: Scheduler, group: Sequence[Inference], now: float) -> Sequence[Inference]:
    """Queue a group; return its members if they are refused."""
    try:
        scheduler.enqueue(group, now)
    except ServingError as refusal:
        for inference in group:
            inference.error = refusal
        return group
    return ()
