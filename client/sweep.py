"""A sweep: one server at rates from light to beyond its capacity, which bisection finds.

All rates lie on one lattice, LIGHT · 2^(k/8), so that every mode replays the same traces where their rates meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from client.analysis import ATTAINMENT, GROWTH
from stats import CLIENT_LIMITED_MS

OCTAVE = 8  # steps of the lattice in which the rate doubles; neighbours are 9% apart
LEAST_REQUESTS = 30  # at a rate, so that a slow server's numbers mean something
LEAST_LATENCIES = 10  # of a request alone, for which each rate is sent at least: a server that begins empty must fill
MOST_OCTAVES = 16  # above the light rate
FEWEST_OCTAVES = 4  # below it
LOST = 0.01  # a rate at which more requests fail is beyond the capacity
Point = dict[str, Any]


def light_rate(alone_s: float) -> float:
    """A power of two at which a server of one request at a time is half busy at most; `alone_s`: a request's latency."""
    return 2.0 ** math.floor(math.log2(0.5 / alone_s))


def requests_at(rate: float, seconds: float) -> int:
    return max(LEAST_REQUESTS, round(rate * seconds))


def verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a rate was beyond the server's capacity, for its queue only grew or requests failed; or beyond this client's.

    A client that is behind at most sends, and not at one in a hundred, says nothing of the server.
    """
    behind = result.get("p50_schedule_lag_ms", 0.0) > CLIENT_LIMITED_MS
    failed = result["failed"] > LOST * (result["failed"] + result["completed"])
    return {"saturated": bool(failed or (result["growth"] > GROWTH and not behind)), "client_behind": behind}


def search(measure: Callable[[float], Point], light: float) -> None:
    """Call `measure` (rate → point with "saturated", "client_behind", "attainment") at the rates that a sweep needs.

    The rate doubles until the queue only grows, or this client is the limit; then bisection finds the capacity, and the
    highest rate that meets the goodput, each within a step of the lattice. No rate is measured twice.
    """
    points: dict[int, Point] = {}

    def at(k: int) -> Point:
        if k not in points:
            points[k] = measure(float(f"{light * 2 ** (k / OCTAVE):.4g}"))
        return points[k]

    def bisect(low: int, high: int, good: Callable[[Point], bool]) -> None:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if good(at(middle)) else (low, middle)

    def sustained(point: Point) -> bool:
        return not point["saturated"] and not point["client_behind"]

    k = 0
    while not sustained(at(k)):  # lighter than thought
        if k <= -FEWEST_OCTAVES * OCTAVE:
            return
        k -= OCTAVE
    while sustained(at(k)) and k < MOST_OCTAVES * OCTAVE:
        k += OCTAVE
    if not sustained(at(k)):
        bisect(k - OCTAVE, k, sustained)
    meeting = [k for k, point in points.items() if meets(point)]
    missing = [k for k, point in points.items() if not meets(point) and meeting and k > max(meeting)]
    if missing:
        bisect(max(meeting), min(missing), meets)


def meets(point: Mapping[str, Any]) -> bool:
    """Whether a rate's goodput meets the limits, and would go on to: nine in ten of its requests do, and no queue grows."""
    return not point["saturated"] and point["attainment"] is not None and point["attainment"] >= ATTAINMENT


def outcome(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a sweep found: the highest sustained rate (`capacity`), with its point, and the highest that meets the goodput.

    `capacity_found` is false where no rate was beyond the capacity: interrupted, or this client was the limit.
    """
    beyond = min((p["rate"] for p in points if p["saturated"]), default=math.inf)
    below = [p for p in points if p["rate"] < beyond and not p["client_behind"]]
    best = max(below, key=lambda p: p["rate"], default=None)
    good = max((p["rate"] for p in points if meets(p)), default=None)
    return {"capacity": best and best["rate"], "point": best, "capacity_found": beyond < math.inf, "goodput_rate": good}
