"""Pending tokens, so that an iteration can be planned while the one before it is computed (vLLM's
asynchronous scheduling; the overlapped loop of mini-sglang).

What an iteration does to the scheduler depends on how many tokens it samples, and not on which,
except where a stop string ends a request. So it is applied before its ids are known. The last token
of a request is then pending: ~place, below 0, of its id among those that the iteration samples.
The engine takes the id from there. If the id turns out to be a request's last one, the row that was
planned after it is wasted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduling.inference import Inference, Iteration, State
from scheduling.scheduler import Scheduler


def pending(iteration: Iteration) -> range:
    """Return what stands for the ids of an iteration until they are known: ~0, ~1, …"""
    return range(~0, ~sum([row.samples for row in iteration.rows]), -1)


def reads_ids(iteration: Iteration) -> bool:
    """Return whether the host needs the ids of the iteration before to compute one: penalties count
    tokens, and a wasted row must not be scored.
    """
    inferences = (row.inference for row in iteration.rows)
    return any(each.scores is not None or each.sampling.penalizes for each in inferences)


def without_ended(iteration: Iteration) -> Iteration:
    """Return an iteration whose rows of inferences that ended since its plan are idle."""
    if not any(row.inference.is_over and not row.idle for row in iteration.rows):
        return iteration
    rows = [row._replace(idle=True) if row.inference.is_over else row for row in iteration.rows]
    return iteration._replace(rows=rows)


def fill(
    scheduler: Scheduler, iteration: Iteration, ids: Sequence[int], now: float
) -> list[Inference]:
    """Put the ids of an iteration in the place of its pending tokens; return the inferences to
    answer because they stop with them. Raises ValueError if there is not an id for each.
    """
    over = []
    sampled = [row for row in iteration.rows if row.samples]
    for row, token in zip(sampled, ids, strict=True):
        if row.idle:
            continue
        inference = row.inference
        inference.tokens[-1], inference.token_times[-1] = token, now
        if inference.stop is not None and inference.stop(token):
            inference.stopped = True
            if not inference.is_over:
                over.append(inference)
    for inference in over:
        inference.is_over = True
        if inference.id in scheduler.waiting:  # preempted meanwhile, in vain
            scheduler.stop_waiting(inference)
            scheduler.running[inference.id], inference.state = inference, State.RUNNING
    return scheduler.finish(over, now) if over else []


def forget_pending(inferences: Iterable[Inference]) -> None:
    """Remove the pending tokens of inferences, whose iteration failed."""
    for inference in inferences:
        if inference.tokens and inference.tokens[-1] < 0:
            del inference.tokens[-1], inference.token_times[-1]
