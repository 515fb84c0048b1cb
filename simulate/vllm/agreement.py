"""The schedule of a recording and ours: our scheduler gets the requests when vLLM's did, plans at
the same instants, and is told the same ends of iterations. After a first difference both are in
different states, so that nothing more is compared.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from config.config import Config
from scheduling.building import build_group, build_scheduler
from scheduling.errors import Cancelled
from scheduling.inference import Inference, Iteration, Slo, State
from simulate.vllm.recording import Asked, Head, RecordedIteration, Recording, read
from simulate.vllm.traffic import Traffic


class Agreement(NamedTuple):
    """How many of a recording's iterations, from the first on, our scheduler plans as vLLM did."""

    equal: int
    of: int
    difference: str = ""  # in words; nothing: there is none

    def __str__(self) -> str:
        if not self.difference:
            return f"Our scheduler plans all {self.of:,} recorded iterations as vLLM did."
        return (
            f"Our scheduler plans the first {self.equal:,} of {self.of:,} recorded iterations as "
            f"vLLM did; then {self.difference}."
        )


def agreement(recording: Recording, traffic: Traffic, config: Config) -> Agreement | None:
    """Compare the rows of each iteration; None where the two cannot be compared: vLLM planned ahead
    of what it computed, or the file begins in the middle. recording: read to its end.
    """
    again = build_scheduler(config)
    tokens = {  # a client that gives up ends a request that would go on
        number: recording.asked[number].max_tokens if ended is State.CANCELLED else n
        for number, i in recording.requests.items()
        for ended, n in [(i.state, len(i.tokens) or 1)]
    }
    flying: dict[int, Inference] = {}
    numbers: dict[Inference, int] = {}
    equal, total, until, difference = 0, 0, 0.0, ""
    if recording.head.in_flight:
        return None
    # no more lines than were read before: vLLM may go on
    for step in itertools.islice(read(recording.path).steps(), recording.iterations):
        total += 1
        if difference:
            continue
        if step.at < until:  # it was planned before the last one was over
            return None
        until = step.until
        if gave_up := [flying[number] for number in step.aborted if number in flying]:
            again.fail(gave_up, Cancelled("Its client gave up."), step.at)
        for asked in step.new:
            if asked.number in step.aborted:  # the scheduler never saw it
                continue
            ids = traffic.ids(recording.requests[asked.number], asked.number)
            group = build_group(
                config, [ids], tokens[asked.number], priority=traffic.level(asked.number),
                user=asked.user, slo=Slo(asked.ttft_ms, asked.tpot_ms),
                expected_tokens=ids.expected_tokens,
            )  # fmt: skip
            again.enqueue(group, _came(recording.head, asked, step))
            flying[asked.number] = group[0]
            numbers[group[0]] = asked.number
        iteration, _ = again.schedule(step.at)
        ours = {numbers[row.inference]: (row.start, row.n_tokens) for row in iteration.rows}
        theirs = {number: (start, n) for number, start, n, _ in step.rows}
        if ours != theirs:
            difference = _difference(ours, theirs)
            continue
        equal += 1
        again.apply(iteration, next_ids(iteration), step.until)
    return Agreement(equal, total, difference)


def _came(head: Head, asked: Asked, step: RecordedIteration) -> float:
    """Return the instant by which what scheduled it took a request to have come."""
    if head.policy == "priority":
        return asked.arrived_at
    return asked.queued_at if head.order and asked.queued_at is not None else step.at


def next_ids(iteration: Iteration) -> list[int]:
    """Return the ids that rows of recorded requests sample."""
    return [
        row.inference.prompt_ids.at(row.start + row.n_tokens)  # type: ignore[attr-defined]
        for row in iteration.rows
        if row.samples
    ]


def _difference(ours: dict[int, tuple[int, int]], theirs: dict[int, tuple[int, int]]) -> str:
    """Return a difference of two iterations, in words."""
    number = next(n for n in {**theirs, **ours} if ours.get(n) != theirs.get(n))
    if number not in ours:
        return f"vLLM computes request {number}, and ours does not"
    if number not in theirs:
        return f"ours computes request {number}, and vLLM does not"
    (our_start, our_n), (start, n) = ours[number], theirs[number]
    return (
        f"vLLM computes {n} tokens of request {number} from {start} on, and ours {our_n} from "
        f"{our_start} on"
    )
