"""Where a request's time goes: its instants, parts that sum to its latency, and its neighbours
meanwhile. The server, the simulator and reports of saved runs share these definitions; pure.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling.extensions import Extension, Group
from scheduling.inference import Inference

PARTS = {  # in the order in which they begin, with what they mean
    "batch": "waiting for a batch or a free row",
    "blocks": "waiting for KV blocks, with a row free",
    "prefill": "computing the prompt",
    "decode": "from the first token to the last",
    "preempted": "waiting again",
    "recompute": "computing again what a preemption took, up to the next token",
    "paused": "not computed, its KV blocks kept",
    "held": "waiting for batch mates",
}
NAMED = 3  # neighbours, of each kind
LEAST_S = 1e-5  # that neighbours are together; less is rounding


class Shortage(Extension):
    """Seconds in which KV blocks kept waiting requests from free rows."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, math.inf  # inf: there is none now

    def note(self, short: bool, now: float) -> None:
        """Note what a plan says."""
        if short != (self._since < math.inf):
            self._before, self._since = self._total(now), now if short else math.inf

    def arrive(self, group: Group, now: float) -> None:
        for member in group:
            member.standing.blocked_from = self._total(now)

    def count(self, inference: Inference, now: float) -> None:
        """Count those of a request that was never admitted, here or elsewhere, up to now."""
        if inference.admitted_at is None:
            standing = inference.standing
            standing.blocked_s = max(0.0, self._total(now) - standing.blocked_from)

    admit = end = count

    def _total(self, now: float) -> float:
        return self._before + max(0.0, now - self._since)


@dataclass(slots=True)
class Times:
    """The instants of a request, in seconds on one clock, or columns of many. Not frozen, which
    takes 2 µs more for every answer of a server.
    """

    started_at: Any
    admitted_at: Any
    first_token_at: Any
    last_token_at: Any
    answered_at: Any
    completion_tokens: Any = math.nan
    token_times: Sequence[float] = ()
    preempted_s: Any = 0.0
    paused_s: Any = 0.0
    prompt_tokens: int = 0

    def ending_at(self, answered_at: float) -> Times:
        """Return these instants on a clock that shows `answered_at` when the answer comes."""
        later = answered_at - self.answered_at
        return Times(
            self.started_at + later, self.admitted_at + later, self.first_token_at + later,
            self.last_token_at + later, answered_at, self.completion_tokens,
        )  # fmt: skip


def times_of(inference: Inference, now: float | None = None) -> Times:
    """Return the instants of an inference; `now`, or else its end, for those still to come."""
    i, made, interruptions = inference, inference.token_times, inference.interruptions
    until: Any = i.answered_at if now is None else now
    return Times(
        i.arrived_at,
        until if i.admitted_at is None else i.admitted_at,
        made[0] if made else until,
        made[-1] if i.stopped or len(made) >= i.num_tokens else until,
        until, len(made), made, interruptions.preempted_s, interruptions.paused_s,
        len(i.prompt_ids),
    )  # fmt: skip


def parts_of(inference: Inference, times: Times) -> dict[str, float]:
    """Return the seconds of each of PARTS that took any, to the microsecond, up to its end, or to
    now: their sum is its latency. times: its instants.
    """
    admitted, first, last = times.admitted_at, times.first_token_at, times.last_token_at
    queued_s, until = admitted - times.started_at, times.answered_at
    blocked_s = min(inference.standing.blocked_s, queued_s)
    parts = dict.fromkeys(PARTS, 0.0)
    parts["batch"], parts["blocks"] = queued_s - blocked_s, blocked_s
    phases = ("prefill", admitted, first), ("decode", first, last), ("held", last, until)
    for name, begun, ended in phases:
        parts[name] = ended - begun
    for kind, since, to in _interruptions(inference, until):
        for name, *phase in phases:
            cut = _overlap(since, to, *phase)
            parts[name] -= cut
            parts[kind] += cut
    return {name: rounded for name, s in parts.items() if (rounded := round(s, 6))}


def _interruptions(inference: Inference, until: float) -> Iterator[tuple[str, float, float]]:
    """Yield kind, begin and end of what interrupted prefill and decode, without overlaps."""
    of, made = inference.interruptions, inference.token_times
    spans = of.spans + of.lasting(until)
    for i, (since, to, kind) in enumerate(spans):
        yield kind, since, to
        if kind == "preempted" and (n := bisect(made, to)):  # else its prefill begins again
            following = [*made[n : n + 1], *(span[0] for span in spans[i + 1 : i + 2])]
            yield "recompute", to, min(following, default=until)


def _overlap(since: float, to: float, begun: float, ended: float) -> float:
    return max(0.0, min(to, ended) - max(since, begun))


def neighbours(number: int, times: Mapping[int, Times]) -> dict[str, Any]:
    """Return how many requests ran while one waited, and beside it; the numbers of those that ran
    beside it longest, the mean of their number at a time, and the longest prompts computed then.

    times: those of all requests, by number.
    """
    before, beside, prompts = 0, list[tuple[float, int]](), list[tuple[int, int]]()
    one = times[number]
    for other, its in times.items():
        if other == number:
            continue
        runs = its.admitted_at, its.last_token_at
        before += _overlap(one.started_at, one.admitted_at, *runs) > LEAST_S
        if (seconds := _overlap(one.admitted_at, one.last_token_at, *runs)) > LEAST_S:
            beside.append((seconds, other))
            if its.first_token_at > one.admitted_at + LEAST_S:
                prompts.append((its.prompt_tokens, other))
    total_s = sum([seconds for seconds, _ in beside])
    return {
        "ran_before": before,
        "ran_beside": len(beside),
        "longest_beside": [other for _, other in sorted(beside, reverse=True)[:NAMED]],
        "mean_rows": total_s / (one.last_token_at - one.admitted_at) if beside else 0.0,
        "long_prompts": {str(other): n for n, other in sorted(prompts, reverse=True)[:NAMED]},
    }
