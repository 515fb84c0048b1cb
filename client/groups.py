"""Descriptions of traces, and groups of their requests: by length, user, priority
and class.

The group of a request follows from the trace alone, so it is the same in every variant. Groups are
named by a quarter, a user, a level or a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.outcomes import Outcomes
from client.results import Json, Result
from client.summary import distribution_of, goodput_of
from client.traces import ANONYMOUS, Request, Trace

MOST_NAMED = 6  # users who are listed one by one
Groups = dict[str, np.ndarray]  # {name of a group: numbers of its requests in the trace}


def quartiles(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the quarter of each length: 1 for the shortest, 4 for the longest.

    Equal lengths are in one quarter, that of their middle. If there are at most four lengths, each
    has its own: with half of a trace of one length, chance would decide between two quarters.
    """
    if len(values := np.unique(lengths)) <= 4:
        return np.searchsorted(values, lengths) + 1
    ordered = np.sort(lengths)
    first, last = (np.searchsorted(ordered, lengths, side) for side in ("left", "right"))
    middle = (first + last) / 2 / len(lengths)
    return np.ceil(4 * middle).astype(int)


def by_length(trace: Trace) -> Groups:
    """Return the quarters of the trace by completion tokens requested."""
    quarters = quartiles(trace.num_tokens)
    return {str(q): np.flatnonzero(quarters == q) for q in np.unique(quarters).tolist()}


def by_name(numbers: np.ndarray, names: Sequence[str]) -> Groups:
    """Return each name's requests, in order of first requests; empty if none has a name."""
    if list(names) == [ANONYMOUS]:
        return {}
    return {name: np.flatnonzero(numbers == i) for i, name in enumerate(names)}


def by_priority(trace: Trace) -> Groups:
    """Return each level's requests, from 1 on, 0 last; empty if none names a level."""
    levels = sorted(np.unique(trace.priority).tolist(), key=lambda level: level or float("inf"))
    if levels == [0]:
        return {}
    return {str(level): np.flatnonzero(trace.priority == level) for level in levels}


def groups_of(trace: Trace) -> dict[str, Groups]:
    return {
        "by_length": by_length(trace),
        "by_user": by_name(trace.user, trace.names),
        "by_priority": by_priority(trace),
        "by_class": by_name(trace.slo_class, trace.classes),
    }


def describe(requests: Sequence[Request]) -> Json:
    """Return the load of a trace, as realised. The rate of conversations is that of first turns."""
    trace = Trace.of(requests)
    groups = groups_of(trace)
    at = np.sort(trace.at[trace.firsts])
    span = float(at[-1] - at[0])
    rate = (len(at) - 1) / span if span and not trace.users else None
    pauses = trace.think_s[trace.after >= 0]
    mean_think_s = float(np.mean(pauses)) if len(pauses) else None
    talks = {"number": len(at), "rate": rate, "mean_think_s": mean_think_s}
    users = {
        name: {
            "requests": len(numbers),
            "first_at": float(trace.at[numbers].min()),
            "last_at": float(trace.at[numbers].max()),
        }
        for name, numbers in groups["by_user"].items()
    }
    return {
        "requests": len(trace),
        "mean_num_tokens": float(np.mean(trace.num_tokens)),
        "requested_rate": None if len(pauses) else rate,
        "index_of_dispersion": _index_of_dispersion(at),
        "users": trace.users,
        "by_user": users,
        "by_priority": {level: len(numbers) for level, numbers in groups["by_priority"].items()},
        "by_class": {name: len(numbers) for name, numbers in groups["by_class"].items()},
        "conversations": talks if len(pauses) else None,
    }


def _index_of_dispersion(at: np.ndarray) -> float | None:
    """Variance / mean of arrivals in windows of ten mean gaps; None below 5 windows."""
    windows = len(at) // 10
    if windows < 5 or at[0] == at[-1]:
        return None
    counts, _ = np.histogram(at, bins=windows)
    return float(counts.var(ddof=1) / counts.mean())


def described(load: Json) -> str:
    """Return the result of `describe` in words."""
    talk, of = load.get("conversations"), ""
    rate = talk["rate"] if talk else load["requested_rate"]
    if load["users"]:
        when = f"{load['users']} in flight: the next is sent when one is answered"
    elif rate is None:
        when = "all at once"
    else:
        when = f"{rate:.4g} {'conversations' if talk else 'requests'} per second"
        if load["index_of_dispersion"] is not None:
            when += f" with index of dispersion {load['index_of_dispersion']:.2f}"
    if talk:
        of = f" in {talk['number']} conversation{'s' * (talk['number'] > 1)}"
        when += f", each later turn {talk['mean_think_s']:.3g} s on average after an answer"
    tokens = f"{load['mean_num_tokens']:.1f} completion tokens on average"
    parts = [f"{load['requests']:,} requests{of}, {tokens}, {when}"]
    if users := load.get("by_user"):
        listed = [
            f"{user['requests']:,} of {name or 'no user'} from {user['first_at']:.1f} to "
            f"{user['last_at']:.1f} s"
            for name, user in users.items()
        ]
        parts.append(", ".join(listed) if len(users) <= MOST_NAMED else f"of {len(users)} users")
    if levels := load.get("by_priority"):
        names = {"0": "the default level"}
        listed = [f"{n:,} of {names.get(level, f'level {level}')}" for level, n in levels.items()]
        parts.append(", ".join(listed))
    if classes := load.get("by_class"):
        listed = [
            f"{n:,} of {f'class {name}' if name else 'no class'}" for name, n in classes.items()
        ]
        parts.append(", ".join(listed))
    for key in ("left_out", "cut"):
        if load.get(key):
            parts.append(f"{key.replace('_', ' ')}: {load[key]}")
    return "; ".join(parts)


def by_groups(
    trace: Trace, outcomes: Outcomes, wall_clock_s: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return {kind: {group: result}}, kinds as of `groups_of`. goodput: limits in ms of all."""

    def of_group(kind: str, group: np.ndarray) -> Result:
        rows, answers = outcomes.rows[group], outcomes.only(group).answers
        limits = trace.limits_ms(group[rows["answered"]], goodput)
        ended, tokens = int(rows["ended"].sum()), trace.num_tokens[group]
        made = int(answers["completion_tokens"].sum())
        sized = kind == "by_length"
        return Result(
            completed=len(answers),
            failed=ended - len(answers),
            refused=int(rows["refused"].sum()),
            least_tokens=int(tokens.min()) if sized else None,
            most_tokens=int(tokens.max()) if sized else None,
            output_throughput=made / wall_clock_s if wall_clock_s else 0.0,
            **goodput_of(answers, limits, ended, wall_clock_s),
            e2el=distribution_of(answers.e2e_s),
            ttft=distribution_of(answers.ttft_s),
            preempted=distribution_of(answers.reported("preempted_s")),
            paused=distribution_of(answers.reported("paused_s")),
        )

    return {
        kind: {name: of_group(kind, group) for name, group in of_kind.items()}
        for kind, of_kind in groups_of(trace).items()
    }
