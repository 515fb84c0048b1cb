"""Iterations that repeat: how many, and their effects applied at once.

The scheduler plans and applies one iteration at a time. Until something begins or ends its plans
are equal, so a simulator may jump over them, with the same result.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

from scheduling.inference import Inference, Iteration, State
from scheduling.scheduler import Scheduler


def repeats(scheduler: Scheduler, iteration: Iteration) -> int:
    """Return how many iterations, from this one on, compute the same rows, a token each, as long as
    nothing is cancelled, passes its deadline or arrives (unless it `cannot_join`). 1: the next plan
    is not known.
    """
    # a memory takes each iteration
    if scheduler.order.by_service or scheduler.memories or not scheduler.plans_repeat:
        return 1
    if scheduler.waiting and not cannot_join(scheduler):  # one may find blocks
        return 1
    size, most, live = scheduler.limits.block_size, sys.maxsize, 0
    for row in reversed(iteration.rows):  # those that compute a prompt came last
        inference, _, _, _, samples, idle, *_ = row
        if idle:
            continue
        live += 1
        if not samples or inference.stop is not None:
            return 1
        if not inference.decodes and scheduler.limits.decoder_batch_sizes:  # the next may be padded
            return 1
        if (remaining := inference.num_tokens - len(inference.tokens)) < most:
            most = remaining
        if (prefix := inference.prefix) is not None:  # others can find a block that it fills
            if not inference.decodes:
                return 1
            most = min(most, (prefix.n_blocks + 1) * size - inference.computed)
    unfinished = [inference.is_over for inference in scheduler.running.values()].count(False)
    if live != unfinished or most == sys.maxsize:
        return 1
    return _with_blocks(scheduler, iteration, most, live) if scheduler.policy.on_demand else most


def _with_blocks(scheduler: Scheduler, iteration: Iteration, most: int, live: int) -> int:
    """Return for how many iterations, `most` at most, there are KV blocks."""
    size, free = scheduler.limits.block_size, scheduler.pool.free_blocks

    def needed(later: int) -> int:
        """Return how many blocks so many iterations after this one need."""
        return sum(
            [
                max(0, -(-(start + n + later) // size) - len(blocks))
                for _, start, n, blocks, _, idle, *_ in iteration.rows
                if not idle
            ]
        )

    if live * -(-(most - 1) // size) <= free:  # more than are needed
        return most
    return bisect_right(range(most), free, key=needed)


def reserve_repeated(scheduler: Scheduler, iteration: Iteration, later: int) -> None:
    """Give rows the KV blocks that they fill in so many iterations after this one, in the order in
    which they would get them.
    """
    if not (later and scheduler.policy.on_demand):
        return
    size, wanted = scheduler.limits.block_size, list[tuple[int, int, Inference]]()
    for place, (inference, start, n, blocks, _, idle, _, _) in enumerate(iteration.rows):
        end, has = start + n, len(blocks)
        if end + later > has * size and not idle and inference.state is State.RUNNING:
            for block in range(has, -(-(end + later) // size)):
                wanted.append((block * size - end, place, inference))
    for _, _, inference in sorted(wanted):
        scheduler.pool.reserve(inference, (len(inference.blocks) + 1) * size)


def cannot_join(scheduler: Scheduler) -> bool:
    """Return whether an arrival leaves the repeated plan as it is."""
    policy, most = scheduler.policy, scheduler.limits.max_batch_size
    return policy.request_level or len(scheduler.running) >= policy.max_rows(most)


def apply_repeated(
    scheduler: Scheduler, iteration: Iteration, ids: Iterable[int], times: Sequence[float]
) -> list[Inference]:
    """Apply an iteration and the repeated ones after it, given when each of them ended; return the
    inferences to answer. `ids`: of the first one.
    """
    *before, now = times
    if not before:
        return scheduler.apply(iteration, ids, now)
    reserve_repeated(scheduler, iteration, len(before))
    sampled, n = list(islice(ids, len(iteration.rows))), len(before)  # each row samples
    for row, token in zip(iteration.rows, sampled):
        if not row.idle and row.inference.state is State.RUNNING:
            row.inference.computed += n
            row.inference.tokens += [token] * n
            row.inference.token_times += before
            scheduler.completion_tokens += n
    return scheduler.apply(iteration, sampled, now)
