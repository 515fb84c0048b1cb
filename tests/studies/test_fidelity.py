"""studies.fidelity: what is asked of whom, what a stopped run goes on with, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compare.variants import Variant
from studies.fidelity import judging, running, tasks
from studies.fidelity.judging import BY_SPREAD, MET, MISSED, REPORTED
from studies.fidelity.tasks import FEW_BLOCKS, LOADS, PARTS, VARIANTS, Case, Part, Task
from tests.programs import ran

BURST: dict[str, Any] = {"busy_s": 2.0, "e2e_s": [1.0]}


def of_capacity(*tokens: float) -> Sequence[dict[str, Any]]:
    """Repeats of a burst, 2 s each."""
    return [BURST | {"busy_tokens": each} for each in tokens]


@pytest.mark.parametrize(
    ("simulated", "repeats", "verdict"),
    [
        (102.0, (100.0, 100.0), MET),
        (98.0, (100.0, 100.0), MET),
        (106.0, (100.0, 100.0), MISSED),
        (94.0, (100.0, 100.0), MISSED),
        (106.0, (104.0, 96.0), BY_SPREAD),
        (115.0, (104.0, 96.0), MISSED),
    ],
)
def test_an_error_is_judged_by_its_target_and_by_what_real_runs_are_apart(
    simulated: float, repeats: tuple[float, float], verdict: str
) -> None:
    [one] = of_capacity(simulated)
    found = judging.errors(None, {0: of_capacity(*repeats)}, {0: one})["capacity"]
    assert found.verdict == verdict
    assert found.error.mean == pytest.approx(simulated / 100 - 1) and found.error.half is None


def test_beyond_the_loads_of_the_targets_errors_are_reported() -> None:
    times = {name: [1.0, 1.0, 2.0, 2.0] * 500 for name in ("e2e_s", "ttft_s", "tpot_s")}
    slow = {name: [2 * s for s in of] for name, of in times.items()}
    for load, verdict in ((0.85, MISSED), (0.95, REPORTED)):
        found = judging.errors(load, {0: [times]}, {0: slow})
        assert found["p50_e2e"].verdict == found["p99_e2e"].verdict == verdict
        assert found["p50_ttft"].error.mean == 1.5, "seconds, and not a part"
        assert found["p50_ttft"].verdict == REPORTED
    few = {name: of[:-1] for name, of in times.items()}
    assert judging.errors(0.5, {0: [few]}, {0: slow})["p99_e2e"].verdict == REPORTED


def test_a_quantile_is_of_all_requests_together_and_its_interval_of_the_seeds() -> None:
    """Slow requests are all in one seed: the mean of both seeds' p99 would be half as long."""
    measure = judging.LATENCIES["p99_e2e"]
    measured = {0: [{"e2e_s": [1.0] * 100}], 1: [{"e2e_s": [1.0] * 50 + [10.0] * 50}]}
    same = {seed: rows[0] for seed, rows in measured.items()}
    found = judging.judged(measure, measured, same, 0.1)
    assert found.measured == found.simulated == 10.0
    assert (found.error.mean, found.error.half) == (0.0, 0.0)
    off = same | {1: {"e2e_s": [1.0] * 50 + [12.0] * 50}}
    found = judging.judged(measure, measured, off, 0.1)
    assert found.error.mean == pytest.approx(0.2) and found.error.half and found.error.half > 0.2


def test_a_jackknifed_mean_has_students_interval() -> None:
    values = [1.0, 2.0, 4.0]
    found = judging.jackknife(lambda seeds: sum(values[i] for i in seeds) / len(seeds), range(3))
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.303 * 1.5275 / 3**0.5, rel=1e-3)


def test_a_stopped_run_has_as_much_of_each_variant() -> None:
    units = list(tasks.tasks(["fake", "demo"], seeds=2, repeats=2))
    cases = sum(len(part.cases()) for part in PARTS.values())
    assert len(units) == 4 * cases
    assert len({unit[0].case for unit in units[:cases]}) == cases
    assert all(unit[0].load is None for unit in units), "the burst tells the rates"
    asked = {(t.case.part, t.case.variant, t.load) for unit in units for t in unit}
    assert {("fake", name, load) for name in VARIANTS for load in LOADS} <= asked


