"""The search for a capacity, against servers whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from client.groups import describe
from client.measure import burst_size, judged
from client.results import Point, Result
from client.summary import client_behind
from client.traces import Request
from client.workloads import Workload
from compare import sweep
from compare.report.sentences import point_line
from compare.report.tables import capacity_table
from tests.virtual import simulated

AT_RATE = {
    "rate": 3.0, "arrival": "poisson:3", "nominal_num_tokens": 100, "saturated": False,
    "client_behind": False,
}  # fmt: skip


def swept(
    capacity: float, about: float = 1.0, limit: float = 0.0, client: float = math.inf,
    busy: bool = True,
) -> list[Point]:  # fmt: skip
    """A sweep of a server that sustains `capacity` and keeps its limits up to `limit`, by a client
    that can send `client`.

    about: what a burst made of the capacity.
    """
    points: list[Point] = []

    def measure(rate: float) -> Point:
        assert rate not in [p.rate for p in points], "measured twice"
        attainment = None if not limit else 1.0 if rate <= limit else 0.5
        done = min(rate, capacity)
        points.append(Point.of(AT_RATE | {
            "rate": rate, "saturated": rate > capacity, "client_behind": rate > client,
            "attainment": attainment, "failed": 0, "request_throughput": done,
            "output_throughput": 100 * done, "p50_normalized_latency_ms": 5.0,
            "busy_s": 10.0 * busy,
            "busy_throughput": 100 * capacity if busy and rate > capacity else None,
        }))  # fmt: skip
        return points[-1]

    sweep.search(measure, about)
    return points


@pytest.mark.parametrize("capacity", [0.3, 1.0, 5.5, 37.0, 1000.0])
@pytest.mark.parametrize("off", [0.5, 0.8, 1.0, 1.2])
def test_a_capacity_is_found_within_a_step_in_few_rates(capacity: float, off: float) -> None:
    points = swept(capacity, off * capacity)
    found = sweep.outcome(points)
    assert found.sustained and found.saturated_rate
    low, high = found.sustained.rate, found.saturated_rate
    assert low <= capacity < high < low * 1.1
    assert found.capacity == pytest.approx(capacity), "as completed, and no rate of the lattice"
    assert max(p.rate for p in points) <= 2 * 1.3 * 1.1 * capacity and len(points) <= 8
    assert min(p.rate for p in points) < capacity / 2, "a rate at which the server is at ease"
    assert f"| {low:.3g} to {high:.3g} |" in capacity_table({"a": [found]}, goodput=False)


def test_the_capacity_is_of_all_rates_beyond_it_by_their_time() -> None:
    names = ("rate", "saturated", "busy_s", "busy_throughput")
    points = [Point.of(AT_RATE | dict(zip(names, values))) for values in (
        (4.0, True, 30.0, 310.0), (8.0, True, 10.0, 270.0), (5.0, True, 0.0, None),
        (2.0, False, 5.0, 900.0),
    )]  # fmt: skip
    assert sweep.outcome(points).capacity == pytest.approx(3.0)


def test_the_rates_of_all_servers_lie_on_one_lattice() -> None:
    slow, fast = ({p.rate for p in swept(capacity, capacity)} for capacity in (11.0, 13.0))
    assert len(slow & fast) >= 2
    assert all(float(f"{2 ** (round(8 * math.log2(r)) / 8):.4g}") == r for r in slow | fast)


def test_the_highest_rate_that_meets_the_goodput_is_found_apart() -> None:
    found = sweep.outcome(swept(37.0, 37.0, limit=20.0))
    low, high, capacity = found.goodput_rate, found.missed_rate, found.capacity
    assert low and high and capacity
    assert low <= 20.0 < high < low * 1.1 and capacity > 30
    assert f"| {low:.3g} to {high:.3g} |" in capacity_table({"a": [found]}, goodput=True)
    none = sweep.outcome(swept(37.0, 37.0, limit=0.001))
    assert none.goodput_rate is None
    assert f"| below {none.missed_rate:.3g} |" in capacity_table({"a": [none]}, goodput=True)
    # where the queue only grows, the limits cannot be kept for long
    every = sweep.outcome(swept(37.0, 37.0, limit=1e9))
    assert every.sustained and every.goodput_rate == every.sustained.rate


def test_a_client_that_falls_behind_ends_the_sweep_without_a_capacity() -> None:
    points = swept(1e9, about=60.0, client=100.0)
    found = sweep.outcome(points)
    assert max(p.rate for p in points) < 200 and found.capacity is None
    assert found.sustained and found.sustained.rate == 98.7, (
        "a rate at which this client was in time"
    )
    assert "at least 98.7" in capacity_table({"dynamic": [found]}, goodput=False)


def test_a_sweep_of_a_server_that_answers_nothing_ends() -> None:
    found = sweep.outcome(points := swept(0.0, busy=False))
    assert len(points) < 10 and found.capacity is None and found.sustained is None
    cells = f"| – | below {points[-1].rate:.3g} | – |"
    assert cells in capacity_table({"dynamic": [found]}, goodput=True)
    replayed: list[str] = []
    none: list[Point] = []

    def replay(what: str, requests: Sequence[Request]) -> Result:
        replayed.append(what)
        return Result()

    sweep.sweep(replay, Workload(), "poisson:1", 8, None, none.append)
    assert replayed == ["all at once"] and none == [] and sweep.outcome(none).capacity is None


def test_a_sweep_finds_what_a_queue_that_is_never_empty_completes() -> None:
    """Whole sweeps in virtual time. What they found once was 0.76 to 1.81 times the truth."""
    server = simulated()
    burst = Workload(seed=2**31).requests(1000, scaled=True)
    times = server.replay(burst).answers.times_at_server
    waits_until = float(np.max(times.admitted_at))
    true = float(np.sum(times.answered_at <= waits_until)) / waits_until
    points: list[Point] = []

    def replay(what: str, requests: Sequence[Request]) -> Result:
        return judged(requests, simulated().replay(requests), {})

    sweep.sweep(replay, Workload(), "poisson:1", burst_size(server.config), None, points.append)
    assert sweep.outcome(points).capacity == pytest.approx(true, rel=0.03)
    assert min(point.completed for point in points) >= 200


CALM: dict[str, Any] = {  # a server that is not overloaded
    "failed": 0, "completed": 100, "growth": 0.01, "growth_in_flight": 0.01, "partial": False,
    "p50_schedule_lag_ms": 0.5, "wall_clock_s": 6.2, "requested_rate": None,
}  # fmt: skip


def calm(**numbers: Any) -> Result:
    return Result.of(CALM | numbers)


@pytest.mark.parametrize(("change", "saturated", "behind"), [
    ({}, False, False),
    ({"growth": 0.06}, True, False),
    ({"failed": 2}, True, False),
    ({"growth_in_flight": 0.06}, True, False),  # rows that still fill wait for nothing yet
    ({"p50_schedule_lag_ms": 11.0, "growth": 0.5}, False, True),  # says nothing of the server
    ({"failed": 9, "completed": 0, "p50_schedule_lag_ms": None}, True, False),
])  # fmt: skip
def test_the_verdict_on_a_rate(change: dict[str, float], saturated: bool, behind: bool) -> None:
    result = calm(**change)
    assert (sweep.saturated(result), client_behind(result)) == (saturated, behind)


def test_a_rate_without_an_answer_says_so() -> None:
    point = Point.of(AT_RATE | {"output_throughput": 0.0, "failed": 9, "saturated": True})
    assert "no answer; requests failed" in point_line("static", point)


def test_a_rate_has_as_many_requests_as_its_numbers_need() -> None:
    assert sweep.enough_requests(3.0, 0.5) == 200 and sweep.enough_requests(50, 0.5) == 500
    assert sweep.enough_requests(50, 20.0) == 2000, "the slowest row twice over"
    assert sweep.enough_requests(0.1, 5.0) == 30, "and not for half an hour"


@pytest.mark.parametrize("lengths", ["normal", "choice:1,25,100", "lognormal:50:1:1000", "fixed:7"])
def test_a_scaled_trace_asks_for_what_its_names_say(lengths: str) -> None:
    data = Workload(lengths, seed=5)
    for arrival in ("poisson:5", "gamma:5:2", "constant:5", "wait:0.4"):
        load = describe(data.requests(200, arrival, scaled=True))
        assert load["requested_rate"] == pytest.approx(5, rel=1e-4)
        assert load["mean_num_tokens"] == pytest.approx(data.mean_num_tokens, rel=0.01)
    scaled, drawn = ([r.num_tokens for r in data.requests(200, scaled=s)] for s in (True, False))
    if lengths not in ("normal", "lognormal:50:1:1000"):
        assert set(scaled) <= set(drawn), "no length that is not the distribution's"
    assert sum(a == b for a, b in zip(scaled, drawn)) > 120, "most are as drawn"
    same, other = (Workload(lengths, seed=s).requests(200, "poisson:5", True) for s in (5, 6))
    assert same == data.requests(200, "poisson:5", scaled=True) != other
