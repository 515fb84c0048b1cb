"""What a run costs, by the price of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def costs(result: Mapping[str, Any], price: float) -> dict[str, float | None]:
    """Return the costs of a measurement, None where it has no such tokens, requests or limits.

    price: of a machine for an hour, in any currency. A simulated replica is a machine, which is
    paid for as long as it is up; real servers share the one on which they run.
    """
    seconds = result["wall_clock_s"]
    replicas = result.get("server", {}).get("replicas", {})
    paid = price / 3600 * (_up_s(replicas, seconds) if "changes" in replicas else seconds)
    bought = {
        "cost_per_million_tokens": result["total_output_tokens"] / 1e6,
        "cost_per_thousand_within": (result["goodput"] or 0.0) * seconds / 1e3,
    }
    return {name: paid / amount if amount else None for name, amount in bought.items()}


def _up_s(replicas: Mapping[str, Any], seconds: float) -> float:
    """Return the seconds of all simulated replicas in the last ones of a run, those it counts."""
    end = replicas["end_s"]
    changes = [(max(at_s, end - seconds), up + others) for at_s, up, others in replicas["changes"]]
    ends = [at_s for at_s, _ in changes[1:]] + [end]
    return sum(n * max(0.0, min(to, end) - at_s) for (at_s, n), to in zip(changes, ends))