def test_traces_are_what_their_names_say() -> None:
    def drawn(kind: str, load: float | None = 0.5) -> Any:
        task = Task(Case("fake", "dynamic", kind), 0, 0, load, 400)
        return tasks.trace(task, 50.0 if load else None)

    plain = drawn("plain")
    assert (len(plain) - 1) / plain[-1].at == pytest.approx(50, rel=1e-3)
    assert {request.at for request in drawn("plain", None)} == {0.0}
    assert max(request.num_tokens for request in drawn("other lengths")) > 400
    long = [len(request.ids) for request in drawn("long prompts")]
    assert 130 <= sum(200 <= n <= 700 for n in long) <= 140 and min(long) < 20
    assert len({tuple(request.ids[:128]) for request in drawn("shared prefixes")}) == 8
    for kind in tasks.KINDS:
        assert drawn(kind) == drawn(kind), "real and simulated servers are sent the same"
        longest = max(len(request.ids) + request.num_tokens for request in drawn(kind))
        assert longest <= 1024, "the context"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """The program at a small size, on `fake` servers, one of them of few blocks."""
    monkeypatch.setattr(tasks, "REQUESTS", 40)
    few = Variant("dynamic", FEW_BLOCKS | {"kv_cache": "64blocks"})
    for variants in (tasks, running):
        monkeypatch.setattr(variants, "VARIANTS", {"demand": few})
    monkeypatch.setitem(PARTS, "fake", Part("fake", "fake", 1.0, (0.9,), (), {}))
    monkeypatch.setattr("client.machine.hardware", dict)

    def run(*options: str) -> str:
        own = ["--part", "fake", "--seeds", "1", "--processes", "1", "--out", str(tmp_path)]
        done = ran("studies.fidelity", *own, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.nightly
def test_a_run_that_goes_on_asks_what_is_not_done(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 tasks" in tiny("--repeats", "1")
    file = tmp_path / "fidelity.jsonl"
    first = file.read_text()
    burst, loaded = map(json.loads, first.splitlines())
    capacity = burst["busy_tokens"] / burst["busy_s"] / tasks.mean_tokens("plain")
    assert loaded["rate"] == pytest.approx(0.9 * capacity, rel=1e-3)

    assert "2 tasks" in tiny("--repeats", "2"), "of the second run"
    assert file.read_text().startswith(first) and len(file.read_text().splitlines()) == 4
    whole = json.loads((tmp_path / "fidelity.json").read_text())
    burst, loaded = whole["cases"]
    for cell in (burst, loaded):
        assert cell["repeats"] == 2 and cell["failed"] == {"measured": 0, "simulated": 0}
        assert all(error["spread"] is not None for error in cell["errors"].values())
    assert all(side["preemptions"] > 0 for side in burst["made_of"].values())
    # the fake engine's own costs are the least that a server takes
    assert -0.9 < loaded["errors"]["p50_e2e"]["error"] < 0.1
    page = (tmp_path / "fidelity.md").read_text()
    assert "fake | demand | plain | 0.9" in page and (tmp_path / "fidelity.png").exists()

    monkeypatch.setattr(running, "code", lambda: "other")
    assert "4 tasks" in ran(
        "studies.fidelity", "--part", "fake", "--seeds", "1", "--minutes", "-1",
        "--out", str(tmp_path),
    ).stdout, "of other code nothing is done"  # fmt: skip


def test_costs_are_of_one_model() -> None:
    done = ran("studies.fidelity", "--costs", "fake")
    assert done.returncode == 2 and "--part" in done.stderr
    done = ran("studies.fidelity", "--part", "fake", "--costs", "none")
    assert done.returncode == 2 and "python -m benchmarks.costs" in done.stderr
