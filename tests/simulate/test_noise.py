"""Noise that is drawn: none of it changes nothing, and much of it shows as a range."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from client.workloads import Workload
from compare.report import report, tables
from config import build
from simulate.costs import FAKE, save
from simulate.noise import Noise, NoisyRun
from simulate.run import SimulatedServer
from simulate.time import PS
from tests.programs import ran

WILD = Noise(0.1, 0.05, 0.05, 2.0, 0.2, 0.5, 1.0, 0.02, 0.1)


def test_no_noise_is_what_the_costs_say_and_a_seed_draws_its_own() -> None:
    config = build("dynamic", {"model": "fake", "device": "cpu"}, {})
    requests = Workload(seed=1).requests(40, "poisson:50")

    def ended(server: SimulatedServer) -> list[float]:
        return [outcome.ended_at for outcome in server.replay(requests)]

    jumping = SimulatedServer("x", config, replace(FAKE, noise=Noise()))
    assert ended(jumping) == ended(jumping.noisy(0))
    wild = SimulatedServer("x", config, replace(FAKE, noise=WILD))
    one, again, other = (ended(wild.noisy(seed)) for seed in (1, 1, 2))
    assert one == again != other and one != ended(wild) == ended(jumping)


def test_a_gap_is_as_much_longer_as_the_iteration_before_it() -> None:
    run = NoisyRun(replace(WILD, stalls=0.0), 1)
    times = [(run.iteration(k * PS, PS), run.gap(PS)) for k in range(5)]
    assert all(first == gap for first, gap in times) and len(set(times)) == 5
    stalling = NoisyRun(Noise(stalls=1.0, stall_s=3.0), 1)
    assert stalling.iteration(0, PS) > PS == stalling.gap(PS), "a stall is no gap's"


@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_where_runs_lie(tmp_path: Path) -> None:
    save(replace(FAKE, noise=WILD), path := tmp_path / "wild.json")
    done = ran(
        "simulate", "--modes", "dynamic", "--numsamples", "20", "--lengths", "uniform:1:20",
        "--arrival", "poisson:50", "--costs", str(path), "--noise", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0 and report.NOISE in " ".join(done.stdout.split()), done.stderr
    result = json.loads((tmp_path / "dynamic.json").read_text())
    drawn = result["drawn"]["p99_e2el_ms"]
    assert len(set(drawn)) == 19 and result["p99_e2el_ms"] not in drawn
    heading, row = tables.ranges([{"dynamic": result}])
    assert (
        row[heading.index("latency p99, s")] == f"{min(drawn) / 1e3:.2f} to {max(drawn) / 1e3:.2f}"
    )
    assert tables.markdown([heading, row]) in (tmp_path / "report.md").read_text()


def test_the_runs_of_all_seeds_make_one_range() -> None:
    """Of 39 values the second and the last but one are the ends of 90%."""
    seeds = [{"a": {"drawn": dict.fromkeys((key.name for key in tables.RANGES), values)}}
             for values in (range(1, 20), range(20, 40))]  # fmt: skip
    assert tables.ranges(seeds)[1][:2] == ["a", "2 to 38"]
