"""The simulator's studies at small size: plans beside real servers, what a run takes, routers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import plans, routers, simulator
from tests.deploy.test_proxy import has_haproxy
from tests.programs import ran


@pytest.mark.usefixtures("undrawn")
@pytest.mark.nightly
def test_a_case_is_predicted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BURST", 40)
    small = ["--costs", "fake", "--seeds", "3", "--cases", "1", "--requests", "40"]
    small += ["--out", str(tmp_path)]
    done = ran("studies.plans", *small)
    assert done.returncode == 0, done.stderr
    [case] = json.loads((tmp_path / "plans.json").read_text())["cases"]
    low, high = case["between"]
    assert case["variant"] == "static" and len(case["predicted"]) == 3
    assert (low, high) == (min(case["predicted"]), max(case["predicted"]))
    # 40 requests: their share is a multiple of 1/40
    assert 0 <= case["measured"] <= 1 and (40 * case["measured"]) % 1 == pytest.approx(0, abs=1e-9)
    assert case["inside"] == (low <= case["measured"] <= high)
    page = (tmp_path / "plans.md").read_text()
    assert f"**{int(case['inside'])} of 1 measured shares lie inside the 50% interval" in page


@pytest.mark.skipif(not has_haproxy(), reason="there is no HAProxy here")
@pytest.mark.usefixtures("undrawn")
@pytest.mark.nightly
def test_a_case_is_measured_through_a_front_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "BURST", 40)
    small = ["--costs", "fake", "--seeds", "3", "--cases", "1", "--requests", "40"]
    small += ["--out", str(tmp_path)]
    through = ["--fronts", "proxy", "--variants", "dynamic", "--slowdown", "2"]
    done = ran("studies.plans", *small, *through)
    assert done.returncode == 0, done.stderr
    [case] = json.loads((tmp_path / "plans.json").read_text())["cases"]
    assert (case["front"], case["variant"]) == ("proxy", "dynamic") and 0 < case["measured"] <= 1
    assert case["slo"]["ttft"] >= 40  # twice what is the least


def test_costs_that_are_not_there_are_said() -> None:
    assert "there are no costs 'nowhere'" in ran("studies.plans", "--costs", "nowhere").stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_what_a_run_takes_is_measured_jumping_and_stepping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "BURST", 100)
    small = ["--requests", "40", "80", "--replicas", "2", "--out", str(tmp_path)]
    done = ran("studies.simulator", *small)
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "simulator.json").read_text())["cases"]
    assert [(case["replicas"], case["requests"], case["way"]) for case in cases] == [
        (2, n, way) for n in (40, 80) for way in ("jump", "step")
    ]
    assert all(case["seconds"] > 0 and case["peak_mb"] > 10 for case in cases)
    # jumping and stepping come to the same, more requests to something else
    assert [case["measures"] for case in cases[::2]] == [case["measures"] for case in cases[1::2]]
    assert len({case["measures"] for case in cases}) == 2


@pytest.mark.usefixtures("undrawn")
@pytest.mark.nightly
def test_routers_serve_the_same_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "REPLICAS", (1, 2))
    monkeypatch.setattr(routers, "LEAST", 60)
    small = ["--seeds", "2", "--requests", "30", "--processes", "1", "--out", str(tmp_path)]
    done = ran("studies.routers", *small)
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "routers.json").read_text())["cases"]
    alone = [case["seeds"] for case in cases if case["replicas"] == 1 and case["trace"] == "even"]
    assert len(alone) == len(routers.PLAIN) + len(routers.STALE)
    assert all(seeds == alone[0] for seeds in alone), "of one replica there is no choice"
    page = (tmp_path / "routers.md").read_text()
    assert "| round_robin | 2 |" in page and "power_of_two, 1 s old" in page
