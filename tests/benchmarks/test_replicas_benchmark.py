"""What the benchmarks of replicas and of front ends make of what they find: ratios of the same
round, a warning where cores may have been the limit, and whether two rankings agree.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fronts, replicas
from simulate import costs
from simulate.time import instant
from studies.study import Case


def test_a_full_replica_answers_what_its_engine_can_do() -> None:
    """8 rows of 16 tokens are half an answer an iteration, which takes 1.49 ms by 1."""
    assert replicas.most_answers(1.0) == pytest.approx(0.5 / 1.49e-3)
    assert replicas.most_answers(10.0) == pytest.approx(0.05 / 1.49e-3)


def test_ratios_are_of_the_same_round() -> None:
    """The second round was twice as fast for all, so the ratio is 2 in each."""
    rounds = {1: [10.0, 20.0], 2: [20.0, 40.0], 4: [40.0, 80.0]}
    busy = {1: 10.0, 2: 20.0, 4: 70.0}
    cases = [
        {"replicas": n, "seeds": [{"answers_per_s": x, "busy_percent": busy[n]} for x in mine]}
        for n, mine in rounds.items()
    ]
    _, _, one, two, four = replicas.scaling_table(cases, 60.0).splitlines()
    assert "| 2.00 ± 0.00 | 2 | 20 |" in two and "too busy" not in two
    assert "| 4.00 ± 0.00 | 3.6 | 70 (too busy" in four
    assert "±" in one and "2.00" not in one


def test_what_a_front_end_adds_is_told_beside_the_plain_server() -> None:
    def case(name: str, times: float) -> Case:
        rounds = [dict.fromkeys(fronts.COSTS, times * x) for x in (1.0, 3.0)]
        return {"front": name, "idle_cores": 0.01, "seeds": rounds}

    table = fronts.costs_table([case("plain", 1.0), case("ray", 5.0)]).splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["plain", "ray", "ray ÷ plain"]
    assert table[-1].count("5.00 ± 0.00") == len(fronts.COSTS)


@pytest.mark.nightly
def test_one_request_at_a_time_costs_time_and_cpu() -> None:
    """A plain server: a stream of 100 tokens takes longer than one token."""
    with (
        fronts.front("plain", 1, fronts.NO_TIME) as url,
        contextlib.closing(fronts.Asked(url)) as asked,
    ):
        found = fronts.cost(asked, plain=20, streams=3)
    assert 0 < found["request_ms"] < found["stream_ms"] and found["token_ms"] > 0
    assert found["request_cpu_ms"] + found["stream_cpu_ms"] > 0


@pytest.mark.nightly
def test_what_one_client_and_many_get_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "CLIENTS", (1, 8))
    monkeypatch.setattr(fronts, "WARM_S", 0.2)
    [case] = fronts.loads(["plain"], 1, 1.0)
    [found] = case["seeds"]
    for clients in (1, 8):
        assert found[f"p99_ms_{clients}"] >= found[f"p50_ms_{clients}"] > 0
        # so many ask again once they have an answer, and half of these took the median at most
        half = clients / (found[f"p50_ms_{clients}"] / 1e3)
        assert 0 < found[f"answers_per_s_{clients}"] < 2 * half
    assert found["streamed_per_s"] > 0
    _, _, row = fronts.loads_table([case]).splitlines()
    assert row.startswith("| plain |") and f"{found['p50_ms_8']:.1f}, " in row


def test_a_simulated_request_through_a_front_end_takes_longer_by_what_that_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(name: str, *took_ms: float) -> dict[str, Any]:
        return {"front": name, "seeds": [{"request_ms": each} for each in took_ms]}

    record = {"costs": [case("plain", 1.0, 3.0), case("ray", 11.0, 13.0)]}
    monkeypatch.setattr(costs, "FRONTS", tmp_path / "fronts.json")
    costs.FRONTS.write_text(json.dumps(record))
    behind = costs.through("ray", costs.FAKE)
    assert (behind.request, behind.answer) == (instant(5e-3), instant(5e-3))
    assert behind.line == costs.FAKE.line
