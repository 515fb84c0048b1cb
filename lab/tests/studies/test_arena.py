"""The arena: its traces, how cells are judged, and its command at a small size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compare.analysis import Estimate
from lab.studies import arena, claims, league
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


@pytest.mark.parametrize(("policy", "words"), [
    ("sjf --aging 30", "dynamic --order sjf --aging 30"),
    ("least_computed", "dynamic --victim least_computed"),
    ("dynamic --prefill first", "dynamic --prefill first"),
])  # fmt: skip
def test_a_policy_is_an_order_a_victim_or_a_mode(policy: str, words: str) -> None:
    assert arena.words_of(policy) == words


def test_the_traces_show_what_the_proposals_are_about() -> None:
    def measures(trace: str, policy: str, n: int = 40) -> dict[str, float]:
        return arena.run({"trace": trace, "load": 1.1, "policy": policy, "costs": "demo"}, n, 0)

    few = measures("oversubscribed", "fcfs", 60)
    assert few["recomputed"] > 3 and few["preemptions"] * 60 >= few["most_preempted"] >= 1
    mixed, first = measures("starved", "fcfs"), measures("starved", "dynamic --prefill first")
    assert first["gap_ms"] > 1.5 * mixed["gap_ms"], "rows that decode wait for every prompt"
    assert first["prompt_share"] == pytest.approx(100)
    whole = measures("jobs", "dynamic --kv-reservation whole")
    assert whole["makespan_s"] > measures("jobs", "fcfs")["makespan_s"] > 0
    assert not {"recomputed", "makespan_s"} & {*measures("chat", "fcfs")}


@pytest.mark.parametrize(("mean", "half", "found"), [
    (0.40, 0.05, claims.HOLDS), (0.60, 0.05, claims.IN_PART), (0.49, 0.05, claims.IN_PART),
    (0.95, 0.10, claims.NOT_HERE), (1.20, 0.10, claims.NOT_HERE), (0.80, 0.40, claims.CANNOT_TELL),
    (0.50, None, claims.HOLDS),
])  # fmt: skip
def test_a_claim_is_judged_by_its_interval(mean: float, half: float | None, found: str) -> None:
    assert claims.verdict(Estimate(mean, half), 0.5) == found


def test_verdicts_name_what_helps_and_what_it_costs_and_fold_the_rest() -> None:
    def of(policy: str, *values: float, **more: float) -> dict[str, Any]:
        made = case(policy, *values, trace="oversubscribed")
        for seed, value in zip(made["seeds"], values):
            seed |= {"recomputed": value, "wait_ms": value, "good": 50.0, **more}
        return made

    page = claims.tables([
        of("fcfs", 10, 20, 30, wait_ms=100), of("least_computed", 4, 8.1, 12, wait_ms=150),
        of("most_computed", 10, 20, 30, wait_ms=100),
    ])  # fmt: skip
    [line] = [line for line in page.splitlines() if line.startswith("| `least_computed`")]
    assert "| holds | 0.40 ± 0.01 | first token on `oversubscribed` at 1.1: 0.40" in line
    assert "worst wait on `oversubscribed` at 1.1: 1.50" in line and line.endswith("| 1.50 |")
    assert page.endswith("No difference shown anywhere: `most_computed`.")
    with_all = claims.against([claim.policy for claim in claims.CLAIMS])
    assert {"fcfs", "dynamic --prefill first"} < {*with_all}, "what claims are judged by runs, too"


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
