"""Error of a sweep's capacity: whole sweeps in virtual time, beside a queue that is never empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client.arguments import parse_goodput
from client.measure import burst_size
from client.traces import Request
from client.workloads import Workload
from compare import sweep
from compare.options import SWEEP_GOODPUT
from config import MODES
from lab.studies import virtual
from lab.studies.study import Case, Panel, Study, Table

LENGTHS, ARRIVAL = "normal", "poisson:1"  # a comparison's own defaults
LIMITS = parse_goodput(SWEEP_GOODPUT)
KEPT = ("rate", "completed", "growth", "growth_in_flight", "saturated")  # of each point


def cases(n: int) -> list[dict[str, Any]]:
    return [{"mode": mode, "true": true_capacity(mode, n)} for mode in MODES]


def true_capacity(mode: str, n: int) -> float:
    """Return the requests completed per second until the last one of a burst of n is admitted."""
    burst = Workload(LENGTHS, seed=virtual.CAPACITY_SEED).requests(n, "burst", scaled=True)
    answers = virtual.server({"mode": mode}).replay(burst).answers
    return virtual.while_waiting(answers.times_at_server)


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the outcome of one seed's sweep, and the seconds that it would take."""
    server = virtual.server({"mode": case["mode"]})
    points: list[sweep.Point] = []
    seconds = 0.0

    def replay(name: str, requests: Sequence[Request]) -> Mapping[str, Any]:
        nonlocal seconds
        result = virtual.measures(virtual.server({"mode": case["mode"]}), requests, LIMITS)
        seconds += result["wall_clock_s"]
        return result

    burst = burst_size(server.config)
    sweep.sweep(replay, Workload(LENGTHS, seed=seed), ARRIVAL, burst, None, points.append)
    outcome = sweep.outcome(points)
    del outcome["point"]
    return {
        **outcome,
        "ratio": outcome["capacity"] / case["true"],
        "seconds": seconds,
        "rates": len(points),
        "points": [{key: point[key] for key in KEPT} for point in points],
    }


STUDY = Study(
    name="capacity",
    title="How exact the capacity of a sweep is",
    question="How far is the capacity that a sweep finds from the true one?",
    workload="whole sweeps in virtual time, with the iteration times of `--model fake`, {seeds} "
    "seeds",
    requests=20_000,
    seeds=12,
    cases=cases,
    run=run,
    measures={
        "ratio": ("found ÷ true", "{:.3f}"),
        "sustained_rate": ("highest sustained rate, requests/s", "{:.1f}"),
        "saturated_rate": ("lowest rate beyond it, requests/s", "{:.1f}"),
        "rates": ("rates tried", "{:.1f}"),
        "seconds": ("duration of a sweep, s", "{:.0f}"),
    },
    text="True: requests/s that a mode completes while requests always wait.",
    tables=[Table(("mode", "true"))],
    figure="Capacity that sweeps find ÷ the true capacity, by mode",
    panels=[Panel("capacity", "found ÷ true", "ratio", "mode", line=lambda case: "sweeps")],
)
