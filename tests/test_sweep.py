"""The search for a capacity, against servers whose capacity is known."""

from __future__ import annotations

import pytest

from client import sweep
from client.sweep import Point
from client.tables import capacity_table, point_line


def swept(capacity: float, light: float = 1.0, limit: float = 0.0, client: float = float("inf")) -> list[Point]:
    """A sweep of a server that sustains `capacity` and keeps its limits up to `limit`, by a client that can send `client`."""
    points: list[Point] = []

    def measure(rate: float) -> Point:
        assert rate not in [p["rate"] for p in points], "measured twice"
        attainment = None if not limit else 1.0 if rate <= limit else 0.5
        points.append({
            "rate": rate, "saturated": rate > capacity, "client_behind": rate > client, "attainment": attainment, "failed": 0,
            "output_throughput": 100 * min(rate, capacity), "p50_normalized_latency_ms": 5.0,
        })  # fmt: skip
        return points[-1]

    sweep.search(measure, light)
    return points


@pytest.mark.parametrize("capacity", [0.3, 1.0, 5.5, 37.0, 1000.0])
def test_a_capacity_is_found_within_a_step_and_nothing_is_sent_far_beyond_it(capacity: float) -> None:
    points = swept(capacity)
    found = sweep.outcome(points)
    assert found["capacity_found"] and found["capacity"] <= capacity < found["capacity"] * 2 ** (1 / sweep.OCTAVE) * 1.001
    assert max(p["rate"] for p in points) <= max(2 * capacity, 1.0)
    assert sum(p["saturated"] for p in points) <= 5, "no rate above one at which the queue only grows, but by bisection"


def test_the_rates_of_all_servers_lie_on_one_lattice() -> None:
    slow, fast = ({p["rate"] for p in swept(capacity, light=2.0)} for capacity in (11.0, 50.0))
    assert {2.0, 4.0, 8.0, 16.0} <= slow & fast


def test_the_highest_rate_that_meets_the_goodput_is_found_apart() -> None:
    found = sweep.outcome(swept(37.0, limit=20.0))
    assert found["goodput_rate"] <= 20.0 < found["goodput_rate"] * 1.1 and found["capacity"] > 30
    none = sweep.outcome(swept(37.0, limit=0.001))
    assert none["goodput_rate"] is None
    all_ = sweep.outcome(swept(37.0, limit=1e9))
    assert all_["goodput_rate"] == all_["capacity"], "where the queue only grows, the limits cannot be kept for long"


def test_a_client_that_falls_behind_ends_the_sweep_without_a_capacity() -> None:
    points = swept(1e9, client=100.0)
    found = sweep.outcome(points)
    assert max(p["rate"] for p in points) == 128.0 and not found["capacity_found"]
    assert found["capacity"] == 98.7, "a rate at which this client was in time"
    assert "at least 98.7" in capacity_table({"dynamic": [found]}, goodput=False)


def test_a_server_that_fails_at_every_rate_ends_the_sweep() -> None:
    points = swept(0.0)
    assert len(points) < 10
    found = sweep.outcome(points)
    assert found["capacity"] is None and found["point"] is None
    assert "–" in capacity_table({"dynamic": [found]}, goodput=True) and "none" in capacity_table(
        {"dynamic": [found]}, goodput=True
    )


def test_the_verdict_on_a_rate() -> None:
    calm = {"failed": 0, "completed": 100, "growth": 0.01, "p50_schedule_lag_ms": 0.5}
    assert sweep.verdict(calm) == {"saturated": False, "client_behind": False}
    assert sweep.verdict(calm | {"growth": 0.06})["saturated"] and sweep.verdict(calm | {"failed": 2})["saturated"]
    late = sweep.verdict(calm | {"p50_schedule_lag_ms": 11.0, "growth": 0.5})
    assert late == {"saturated": False, "client_behind": True}, "what a late client saw says nothing of the server"
    nothing = {"failed": 9, "completed": 0, "growth": 0.0}
    assert sweep.verdict(nothing)["saturated"]
    point = {"rate": 3.0, "output_throughput": 0.0, "p50_normalized_latency_ms": None, "attainment": None, "failed": 9,
             "client_limited": False}  # fmt: skip
    assert "no answer; requests failed" in point_line("static", point | sweep.verdict(nothing))


def test_a_light_rate_keeps_a_server_of_one_request_at_a_time_half_idle() -> None:
    for alone in (0.01, 0.14, 3.0, 100.0):
        assert 0.25 < sweep.light_rate(alone) * alone <= 0.5
    assert sweep.requests_at(0.01, 20) == 30 and sweep.requests_at(50, 20) == 1000
