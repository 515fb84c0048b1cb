"""Latency by group: short and long requests, users and priorities, in results and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client import drawing
from client.groups import quartiles
from client.measure import judged, with_requests
from client.outcomes import Outcome
from client.results import OF_GROUP, Distribution, Result, keys
from client.traces import Request
from compare.report import figures, sections, tables
from compare.report.sections import groups_of
from stats import DEFINITIONS


def answered(request: Request, seconds: float, first_s: float, **timings: float) -> Outcome:
    at, last = request.at, request.at + seconds
    own = {"arrived_at": at, "queue_s": 0.0, "ttft_s": first_s, "itl_s": [], "held_s": 0.0}
    stamps = (at, at, last, at + first_s, last)
    server = own | timings if timings else None
    return Outcome(request, *stamps, 1, request.num_tokens, timings=server)


def failed(request: Request, error: str = "500") -> Outcome:
    return Outcome(request, 0.0, 0.0, 0.1, error=error)


def ask(i: int, tokens: int, user: str | None = None, priority: int | None = None) -> Request:
    return Request(id=i, at=0.0, prompt="a", num_tokens=tokens, user=user, priority=priority)


def test_quartiles_are_quarters_and_equal_lengths_are_in_one() -> None:
    assert quartiles([8, 1, 7, 2, 6, 3, 5, 4]).tolist() == [4, 1, 4, 1, 3, 2, 3, 2]
    assert quartiles([1, 200, 2, 200, 3, 200, 4, 200]).tolist() == [1, 3, 1, 3, 2, 3, 2, 3]
    for times in ((5, 6, 5), (1, 9, 2), (9, 1, 2)):  # as chance has it: of each seed the same
        few = [n for n, k in zip((1, 25, 100), times) for _ in range(k)]
        assert quartiles(few).tolist() == [{1: 1, 25: 2, 100: 3}[n] for n in few]
    assert set(quartiles([64] * 9)) == {1}


def test_each_group_has_its_own_numbers_and_users_add_up() -> None:
    requests = [
        ask(0, 10, "ann", 1), ask(1, 20, "ann"), ask(2, 30, "bob"), ask(3, 40, "bob", 2), ask(4, 40)
    ]  # fmt: skip
    outcomes = [
        answered(requests[0], 1.0, 0.5, paused_s=0.25, preempted_s=0.0),
        answered(requests[1], 3.0, 0.5, paused_s=0.75), answered(requests[2], 4.0, 2.0),
        failed(requests[3], "429 the queue is full"), failed(requests[4]),
    ]  # fmt: skip
    result = judged(requests, outcomes, {})
    ann, bob = result.by_user["ann"], result.by_user["bob"]
    assert list(result.by_user) == ["ann", "bob", ""], "as they came, and those without one"
    assert ann.json(OF_GROUP).items() >= {
        "completed": 2, "failed": 0, "refused": 0, "mean_e2el_ms": 2000, "p50_e2el_ms": 2000,
        "p99_e2el_ms": 2980, "mean_ttft_ms": 500, "mean_paused_ms": 500, "mean_preempted_ms": 0,
    }.items()  # fmt: skip
    # a server that reports no pauses
    expected = {"completed": 1, "failed": 1, "refused": 1, "p99_ttft_ms": 2000}
    assert bob.json(OF_GROUP).items() >= (expected | {"mean_paused_ms": None}).items()
    nobody = result.by_user[""]
    assert (
        nobody.json(OF_GROUP).items() >= {"failed": 1, "refused": 0, "mean_e2el_ms": None}.items()
    )
    assert ann.output_throughput == pytest.approx(30 / 4.0), "over the run's wall-clock"
    total = sum(user.output_throughput or 0.0 for user in result.by_user.values())
    assert total == pytest.approx(result.output_throughput)
    assert list(result.by_priority) == ["1", "2", "0"], "the highest first, the default last"
    assert result.by_priority["0"].completed == 2
    longest = result.by_length["4"]
    assert (longest.least_tokens, longest.failed, longest.e2el.mean) == (40, 2, None)
    assert {"by_length", "by_user", "by_priority", "refused"} <= DEFINITIONS.keys()
    first = with_requests(result, outcomes).requests[0]
    assert (first["user"], first["priority"], first["timings"]["paused_s"]) == ("ann", 1, 0.25)
    assert not {"user", "priority"} & with_requests(result, outcomes).requests[4].keys()


def test_goodput_of_a_class_is_of_its_own_limits_and_those_of_all() -> None:
    """Request i takes i + 1 s, its first token half a second; its 4 tokens follow evenly."""
    slos = [("chat", 600, 200), ("chat", 600, 200), ("chat", 400, None), ("batch", 9000, None)]
    requests = [
        ask(i, 4).model_copy(update={"slo_class": name, "slo_ttft_ms": ttft, "slo_tpot_ms": tpot})
        for i, (name, ttft, tpot) in enumerate(slos)
    ]
    outcomes = [answered(request, request.id + 1.0, 0.5) for request in requests]
    result = judged(requests, outcomes, {})
    chat, batch = result.by_class["chat"], result.by_class["batch"]
    assert (chat.attainment, batch.attainment, result.attainment) == (1 / 3, 1, 0.5)
    assert chat.goodput and batch.goodput
    assert chat.goodput + batch.goodput == pytest.approx(result.goodput)
    both = judged(requests, outcomes, {"e2el": 3500.0})
    assert both.by_class["batch"].attainment == 0 and both.attainment == 0.25
    table = table_of({"edf": [result]}, "by_class")
    assert "goodput, requests/s | within limits, % |" in table and "| edf | chat | 3 |" in table


def test_groups_are_the_same_requests_whatever_was_answered() -> None:
    """By lengths of answers, a variant that refuses long requests would have other quarters."""
    requests = [ask(i, i + 1) for i in range(8)]
    some = judged(requests, [answered(r, 1.0, 0.5) for r in requests[:3]], {})
    measures = ("least_tokens", "most_tokens", "completed")
    found = [tuple(group.number(name) for name in measures) for group in some.by_length.values()]
    assert found == [(1, 2, 2), (3, 4, 1), (5, 6, 0), (7, 8, 0)]
    assert not some.by_user and not some.by_priority, "a trace without either"


def result_of(latency_s: float, users: dict[str, int], tokens: int = 4) -> Result:
    """A result in which request i takes latency_s · (i + 1)."""
    named: list[str | None] = [name for name, n in users.items() for _ in range(n)]
    requests = [ask(i, tokens * (i + 1), user) for i, user in enumerate(named or [None] * 8)]
    return judged(requests, [answered(r, latency_s * (r.id + 1), 0.1) for r in requests], {})


def table_of(results: Any, kind: str) -> str:
    return sections.group_table(groups_of(results)[kind], results)


def test_tables_say_which_seeds_lack_a_group_and_show_the_largest_of_many() -> None:
    """(Their other rows are in report.md, which test_pages.py holds to the word.)"""
    # a user whom one seed lacks has no interval
    lacking = {"static": [result_of(1.0, {"ann": 4}), result_of(1.0, {"ann": 4, "bob|x": 4})]}
    ann, bob = table_of(lacking, "by_user").splitlines()[2:]
    assert "(1 of 2 seeds)" in bob and r"bob\|x" in bob and "seeds" not in ann
    fewer = lacking | {"dynamic": [result_of(1.0, {"ann": 1})]}  # interrupted
    assert groups_of(fewer)["by_user"].shown[0].size == "8 requests"
    assert sections.few(groups_of({"static": [result_of(0.1, {"ann": 100})]})["by_user"]) == ""
    # of many users those with most requests are shown
    many = {"static": [result_of(0.1, {f"user-{i}": i + 1 for i in range(20)})]}
    table = table_of(many, "by_user")
    assert len(table.splitlines()) == 2 + 8 and "user-19" in table and "user-3 " not in table
    assert "| user: the 8 of 20 with most requests |" in table


def titles(results: Any) -> list[str]:
    figure = figures.by_group(groups_of(results).values(), "")
    return [axis.get_title(loc="left") for axis in figure.axes if axis.get_visible()]


def test_the_figure_has_a_panel_for_each_group() -> None:
    quarters = ["shortest quarter\n4–8 tokens", "second quarter\n12–16 tokens",
                "third quarter\n20–24 tokens", "longest quarter\n28–32 tokens"]  # fmt: skip
    names = [str(i) for i in range(12)]
    for variants in (names[:1], names[:4], names):
        assert titles({name: [result_of(1.0, {})] for name in variants}) == quarters
    two = {"static": [result_of(1.0, {"ann": 4, "x" * 99: 4})]}
    assert titles(two) == [*quarters, "ann\n4 requests", f"{'x' * 23}…\n4 requests"]
    one = {"static": [result_of(1.0, {"ann": 8})]}
    assert titles(one) == quarters, "one user is no comparison"
    requests = [ask(i, 2) for i in range(4)]
    same = {"static": [judged(requests, [answered(r, 1.0, 0.1) for r in requests], {})]}
    assert titles(same) == ["2 tokens"], "equal lengths have no quarters"
    nothing = {"static": [judged(requests, [failed(r) for r in requests], {})]}
    assert titles(nothing) == ["2 tokens"] and titles(nothing | {"dynamic": [result_of(1.0, {})]})


def test_names_in_any_letters_draw_no_warning_and_control_no_terminal(tmp_path: Path) -> None:
    """A user's name cleared the screen, and for each letter that the font lacks came a warning."""
    results = {"static": [result_of(1.0, {"ann": 4, "\x1b[2J日本": 4})]}
    drawing.save(figures.by_group(groups_of(results).values(), ""), tmp_path / "figure.png")
    [table] = sections.terminal_groups(results)
    assert [row[1] for row in table.rows] == ["user", "ann", "[2J日本"]


def test_pauses_too_short_to_be_told_have_no_column() -> None:
    [key] = keys("mean_paused_ms")
    assert tables.present([key], [([], [Result(paused=Distribution(4.0))])]) == []
    assert tables.present([key], [([], [Result(paused=Distribution(6.0))])]) == [key]
