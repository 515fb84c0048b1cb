"""Virtual time: the server's own scheduler without its thread, its clock and its tensors.

Knows no torch, no HTTP and no clock. Tests, benchmarks and what else plans ahead drive the
scheduler by this one loop, which does what the handler thread of `batching` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration
from scheduling.scheduler import Scheduler


def any_ids(iteration: Iteration) -> list[int]:
    """An id for each row that samples, where nobody reads the text."""
    return [0] * sum(row.samples for row in iteration.rows)


def drive(
    scheduler: Scheduler,
    arrivals: Iterable[tuple[float, Sequence[Inference]]],
    cost_s: Callable[[Iteration], float],
    generate: Callable[[Iteration], Sequence[int]] = any_ids,
    planned: Callable[[float, Iteration], None] = lambda now, iteration: None,
) -> float:
    """Serve groups of inferences to the end, and return the time at which it is.

    They have their stamps and tokens then. arrivals: (seconds, group), by time. cost_s: how long an
    iteration takes. planned: told of each iteration before it is computed, and when. A group that
    is refused keeps the refusal as its members' `error`. Raises RuntimeError if nothing runs and
    nothing is waited for while work is left.
    """
    now = 0.0
    coming = iter(arrivals)
    following = next(coming, None)
    while following is not None or scheduler.has_work:
        while following is not None and following[0] <= now:
            _enqueue(scheduler, following[1], following[0])
            following = next(coming, None)
        scheduler.expire(now)
        iteration, wake_at = scheduler.schedule(now)
        planned(now, iteration)
        if iteration.rows:
            now += cost_s(iteration)
            scheduler.apply(iteration, generate(iteration), now)
            continue
        events = [
            at
            for at in (following and following[0], wake_at, scheduler.next_deadline())
            if at is not None
        ]
        if scheduler.has_work and not (events and min(events) > now):
            raise RuntimeError(
                f"{scheduler.policy} neither runs nor waits for anything at {now:g} s, and work is "
                f"left"
            )
        now = min(events, default=now)
    return now


def _enqueue(scheduler: Scheduler, group: Sequence[Inference], now: float) -> None:
    try:
        scheduler.enqueue(group, now)
    except ServingError as refusal:
        for inference in group:
            inference.error = refusal
