"""The arena: its traces, how cells are judged, and its command at a small size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.studies import arena, league
from tests.programs import output, ran

TTFT, GOODPUT = league.QUESTIONS[0], league.QUESTIONS[2]


def case(policy: str, *values: float, trace: str = "chat") -> dict[str, Any]:
    seeds = [{"ttft_ms": value, "good": value} for value in values]
    return {"trace": trace, "load": 1.1, "policy": policy, "file": "", "seeds": seeds}


BASE = case("fcfs", 100, 200, 300)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arena, "BURST", 60)
    monkeypatch.setattr("client.machine.hardware", dict)
    yield
    arena.capacity.cache_clear()


@pytest.mark.parametrize(("values", "of_times", "of_goodput"), [
    ((50, 100, 150), ("0.50 ± 0.00", 1), ("·", 0)),
    ((110, 219, 329), ("1.10 ± 0.01", -1), ("·", 0)),
    ((50, 300, 300), ("·", 0), ("·", 0)),
    ((110, 210, 310), ("·", 0), ("+10 ± 0", 1)),
    ((100, 200, 300), ("·", 0), ("·", 0)),
])  # fmt: skip
def test_a_cell_is_a_paired_ratio_or_difference_or_a_dot_where_none_is_shown(
    values: tuple[float, ...], of_times: tuple[str, int], of_goodput: tuple[str, int]
) -> None:
    for question, (text, verdict) in ((TTFT, of_times), (GOODPUT, of_goodput)):
        cell = league.cell_of(question, BASE, case("sjf", *values))
        assert cell.verdict == verdict
        assert cell.text == (text if verdict else league.SAME)


def test_a_table_marks_the_best_of_each_trace_and_begins_with_the_most_often_better() -> None:
    cases = [
        *(BASE | {"trace": trace} for trace in ("chat", "long")),
        *(case("half", 50, 100, 150, trace=trace) for trace in ("chat", "long")),
        case("quarter", 25, 50, 75),
        case("quarter", 200, 400, 600, trace="long"),
    ]
    rows = league.cells_of(TTFT, cases)
    assert league.table(TTFT, cases, rows).splitlines()[2:] == [
        "| fcfs: ms | 200 ± 248 | 200 ± 248 |",
        "| half | 0.50 ± 0.00 | **0.50 ± 0.00** |",
        "| quarter | **0.25 ± 0.00** | 2.00 ± 0.00 |",
    ]


def test_a_trace_mixes_its_kinds_by_time_in_their_shares_at_one_rate() -> None:
    requests = arena.requests_of(arena.TRACES["greedy-users"], 50.0, 200, 3)
    assert Counter(r.user for r in requests) == {"greedy": 90, "greedy_too": 90, "modest": 20}
    times = [request.at for request in requests]
    assert times == sorted(times) and [r.id for r in requests] == [*range(200)]
    assert times[-1] == pytest.approx(200 / 50, rel=0.1)


def test_overload_preempts_and_a_small_token_budget_bounds_the_gaps() -> None:
    def measures(trace: str) -> dict[str, float]:
        return arena.run({"trace": trace, "load": 1.1, "policy": "fcfs", "costs": "demo"}, 40, 0)

    ample, bounded = measures("overload"), measures(arena.SECOND_BUDGET)
    assert ample["preempted"] > 5 and ample["gap_ms"] > bounded["gap_ms"]


def test_a_cell_is_run_again_by_the_words_of_its_row_and_column(tmp_path: Path) -> None:
    words = "--trace greedy-users --load 1.1 --policy fair --requests 80 --seeds 2 --processes 1"
    output("lab.arena", f"{words} --out {tmp_path}")
    fcfs, fair = json.loads((tmp_path / "arena.json").read_text())["cases"]
    assert [len(fair["seeds"]), fair["policy"], fcfs["policy"]] == [2, "fair", "fcfs"]
    for alone, beside in zip(fair["seeds"], fcfs["seeds"]):
        assert alone["modest_ms"] < beside["modest_ms"] and not alone["unanswered"]
    assert "\n| fair | " in (tmp_path / "arena.md").read_text()
    for wrong, fix in (("--trace nowhere", "one of chat,"), ("--policy none.such", "fcfs")):
        done = ran("lab.arena", *words.split(), *wrong.split())
        assert done.returncode == 2 and fix in done.stderr
