"""studies.orders at a small size: who gains by an order, who pays, and what is written of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduling.inference import Inference, IterationRecord
from studies.orders import batches, fair, live, orders, tools, urgent
from studies.orders.tools import Part
from tests.programs import ran


@pytest.fixture(scope="module", autouse=True)
def capacities_of_a_small_burst() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "BURST", 300)
        yield


def served(part: Part, n: int, **case: Any) -> dict[str, Any]:
    """What came of one seed's trace."""
    [mine] = [c for c in part.cases() if case.items() <= c.items()]
    return part.serve(mine, n, 0)


@pytest.mark.nightly
def test_short_ones_gain_and_long_ones_pay_where_rows_bind() -> None:
    place = {"table": "grid", "rows": 4, "load": 1.2}
    of = {name: served(orders.PART, 300, **place, variant=name) for name in orders.DRAWN}
    for name in ("sjf", "srpt", "mlfq"):
        assert of[name]["mean_s"] < 0.9 * of["fcfs"]["mean_s"], name
        assert of[name]["shortest_s"] < 0.5 * of["fcfs"]["shortest_s"], name
        assert of[name]["p99_s"] > of["fcfs"]["p99_s"], name
    assert of["srpt"]["mean_s"] < of["sjf"]["mean_s"] < of["mlfq"]["mean_s"]


@pytest.mark.nightly
def test_wrong_predictions_cost_part_of_the_gain() -> None:
    place = {"table": "grid", "rows": 4, "load": 1.2}
    names = ("sjf", "sjf, σ 0.7", "sjf, σ 1.5", "fcfs")
    means = [served(orders.PART, 300, **place, variant=name)["mean_s"] for name in names]
    assert means == sorted(means)


def test_where_nobody_waits_there_is_nothing_to_order() -> None:
    place = {"table": "grid", "rows": 32, "load": 0.5}
    fcfs = served(orders.PART, 100, **place, variant="fcfs")
    for name in ("sjf", "srpt", "hrrn", "mlfq"):
        assert served(orders.PART, 100, **place, variant=name) == fcfs, name


@pytest.mark.parametrize("variant", ["static", "multibin, 4 bins", "static, sjf", "dynamic"])
def test_useful_rows_are_those_of_the_closed_form(variant: str) -> None:
    found = served(batches.PART, 1024, rows=8, variant=variant)
    assert found["useful"] == pytest.approx(found["closed_form"], rel=0.03)


def test_the_closed_form_of_bins_is_the_papers() -> None:
    gains = [batches.gain(32, k) for k in (1, 2, 4, 8, 16)]
    assert gains == pytest.approx([1, 1.32, 1.57, 1.74, 1.83], abs=0.005)


@pytest.mark.nightly
def test_fair_serves_the_modest_one_at_once_and_a_limit_leaves_rows_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fcfs = served(fair.PART, 800, trace="modest", variant="fcfs")
    first = served(fair.PART, 800, trace="modest", variant="fair")
    assert first["mean_s"] < 0.3 * fcfs["mean_s"]
    assert first["both"] > 95 and first["refused"] == 0
    unused = served(fair.PART, 800, trace="modest", variant="limit, requests")
    assert unused["refused"] == 0 and unused["both"] > 95, "the run ends before a minute's share"
    monkeypatch.setattr(fair, "MINUTE_S", 5.0)  # a share that is used up within the run
    limited = served(fair.PART, 800, trace="modest", variant="limit, requests")
    assert limited["refused"] > 30 and limited["both"] < 80


@pytest.mark.nightly
def test_while_both_wait_the_difference_of_service_is_within_the_bound() -> None:
    fcfs = served(fair.PART, 800, trace="returns", variant="fcfs")
    first = served(fair.PART, 800, trace="returns", variant="fair")
    assert first["apart"] <= fair.bound(first["longest_prompt"]) < fcfs["apart"]


def test_who_waits_when() -> None:
    def came(at: float, admitted: float) -> Inference:
        return Inference([1], 1, arrived_at=at, admitted_at=admitted)

    waited = [came(0, 2), came(1, 3), came(3, 3), came(5, 6)]
    assert fair.waits(waited) == [(0, 3), (5, 6)]


