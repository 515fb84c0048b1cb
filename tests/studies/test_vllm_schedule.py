"""studies.vllm_schedule without vLLM: our side of it, what it calls a difference, and what it
says when vLLM is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from studies import vllm_schedule
from studies.vllm_schedule import (
    BUDGET,
    EVICTED,
    SAME,
    WATERMARK,
    Asked,
    Case,
    Step,
    Steps,
    compare,
    draw,
    ours,
    table,
)

CASE = Case("few blocks, chunks", rows=8, token_budget=24, kv_blocks=24)


def test_a_trace_is_seeded_and_fits_the_longest_request() -> None:
    trace = draw(3)
    assert trace == draw(3) != draw(4)
    assert all(
        len(asked.prompt) + len(asked.completion) <= vllm_schedule.LONGEST for asked in trace
    )
    assert [asked.at for asked in trace] == sorted(asked.at for asked in trace)


def test_a_schedule_says_who_joined_who_gave_way_and_what_was_computed() -> None:
    trace = draw(0, 30)
    steps = ours(CASE, trace, "all")
    joined = [request for step in steps for request in step.admitted]
    gave_way = [request for step in steps for request in step.preempted]
    assert {*joined} == {*range(30)} and len(joined) == 30 + len(gave_way) > 30
    assert not any(step.admitted and step.preempted for step in steps)
    assert max(sum(step.chunks.values()) for step in steps) == 24
    assert any(step.later for step in steps) and not any(sum(s.cached.values()) for s in steps)
    computed: dict[int, int] = {}
    for step in steps:
        computed |= {request: start + n for request, (start, n) in step.rows.items()}
    assert [computed[i] for i in range(30)] == [
        len(asked.prompt) + len(asked.completion) - 1 for asked in trace
    ]


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lambda step: step._replace(preempted={*step.preempted, 99}), "preempted"),
        (lambda step: step._replace(admitted=set()), "admitted"),
        (lambda step: step._replace(rows={i: (s + 16, n) for i, (s, n) in step.rows.items()}),
         "cached"),
        (lambda step: step._replace(rows={i: (s, n - 1) for i, (s, n) in step.rows.items()}),
         "chunks"),
        (lambda step: step._replace(at=step.at + 1), "at"),
    ],
)  # fmt: skip
def test_a_planted_difference_is_named_and_placed(plant: Callable[[Step], Step], kind: str) -> None:
    trace = draw(0, 30)
    steps = ours(CASE, trace, "all")
    place = next(i for i, step in enumerate(steps) if step.admitted and i > 20)
    other = [*steps[:place], plant(steps[place]), *steps[place + 1 :]]
    assert compare(steps, steps, CASE, trace) == (len(steps), None)
    assert compare(steps, other, CASE, trace) == (place, kind)
    assert compare(steps, steps[:-1], CASE, trace) == (len(steps) - 1, "end")


def test_the_rules_that_are_known_to_differ_have_names() -> None:
    trace = draw(0, 30)
    equal, kind = compare(ours(CASE, trace, "prefill"), ours(CASE, trace, "all"), CASE, trace)
    assert kind == BUDGET and 0 < equal < 30
    case = Case("watermark", rows=32, token_budget=128, kv_blocks=59, watermark=0.1)
    more = replace(case, watermark=6 / 59)
    trace = draw(0)
    assert compare(ours(case, trace, "all"), ours(more, trace, "all"), case, trace)[1] == WATERMARK


def test_blocks_of_the_same_iteration_and_evicted_ones_have_names() -> None:
    """Two requests with a prompt of 40 tokens in common: the second finds two blocks of 16."""
    prompt = list(range(40))
    trace = [Asked(0.0, prompt, [1, 2]), Asked(0.0, prompt, [1, 2])]
    alone = Step(0.0, {0: (0, 40)}, {0}, set())
    missed = Step(0.0, {0: (0, 40), 1: (0, 40)}, {0, 1}, set())
    at_once = Step(0.0, {0: (0, 40), 1: (32, 8)}, {0, 1}, set())
    case = replace(CASE, token_budget=256, caching=True)
    assert compare([missed], [at_once], case, trace) == (0, SAME)
    joins = [Step(1.0, {1: (cached, 40 - cached)}, {1}, set()) for cached in (32, 16)]
    assert compare([alone, joins[0]], [alone, joins[1]], case, trace) == (1, EVICTED)
    assert compare([alone, joins[1]], [alone, joins[0]], case, trace) == (1, "cached")


def test_with_caching_ours_finds_what_began_alike() -> None:
    trace = draw(0, 30)
    cached = [sum(step.cached.values()) for step in ours(replace(CASE, caching=True), trace, "all")]
    assert sum(cached) > 200


def test_the_table_has_counts_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(case: Case, trace: Any) -> Steps:
        return ours(case, trace, "all")

    monkeypatch.setattr(vllm_schedule, "theirs", other)
    found = vllm_schedule.study(CASE, seeds=2)
    row = table([found]).splitlines()[-1]
    assert row.startswith("| few blocks, chunks | 8 | 24 | 24 | 0 |")
    assert row.endswith(f"| {BUDGET} 2 | {found['theirs']['iterations']:,} | none |")


def test_without_vllm_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(sys, "argv", ["vllm_schedule"])
    with pytest.raises(SystemExit) as ended:
        vllm_schedule.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {vllm_schedule.MISSING}\n"
