"""Bounds end a replay though requests are left; its warm-up is sent, and no measure counts it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest

from client import traces
from client.bounds import Bounds
from client.load import Watch
from client.measure import Target, measure, with_requests
from client.outcomes import Outcome
from client.results import Result
from client.traces import Request, Trace
from client.wire import wire
from client.workloads import Workload
from generate.auto import build
from simulate.costs import FAKE
from simulate.server import SimulatedServer
from tests.programs import output, ran
from tests.stub import stub


def served(
    requests: list[Request], bounds: Bounds, goodput: dict[str, float] | None = None
) -> tuple[Result, list[Outcome]]:
    """Serve requests one by one in virtual time."""
    config = build(
        "nobatch", {"model": "fake", "device": "cpu", "max_batch_size": 1, "max_waiting": 4}, {}
    )
    server = SimulatedServer("nobatch", config, FAKE)
    return measure(server, requests, goodput or {}, 3600, Watch(), bounds)


def asks(n: int, every_s: float) -> list[Request]:
    """Prompts of ten ids, for ten tokens: alone each takes 10.7 ms."""
    return [Request(id=i, at=every_s * i, prompt_ids=[1] * 10, num_tokens=10) for i in range(n)]


def test_no_measure_counts_the_warm_up() -> None:
    """The first ten wait for each other, and some of them are refused; the others wait for none."""
    requests = [r.model_copy(update={"at": r.at if r.id >= 10 else 0.0}) for r in asks(30, 0.05)]
    requests.reverse()  # what is due first need not come first
    result, outcomes = served(requests, Bounds(warm_up=10), {"e2el": 11.0})
    others = [outcome for outcome in outcomes if outcome.request.id >= 10]
    assert len(outcomes) == 30 and any(outcome.error for outcome in outcomes)
    requests_saved = with_requests(result, outcomes).requests
    assert {r["id"] for r in requests_saved if r.get("warm_up")} == {*range(10)}
    assert (result.completed, result.failed, result.errors) == (20, 0, {})
    assert result.e2el.mean == pytest.approx(10.7) == result.e2el.p99
    assert result.attainment == 1.0 and result.total_output_tokens == 200
    wall_s = max(o.ended_at for o in others) - min(o.sent_at for o in others)
    assert result.wall_clock_s == wall_s and result.output_throughput == 200 / wall_s
    assert sum(group.completed for group in result.by_length.values()) == 20
    assert result.server["completed"] > 20, "the server counts all"
    assert result.littles_law is None
    without, _ = served(requests, Bounds())
    assert without.failed > 0 and without.number("p99_e2el_ms") > 50


def test_the_warm_up_is_what_is_due_first() -> None:
    """A later turn is due after those before it and their thinking times, at the earliest."""
    first, *turns = (r.model_copy(update={"at": 0.0}) for r in asks(3, 0.0))
    talk = [first] + [
        turn.model_copy(update={"prompt_ids": [1] * (20 + 10 * i), "after": i, "think_s": 2.0})
        for i, turn in enumerate(turns)
    ]
    others = [r.model_copy(update={"id": r.id + 3, "at": 1.0 + r.at}) for r in asks(3, 2.0)]
    numbers = Bounds(warm_up=4).warming_up(Trace.of([*talk, *others]))
    assert sorted(numbers.tolist()) == [0, 1, 3, 4]


def test_failures_of_the_warm_up_are_not_counted_by_their_sentences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are those of which no outcome is kept, where requests are many."""
    monkeypatch.setattr(traces, "MOST_SAVED", 20)
    monkeypatch.setattr("client.outcomes.SAMPLE", 2)
    result, _ = served(asks(30, 0.0), Bounds(warm_up=20))
    assert sum(result.errors.values()) == result.failed > 0


@pytest.mark.parametrize(("bounds", "at"), [
    (Bounds(max_seconds=0.5), "--max-seconds 0.5"), (Bounds(max_failures=7), "--max-failures 7"),
])  # fmt: skip
def test_a_replay_ends_at_a_bound_and_says_what_is_missing(bounds: Bounds, at: str) -> None:
    result, outcomes = served(asks(900, 0.005), bounds)  # twice what the server can do
    assert result.cut and result.cut["at"] == at and not result.partial
    ended = result.completed + result.failed
    assert len(outcomes) == ended == 900 - result.cut["in_flight"] - result.cut["unsent"]
    assert result.cut["in_flight"] in (4, 5), "one runs, up to four wait"
    if bounds.max_seconds:
        assert 0.45 < result.wall_clock_s <= 0.55
    else:
        assert result.failed == 7
    assert served(asks(900, 0.005), bounds)[0] == result, "in virtual time, always there"


def test_a_replay_within_its_bounds_is_whole() -> None:
    bounds = Bounds(max_seconds=60, max_failures=1)
    assert served(asks(5, 0.1), bounds)[0] == served(asks(5, 0.1), Bounds())[0]


@pytest.mark.parametrize("arrival", ["constant:40", "closed:3"])
def test_bounds_hold_for_real_servers(arrival: str) -> None:
    requests = Workload("fixed:2").requests(300, arrival)
    for model, first_s, bounds in (
        ("stub", 30.0, Bounds(max_seconds=0.3)), ("absent", 0.0, Bounds(max_failures=3)),
    ):  # fmt: skip
        with stub(first_s=first_s) as server:
            target = Target("stub", server.url, wire("openai", model), ours=False)
            result, _ = measure(target, requests, {}, 60, Watch(), bounds)
        assert result.cut and not result.partial and result.cut["unsent"] > 200
        if bounds.max_failures:
            assert 3 <= result.failed < 10 and result.errors.keys() == {"404 no such model"}
        else:
            assert result.cut["in_flight"] > 2 and result.completed == 0


@pytest.mark.usefixtures("undrawn")
def test_report_summary_and_data_say_what_was_left_out(tmp_path: Path) -> None:
    words = "--modes nobatch,dynamic --numsamples 60 --lengths fixed:40 --arrival constant:50 "
    words += f"--warm-up 5 --max-seconds 1.3 --svg --out {tmp_path}"
    shown = " ".join(output("simulate", words).split())
    report = (tmp_path / "report.md").read_text()
    for text in (shown, report):
        assert "nobatch ended at --max-seconds 1.3, with " in text
        assert "The first 5 requests of each trace were its warm-up" in text
        assert "(cut, overloaded)" in text and "(cut)" not in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bounds"] == {"max_seconds": 1.3, "max_failures": None, "warm_up": 5}
    assert summary["variants"]["nobatch"]["cut"]["unsent"] == 0
    with (tmp_path / "requests.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "dynamic"]
    measured = [float(row["e2el_ms"]) for row in rows if row["warm_up"] == "false"]
    assert len(rows) == 60 and len(measured) == 55
    assert fmean(measured) == pytest.approx(summary["variants"]["dynamic"]["mean_e2el_ms"], 1e-4)
    assert rows[7]["requested_tokens"] == "40" and rows[7]["error"] == ""
    assert (tmp_path / "by_group.svg").exists()


def test_a_warm_up_of_all_requests_is_refused(tmp_path: Path) -> None:
    for program in ("simulate", "client.client"):
        done = ran(program, "--numsamples", "9", "--warm-up", "9", "--out", str(tmp_path / "run"))
        assert done.returncode == 2
        assert "--warm-up 9 leaves none of 9 requests to measure" in done.stderr