@pytest.mark.nightly
def test_urgent_ones_are_served_sooner_and_late_ones_starve_or_are_refused() -> None:
    names = ("fcfs", "priority", "priority, late ones delayed", "priority, late ones rejected")
    of = {name: served(urgent.PART, 300, load=1.2, variant=name) for name in names}
    fcfs, first, delayed, rejected = (of[name] for name in names)
    assert first["urgent_s"] < 0.5 * fcfs["urgent_s"]
    assert first["others_s"] > fcfs["others_s"]
    assert delayed["wait_s"] > 1.5 * first["wait_s"]
    assert rejected["refused"] > 0 and rejected["wait_s"] < first["wait_s"]


@pytest.mark.nightly
def test_who_is_urgent_is_never_preempted_for_others() -> None:
    plain = served(urgent.PART, 300, load=1.2, variant="fcfs, demand")
    first = served(urgent.PART, 300, load=1.2, variant="priority, demand")
    assert first["preempted_urgent"] < 0.1 < plain["preempted_urgent"]
    assert first["preempted_others"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "n"),
    [(orders.PART, 40), (batches.PART, 256), (fair.PART, 400), (urgent.PART, 60)],
)
def test_it_is_told_and_drawn(
    part: Part, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ROWS", (4, 8))
    monkeypatch.setattr(orders, "MORE_ROWS", (8, 32))
    monkeypatch.setattr(urgent, "LOADS", (0.8, 1.2))
    name = part.study.name
    arguments = ["--part", name, "--seeds", "1", "--requests", str(n), "--processes", "1"]
    done = ran("studies.orders", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / f"{name}.md").read_text()
    assert f"# {part.study.title}\n" in page and f"]({name}.png)" in page
    assert "commit " in page and "--part " + name in page
    assert (tmp_path / f"{name}.png").stat().st_size > 50_000
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(kept["cases"]) == len(part.cases())
    assert all(len(case["seeds"]) == 1 for case in kept["cases"])


@pytest.mark.nightly
def test_real_servers_serve_the_same_traces_and_the_same_ones_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = live.CHECKS["orders"]
    crowded = {"table": "grid", "rows": 4, "of": 8, "load": 4}  # the gain is twice the mean
    few = check._replace(cases=lambda n: live.each(("fcfs", "sjf"), **crowded))
    monkeypatch.setattr(live, "CHECKS", {"orders": few})
    arguments = ["--part", "orders", "--seeds", "1", "--requests", "120"]
    done = ran("studies.orders.live", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "live.md").read_text()
    assert "commit " in page and "live − virtual" in page and ".png" not in page
    kept = json.loads((tmp_path / "live.json").read_text())
    fcfs, sjf = kept["orders"]["cases"]
    assert (fcfs["config"]["order"], sjf["config"]["order"]) == ("fcfs", "sjf")
    for side in live.SIDES:
        [first], [shortest] = fcfs[side], sjf[side]
        assert shortest["mean_s"] < first["mean_s"], side


def test_what_a_server_says_of_tokens_and_iterations_is_told_as_records() -> None:
    def told(records: Iterable[IterationRecord]) -> list[tuple[float, float, int, int, int]]:
        return [
            (r.started_at, r.seconds, r.rows["live"], r.rows["idle"], r.iteration.rows[0].n_tokens)
            for r in records
        ]

    one = Inference([1, 2, 3], 2, token_times=[1.0, 3.0])
    other = Inference([1], 1, token_times=[2.0])
    records = list(live.of_tokens([one, other], []))
    assert told(records) == [(1, 0, 1, 0, 3), (2, 0, 1, 0, 1), (3, 0, 1, 0, 1)]
    assert [r.iteration.rows[0].decodes for r in records] == [False, False, True]
    rows = [[0.0, 1.0, 2, 0, 0, 0], [1.5, 1.0, 1, 1, 0, 0], [3.0, 1.0, 1, 0, 0, 0]]
    assert told(live.of_rows([one], rows)) == [
        (0, 1.5, 2, 0, 1),
        (1.5, 1.5, 1, 1, 1),
        (3, 1.5, 1, 0, 1),
    ]
    cost_s = 1e-3 + 5 / 3 * 6e-5 + 30 / 3 * 1e-5  # rows and prompt tokens of the mean iteration
    longer_s = live.beyond({"total_input_tokens": 20, "recomputed_tokens": 10}, rows)
    assert longer_s == pytest.approx(1.5 - cost_s)
