"""What a run costs, by the price of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client.results import Result


def costs(result: Result, price: float) -> dict[str, Any]:
    """Return the costs of a measurement, None where it has no such tokens, requests or limits.

    price: a machine's per hour, in any currency. A simulated replica is a machine, which is
    paid for as long as it is up; real servers share the one on which they run.
    """
    seconds = result.wall_clock_s
    replicas = result.server.get("replicas", {})
    if "changes" in replicas:
        end_s = replicas["end_s"]
        paid = price / 3600 * replica_seconds(replicas["changes"], end_s - seconds, end_s)
    else:
        paid = price / 3600 * seconds
    bought = {
        "cost_per_million_tokens": result.total_output_tokens / 1e6,
        "cost_per_thousand_within": (result.goodput or 0.0) * seconds / 1e3,
    }
    return {name: paid / amount if amount else None for name, amount in bought.items()}


def replica_seconds(changes: Sequence[Sequence[Any]], since: float, until: float) -> float:
    """Return the seconds of all replicas together between two times, those in which they start
    included. changes: each (at_s, up, others), in order.
    """
    ends = [at_s for at_s, *_ in changes[1:]] + [until]
    return sum(
        (up + others) * max(0.0, min(end, until) - max(at_s, since))
        for (at_s, up, others), end in zip(changes, ends)
    )
