"""lab.studies.vllm_schedule without vLLM: our side, the kinds of difference, and the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from lab.studies import vllm_schedule
from lab.studies.vllm_schedule import (
    BUDGET,
    EVICTED,
    SAME,
    WATERMARK,
    Drawn,
    SharedLimits,
    Step,
    Steps,
    compare,
    draw,
    our_schedule,
)
from tests.programs import ran

FEW = SharedLimits("few blocks, chunks", rows=8, token_budget=24, kv_blocks=24)


def test_a_schedule_has_joining_and_preempted_requests_and_computed_tokens() -> None:
    trace = draw(0, 30)
    assert trace == draw(0, 30) != draw(1, 30)
    assert all(len(d.prompt) + len(d.completion) <= vllm_schedule.LONGEST for d in trace)
    steps = our_schedule(FEW, trace, "all")
    joined = [request for step in steps for request in step.admitted]
    preempted = [request for step in steps for request in step.preempted]
    assert {*joined} == {*range(30)} and len(joined) == 30 + len(preempted) > 30
    assert not any(step.admitted and step.preempted for step in steps)
    assert max(sum(step.chunks.values()) for step in steps) == 24
    assert any(step.later for step in steps) and not any(sum(s.cached.values()) for s in steps)
    computed: dict[int, int] = {}
    for step in steps:
        computed |= {request: start + n for request, (start, n) in step.rows.items()}
    lengths = [len(drawn.prompt) + len(drawn.completion) for drawn in trace]
    assert [computed[i] for i in range(30)] == [length - 1 for length in lengths]
    cached = our_schedule(replace(FEW, caching=True), trace, "all")
    assert sum(sum(step.cached.values()) for step in cached) > 200


@pytest.mark.parametrize(("plant", "kind"), [
    (lambda step: step._replace(preempted={*step.preempted, 99}), "preempted"),
    (lambda step: step._replace(admitted=set()), "admitted"),
    (lambda step: step._replace(rows={i: (s + 16, n) for i, (s, n) in step.rows.items()}),
     "cached"),
    (lambda step: step._replace(rows={i: (s, n - 1) for i, (s, n) in step.rows.items()}), "chunks"),
    (lambda step: step._replace(at=step.at + 1), "at"),
])  # fmt: skip
def test_a_planted_difference_is_named_and_placed(plant: Callable[[Step], Step], kind: str) -> None:
    trace = draw(0, 30)
    steps = our_schedule(FEW, trace, "all")
    place = next(i for i, step in enumerate(steps) if step.admitted and i > 20)
    other = [*steps[:place], plant(steps[place]), *steps[place + 1 :]]
    assert compare(steps, steps, FEW, trace) == (len(steps), None)
    assert compare(steps, other, FEW, trace) == (place, kind)
    assert compare(steps, steps[:-1], FEW, trace) == (len(steps) - 1, "end")


def test_the_rules_that_are_known_to_differ_have_names() -> None:
    trace = draw(0, 120)
    ours, other = (our_schedule(FEW, trace, counts) for counts in ("prefill", "all"))
    equal, kind = compare(ours, other, FEW, trace)
    assert kind == BUDGET and 0 < equal < 30
    limits = SharedLimits("watermark", rows=32, token_budget=128, kv_blocks=59, watermark=0.1)
    larger = our_schedule(replace(limits, watermark=6 / 59), trace, "all")
    assert compare(our_schedule(limits, trace, "all"), larger, limits, trace)[1] == WATERMARK


def test_blocks_of_the_same_iteration_and_evicted_ones_have_names() -> None:
    """Two requests with a prompt of 40 tokens in common: the second finds two blocks of 16."""
    prompt = list(range(40))
    trace = [Drawn(0.0, prompt, [1, 2]), Drawn(0.0, prompt, [1, 2])]
    alone = Step(0.0, {0: (0, 40)}, {0}, set())
    missed = Step(0.0, {0: (0, 40), 1: (0, 40)}, {0, 1}, set())
    at_once = Step(0.0, {0: (0, 40), 1: (32, 8)}, {0, 1}, set())
    limits = replace(FEW, token_budget=256, caching=True)
    assert compare([missed], [at_once], limits, trace) == (0, SAME)
    joins = [Step(1.0, {1: (cached, 40 - cached)}, {1}, set()) for cached in (32, 16)]
    assert compare([alone, joins[0]], [alone, joins[1]], limits, trace) == (1, EVICTED)
    assert compare([alone, joins[1]], [alone, joins[0]], limits, trace) == (1, "cached")


def test_the_table_has_sums_over_traces_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(limits: SharedLimits, trace: Any) -> Steps:
        return our_schedule(limits, trace, "all")

    monkeypatch.setattr(vllm_schedule, "schedule_of_vllm", other)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("logging.disable", lambda level: None)  # other tests read logs
    case = asdict(FEW)
    seeds = [vllm_schedule.run(case, 40, seed) for seed in range(2)]
    row = vllm_schedule.table([case | {"seeds": seeds}]).splitlines()[-1]
    iterations = sum(seed["iterations"] for seed in seeds)
    assert row.startswith("| few blocks, chunks | 8 | 24 | 24 | 0 |")
    assert row.endswith(f"| {BUDGET} 2 | {iterations:,} | none |")


def test_without_vllm_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = ran("lab.studies", "vllm_schedule", "--processes", "1", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: {vllm_schedule.MISSING}\n")
