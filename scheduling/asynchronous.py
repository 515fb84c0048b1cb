"""Tokens that are not known yet, so that an iteration can be planned while the one before it is
computed (vLLM's asynchronous scheduling).

What an iteration does to the scheduler depends on how many tokens it samples, and not on which,
except where a stop string ends a request. So it is applied as soon as it is launched, with a number
below 0 in the place of each token; the engine takes the token from what it sampled last. If it then
turns out to be a request's last one, the row that was planned after it is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from scheduling.inference import Inference, Iteration, State
from scheduling.scheduler import Scheduler


def unknown(place: int) -> int:
    """Return what stands for the `place`-th id of an iteration until it is known."""
    return -1 - place


class Unknown(NamedTuple):
    """A token of an inference: its number in the completion, and its place in the iteration."""

    inference: Inference
    number: int
    place: int


def unknown_of(iteration: Iteration, before: Sequence[int]) -> list[Unknown]:
    """Return the tokens of an iteration that was applied. before: those that each row had then."""
    sampled = [(row, n) for row, n in zip(iteration.rows, before) if row.samples]
    return [
        Unknown(row.inference, n, place)
        for place, (row, n) in enumerate(sampled)
        if len(row.inference.tokens) > n
    ]


def is_known(inference: Inference) -> bool:
    """Return whether all of its tokens are known."""
    return not inference.tokens or inference.tokens[-1] >= 0


def forget_unknown(inference: Inference) -> int:
    """Remove the tokens that are not known, and return how many they were."""
    n = len(inference.tokens)
    while not is_known(inference):
        del inference.tokens[-1], inference.token_times[-1]
    if removed := n - len(inference.tokens):  # an idle row computes the last one that is left
        end = len(inference.prompt_ids) + len(inference.tokens)
        inference.computed = min(inference.computed, end - 1)
    return removed


def known_to(stop: Callable[[int], bool]) -> Callable[[int], bool]:
    """Return an inference's `stop` that ignores tokens which are not known yet."""
    return lambda token: token >= 0 and stop(token)


def reads_ids(iteration: Iteration, block_size: int) -> bool:
    """Return whether the host needs the ids of the iteration before to compute one: penalties count
    tokens, a wasted row must not be scored, and the last block of a request is named at its end.
    """
    for inference, start, n_tokens, *_ in iteration.rows:
        if inference.sampling.penalizes or inference.scores is not None:
            return True
        ends = len(inference.tokens) + 1 == inference.num_tokens
        if inference.prefix is not None and ends and (start + n_tokens) % block_size == 0:
            return True
    return False


def without_ended(iteration: Iteration) -> Iteration:
    """Return an iteration whose rows of inferences that ended since its plan are idle."""
    rows = [row._replace(idle=row.idle or row.inference.is_over) for row in iteration.rows]
    return iteration._replace(rows=rows)


def fill(
    scheduler: Scheduler, tokens: Sequence[Unknown], ids: Sequence[int], now: float
) -> list[Inference]:
    """Put an iteration's ids, which are known now, into their places, and name the KV blocks that
    they fill; return the inferences to answer because they end with them, though more was planned.
    """
    stopped = []
    for inference, number, place in tokens:
        if is_lost(inference, number):
            continue
        inference.tokens[number], inference.token_times[number] = ids[place], now
        if inference.stop is not None and inference.stop(ids[place]):
            inference.stopped = True
            scheduler.completion_tokens -= forget_unknown(inference)
            stopped.append(inference)
        elif inference.prefix is not None and inference.state is State.RUNNING:
            scheduler.pool.cache_computed(inference, inference.prefix)
    return stop(scheduler, stopped, now)


def stop(scheduler: Scheduler, inferences: Iterable[Inference], now: float) -> list[Inference]:
    """Finish inferences of which an earlier token is the last; return all to answer now. Those that
    were planned to be finished by now are left alone.
    """
    over = []
    for inference in inferences:
        if inference.state is State.WAITING:  # preempted, in vain
            scheduler.stop_waiting(inference)
            scheduler.running[inference.id], inference.state = inference, State.RUNNING
        elif inference.id not in scheduler.running or inference.state is not State.RUNNING:
            continue
        inference.is_over = True
        over.append(inference)
    return scheduler.finish(over, now) if over else []


def is_lost(inference: Inference, number: int) -> bool:
    """Return whether an inference ended, in error or with an earlier token, before this one."""
    return inference.error is not None or number >= len(inference.tokens)


def as_computed(iteration: Iteration, tokens: Sequence[Unknown]) -> Iteration:
    """Return the iteration with those rows idle whose tokens are lost."""
    lost = {inference for inference, number, _ in tokens if is_lost(inference, number)}
    if not lost:
        return iteration
    rows = [
        row._replace(idle=True) if row.inference in lost and row.decodes else row
        for row in iteration.rows
    ]
    return iteration._replace(rows=rows)
