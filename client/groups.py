"""Who waits: the requests of a trace by length, by user and by priority, and what each group got.

Which request is in which group follows from the trace alone, so a group is the same in every
variant. Its numbers are keyed by its name: a quartile, a user, a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stats import distribution

if TYPE_CHECKING:
    from client.data import Request
    from client.load import Outcome

MEASURES = ("mean", "p50", "p99")
TOLD = 6  # users who are told one by one
NOBODY = ""  # the user of requests that name none; no user has an empty name
REFUSED = "429 "  # how such an error begins: the queue is full, or a user beyond a limit


def quartiles(lengths: Sequence[int]) -> list[int]:
    """Of each length its quarter: 1 for the shortest, 4 for the longest.

    Equal lengths are in one quarter, that of their middle. Of no more than four lengths each is
    one by itself: where half of a trace is of one length, chance would decide between two quarters.
    """
    if len(values := np.unique(lengths)) <= 4:
        return [int(i) + 1 for i in np.searchsorted(values, lengths)]
    ordered = np.sort(lengths)
    first, last = (np.searchsorted(ordered, lengths, side) for side in ("left", "right"))
    middle = (first + last) / 2 / len(lengths)
    return [int(quarter) for quarter in np.ceil(4 * middle)]


def by_user(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Each user's requests, who comes first first; empty where no request names a user."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(request.user or NOBODY, []).append(request)
    return {} if found.keys() <= {NOBODY} else found


def by_priority(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Each level's requests, the highest level (1) first and the default one (0) last; empty where
    no request names a level.
    """
    found: dict[int, list[Request]] = {}
    for request in requests:
        found.setdefault(request.priority or 0, []).append(request)
    levels = sorted(found, key=lambda level: level or float("inf"))
    return {} if found.keys() <= {0} else {str(level): found[level] for level in levels}


def by_length(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """The quarters of the trace by completion tokens asked for."""
    found: dict[str, list[Request]] = {}
    for quarter, request in sorted(
        zip(quartiles([request.num_tokens for request in requests]), requests),
        key=lambda pair: pair[0],
    ):
        found.setdefault(str(quarter), []).append(request)
    return found


def asked(requests: Sequence[Request]) -> dict[str, Any]:
    """What users ask for, from when to when, and how many requests have each level."""
    users = {
        name: {
            "requests": len(mine),
            "first_at": min(request.at for request in mine),
            "last_at": max(request.at for request in mine),
        }
        for name, mine in by_user(requests).items()
    }
    levels = {level: len(mine) for level, mine in by_priority(requests).items()}
    return {"by_user": users, "by_priority": levels}


def asked_in_words(load: Mapping[str, Any]) -> str:
    """`asked` as the end of a sentence; of a workload without users and levels nothing."""
    text = ""
    if users := load.get("by_user"):  # earlier versions knew none
        said = [
            f"{mine['requests']} of {name or 'nobody'} from {mine['first_at']:.1f} to "
            f"{mine['last_at']:.1f} s"
            for name, mine in users.items()
        ]
        text += f"; {', '.join(said)}" if len(said) <= TOLD else f"; of {len(said)} users"
    if levels := load.get("by_priority"):
        said = [
            f"{n} of {f'level {level}' if level != '0' else 'the default level'}"
            for level, n in levels.items()
        ]
        text += f"; {', '.join(said)}"
    return text


def measured(
    requests: Sequence[Request], outcomes: Sequence[Outcome], wall_clock_s: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """{"by_length" | "by_user" | "by_priority": {group: its numbers}}, as DEFINITIONS says."""
    ended = {outcome.request.id: outcome for outcome in outcomes}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, groups in (
        ("by_length", by_length(requests)),
        ("by_user", by_user(requests)),
        ("by_priority", by_priority(requests)),
    ):
        found[kind] = {
            name: _numbers([ended[r.id] for r in mine if r.id in ended], wall_clock_s)
            for name, mine in groups.items()
        }
        if kind == "by_length":
            for name, mine in groups.items():
                lengths = [request.num_tokens for request in mine]
                found[kind][name] |= {"least_tokens": min(lengths), "most_tokens": max(lengths)}
    return found


def _numbers(outcomes: Sequence[Outcome], wall_clock_s: float) -> dict[str, Any]:
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    tokens = sum(answer.completion_tokens for answer in answers)
    timings = [answer.timings for answer in answers if answer.timings]
    found: dict[str, Any] = {
        "completed": len(answers),
        "failed": len(outcomes) - len(answers),
        "refused": sum(outcome.error.startswith(REFUSED) for outcome in outcomes),
        "output_throughput": tokens / wall_clock_s if wall_clock_s else 0.0,
    }
    found |= _chosen(distribution("e2el", (answer.e2e_s for answer in answers)))
    found |= _chosen(distribution("ttft", (answer.ttft_s for answer in answers)))
    for name in ("preempted", "paused"):  # a server that does neither need not say so
        told = distribution(name, (float(t.get(f"{name}_s", 0.0)) for t in timings))
        found[f"mean_{name}_ms"] = told[f"mean_{name}_ms"]
    return found


def _chosen(distributed: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: distributed[name] for name in distributed if name.split("_")[0] in MEASURES}
