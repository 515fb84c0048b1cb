"""Error of a sweep's capacity: whole sweeps in virtual time, beside a queue that is never empty.

Traces, search, verdict and estimate are a sweep's own, scheduler and policies are real; iterations
take as long as the fake engine's, and nothing else takes time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client.measure import burst_size, judged
from client.traces import Request
from client.workloads import Workload
from compare import sweep
from compare.options import SWEEP_GOODPUT, parse_goodput
from config import MODES, build
from lab.studies.study import Case, Panel, Study, Table
from lab.studies.virtual import CAPACITY_SEED, SETTINGS, while_waiting
from simulate.costs import FAKE
from simulate.server import SimulatedServer

LENGTHS, ARRIVAL = "normal", "poisson:1"  # a comparison's own defaults
LIMITS = parse_goodput(SWEEP_GOODPUT)
KEPT = ("rate", "completed", "growth", "growth_in_flight", "saturated")  # of each point


def cases(n: int) -> list[dict[str, Any]]:
    return [{"mode": mode, "true": true_capacity(mode, n)} for mode in MODES]


def server(mode: str) -> SimulatedServer:
    return SimulatedServer(mode, build(mode, SETTINGS, {}), FAKE)


def true_capacity(mode: str, n: int) -> float:
    """Return the requests completed a second until the last one of a burst of n is admitted."""
    requests = Workload(LENGTHS, seed=CAPACITY_SEED).requests(n, "burst", scaled=True)
    return while_waiting(server(mode).replay(requests).answers.times_at_server)


def measure(mode: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the measures of a trace."""
    return judged(requests, server(mode).replay(requests), LIMITS)


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the outcome of one seed's sweep, and the seconds that it would take."""
    mode = case["mode"]
    points: list[sweep.Point] = []
    seconds = 0.0

    def replay(name: str, requests: Sequence[Request]) -> Mapping[str, Any]:
        nonlocal seconds
        result = measure(mode, requests)
        seconds += result["wall_clock_s"]
        return result

    burst = burst_size(server(mode).config)
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
    text=lambda cases: (
        "A mode's true capacity is what it completes while requests always wait, in requests/s: "
        + ", ".join(f"{case['mode']} {case['true']:.3f}" for case in cases)
        + "."
    ),
    tables=[Table(("mode",))],
    figure="Capacity that sweeps find ÷ the true capacity, by mode",
    panels=[Panel("capacity", "found ÷ true", "ratio", "mode", line=lambda case: "sweeps")],
)
