"""Who waits: the requests of a trace by length, by user and by priority, and what each group got.

Which request is in which group follows from the trace alone, so a group is the same in every
variant. Its numbers are keyed by its name: a quartile, a user, a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.columns import NOBODY, Outcomes, Trace
from stats import MEASURES, distribution

TOLD = 6  # users who are told one by one


def quartiles(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Of each length its quarter: 1 for the shortest, 4 for the longest.

    Equal lengths are in one quarter, that of their middle. Of no more than four lengths each is
    one by itself: where half of a trace is of one length, chance would decide between two quarters.
    """
    if len(values := np.unique(lengths)) <= 4:
        return np.searchsorted(values, lengths) + 1
    ordered = np.sort(lengths)
    first, last = (np.searchsorted(ordered, lengths, side) for side in ("left", "right"))
    middle = (first + last) / 2 / len(lengths)
    return np.ceil(4 * middle).astype(int)


Groups = dict[str, np.ndarray]  # of each group its requests, by their numbers in the trace


def by_user(trace: Trace) -> Groups:
    """Each user's requests, who comes first first; empty where no request names a user."""
    if list(trace.names) == [NOBODY]:
        return {}
    return {name: np.flatnonzero(trace.user == i) for i, name in enumerate(trace.names)}


def by_priority(trace: Trace) -> Groups:
    """Each level's requests, the highest level (1) first and the default one (0) last; empty where
    no request names a level.
    """
    levels = sorted(np.unique(trace.priority).tolist(), key=lambda level: level or float("inf"))
    if levels == [0]:
        return {}
    return {str(level): np.flatnonzero(trace.priority == level) for level in levels}


def by_length(trace: Trace) -> Groups:
    """The quarters of the trace by completion tokens asked for."""
    quarters = quartiles(trace.num_tokens)
    return {str(q): np.flatnonzero(quarters == q) for q in np.unique(quarters).tolist()}


def asked(trace: Trace) -> dict[str, Any]:
    """What users ask for, from when to when, and how many requests have each level."""
    users = {
        name: {
            "requests": len(mine),
            "first_at": float(trace.at[mine].min()),
            "last_at": float(trace.at[mine].max()),
        }
        for name, mine in by_user(trace).items()
    }
    levels = {level: len(mine) for level, mine in by_priority(trace).items()}
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
    trace: Trace, outcomes: Outcomes, wall_clock_s: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """{"by_length" | "by_user" | "by_priority": {group: its numbers}}, as DEFINITIONS says."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, groups in (
        ("by_length", by_length(trace)),
        ("by_user", by_user(trace)),
        ("by_priority", by_priority(trace)),
    ):
        found[kind] = {
            name: _numbers(outcomes, mine, wall_clock_s) for name, mine in groups.items()
        }
        if kind == "by_length":
            for name, mine in groups.items():
                lengths = trace.num_tokens[mine]
                ends = {"least_tokens": int(lengths.min()), "most_tokens": int(lengths.max())}
                found[kind][name] |= ends
    return found


def _numbers(outcomes: Outcomes, mine: np.ndarray, wall_clock_s: float) -> dict[str, Any]:
    rows, answers = outcomes.rows[mine], outcomes.answers_of(mine)
    tokens = int(answers["completion_tokens"].sum())
    found: dict[str, Any] = {
        "completed": len(answers),
        "failed": int(rows["ended"].sum()) - len(answers),
        "refused": int(rows["refused"].sum()),
        "output_throughput": tokens / wall_clock_s if wall_clock_s else 0.0,
    }
    found |= _chosen(distribution("e2el", answers.e2e_s))
    found |= _chosen(distribution("ttft", answers.ttft_s))
    for name in ("preempted", "paused"):
        found |= _chosen(distribution(name, answers.values(MEASURES[name])), ("mean",))
    return found


def _chosen(
    distributed: Mapping[str, float | None], statistics: Sequence[str] = ("mean", "p50", "p99")
) -> dict[str, float | None]:
    return {key: value for key, value in distributed.items() if key.split("_")[0] in statistics}
