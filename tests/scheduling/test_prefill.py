"""Prompts and decode rows, in one iteration or apart: an iteration a second, if nothing else is
said.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.inference import Iteration
from scheduling.past import Line
from scheduling.policies import Dynamic, Srpt
from simulate import drive
from tests.counts import examples
from tests.virtual import Ask, make_scheduler, run

# A decodes when B comes with a prompt of 13 and C with one of 3; the budget is 9
EXAMPLE = [Ask(0.0, tokens=7), Ask(0.5, 13, 2), Ask(0.6, 3, 2)]


def rows(iteration: Iteration) -> str:
    """Return "A1 B9" for a decode row of A's beside nine tokens of B's prompt."""
    return " ".join(f"{chr(65 + row.inference.id)}{row.n_tokens}" for row in iteration.rows)


@pytest.mark.parametrize(
    ("policy", "expected", "paused_s"),
    [
        (Dynamic(), "A1, A1 B9, A1 B4 C3, A1 B1 C1, A1, A1, A1", [0, 0, 1]),
        (Dynamic(prefill="first"), "A1, B9, B4 C3, A1 B1 C1, A1, A1, A1, A1, A1", [2, 0, 1]),
        # until A is done; then B and C, each prompt as soon as nothing decodes
        (Dynamic(prefill="last"), "A1, A1, A1, A1, A1, A1, A1, B9, B4 C3, B1 C1", [0, 0, 1]),
        # at most one row decodes when a prompt is computed
        (
            Dynamic(prefill="last", decode_floor=2),
            "A1, B9, B4 C3, A1 B1 C1, A1, A1, A1, A1, A1",
            [2, 0, 1],
        ),
        (Dynamic(prefill="every:2"), "A1, A1, A1, B9, A1, A1, B4 C3, A1 B1 C1, A1", [2, 2, 3]),
    ],
    ids=lambda value: getattr(value, "prefill", None),
)
def test_each_rule_serves_the_worked_example(
    policy: Dynamic, expected: str, paused_s: list[float]
) -> None:
    served = run(policy, EXAMPLE, max_batch_size=3, token_budget=9)
    assert ", ".join(rows(iteration) for _, iteration in served.iterations) == expected
    assert [i.interruptions.paused_s for i in served.inferences] == paused_s


@pytest.mark.parametrize(("padded", "expected"), [("apart", [0, 0, 1]), ("together", [0, 8, 4])])
def test_rectangles_are_filled_up_to_their_longest_row(padded: str, expected: list[int]) -> None:
    """B's 9 beside A's 1, then B's 4 and C's 3 beside it; later all decode."""
    served = run(Dynamic(), EXAMPLE, max_batch_size=3, token_budget=9, padded=padded)
    assert [each.padding for _, each in served.iterations] == [*expected, 0, 0, 0, 0]


@pytest.mark.parametrize("rule", ["first", "every:1"])
def test_a_prompt_that_does_not_fit_stops_no_decode_row(rule: str) -> None:
    """B has no block before A is done, and C none before B is."""
    asks = [Ask(0.0, 4, 4), Ask(0.5, 7, 1), Ask(0.5, 1, 1)]
    served = run(Dynamic(prefill=rule), asks, n_blocks=2)
    assert served.answered_at == [4, 5, 6]


@dataclass
class Request:
    """A request as vLLM V0's scheduler sees it. length: of prompt and completion so far."""

    id: int
    at: float
    length: int
    end: int
    kv: int = 0


def as_vllm_v0(asks: list[Ask], max_rows: int, budget: int, n_blocks: int, size: int) -> list[str]:
    """Return the rows of each iteration by vLLM V0's rule without chunks: prompts whole, in their
    order, while rows, budget and blocks last; if none fits, all that run decode, and where no block
    is left the latest gives its own up.
    """
    ends = (ask.prompt + ask.tokens for ask in asks)
    arriving = [Request(i, a.at, a.prompt, end) for i, (a, end) in enumerate(zip(asks, ends))]
    waiting, running = list[Request](), list[Request]()
    seen, now = [], 0.0

    def free() -> int:
        return n_blocks - sum(-(-each.kv // size) for each in running)

    while arriving or waiting or running:
        if not waiting and not running:
            now = max(now, arriving[0].at)
        while arriving and arriving[0].at <= now:
            waiting.append(arriving.pop(0))
        batch: dict[int, int] = {}
        left = budget
        while waiting and len(running) < max_rows:
            if waiting[0].length > left or -(-waiting[0].length // size) > free():
                break
            running.append(each := waiting.pop(0))
            batch[each.id] = each.kv = each.length
            left -= each.length
        running.sort(key=lambda each: each.id)
        for each in [] if batch else running[:]:
            while each in running and each.kv % size == 0 and not free():
                waiting.insert(0, latest := running.pop())
                latest.kv = 0
            if each in running:
                batch[each.id], each.kv = 1, each.length
        now += 1
        for each in running[:]:
            each.length += each.id in batch
            if each.length == each.end:
                running.remove(each)
        seen.append(" ".join(f"{chr(65 + i)}{n}" for i, n in sorted(batch.items())))
    return seen


@examples(300)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14), st.integers(1, 12)), max_size=9),
    st.integers(1, 4),
    st.integers(7, 20),
    st.integers(26, 60),
)
def test_first_is_vllm_v0s_rule(
    drawn: list[tuple[int, int, int]], max_rows: int, n_blocks: int, budget: int
) -> None:
    """In every iteration, preemptions included; a budget that holds any prompt, as V0 requires."""
    asks = [Ask(at + 0.5, prompt, tokens) for at, prompt, tokens in sorted(drawn)]
    policy = Dynamic("demand", watermark=0.0, prefill="first")
    served = run(policy, asks, max_batch_size=max_rows, token_budget=budget, n_blocks=n_blocks)
    ours = [" ".join(sorted(rows(iteration).split())) for _, iteration in served.iterations]
    assert ours == as_vllm_v0(asks, max_rows, budget, n_blocks, size=4)


def test_with_an_order_that_pauses_rows_prompts_go_first_among_those_whose_turn_it_is() -> None:
    """B's turn comes before A's. C's comes after both, and there are two rows."""
    asks = [Ask(0.0, 1, 9), Ask(0.5, 2, 3), Ask(0.6, 2, 30)]
    served = run(Dynamic(prefill="first"), asks, order=Srpt())
    seen = [rows(iteration) for _, iteration in served.iterations]
    assert seen[:6] == ["A1", "B2", "B1 A1", "B1 A1", "C2", "A1 C1"]


def gaps(tbt_ms: float, **settings: Any) -> list[float]:
    """Return the times between A's tokens when prompts of 60 come: an iteration takes 20 ms, 1 ms a
    decode row, and 2 ms a prompt token.
    """
    policy = Dynamic(prefill="adaptive", tbt_ms=tbt_ms, **settings)
    scheduler = make_scheduler(policy, max_batch_size=8, n_blocks=500)
    asks = [Ask(0.0, 1, 400), *(Ask(0.4 + 0.3 * k, 60, 4) for k in range(12))]
    groups = [ask.group(4) for ask in asks]

    def cost_s(iteration: Iteration) -> float:
        decodes = [row.decodes for row in iteration.rows].count(True)
        prompts = sum(row.n_tokens for row in iteration.rows if not row.decodes)
        return 0.020 + 0.001 * decodes + 0.002 * prompts

    drive(scheduler, [(ask.at, group) for ask, group in zip(asks, groups)], cost_s)
    assert all(group[0].answered_at for group in groups)
    times = groups[0][0].token_times
    return [round(b - a, 6) for a, b in pairwise(times)]


@pytest.mark.parametrize("counts", ["prefill", "all"])
def test_adaptive_keeps_the_time_between_two_tokens_within_its_limit(counts: str) -> None:
    first, *later = [gap for gap in gaps(35.0, budget_counts=counts) if gap > 0.026]
    assert first > 0.1, "nothing is known of prompts before the first"
    assert len(later) > 50 and max(later) == 0.035


def test_adaptive_computes_a_token_of_a_prompt_whatever_the_limit() -> None:
    first, *others = sorted(gaps(1.0), reverse=True)
    assert first == 0.141 and max(others) == 0.024, "of 60 tokens, of one beside two decode rows"


def test_a_fit_follows_an_engine_that_grows_slow() -> None:
    line = Line()
    for k in range(400):
        line.add(k % 8, (1 + k % 8) * (1 if k < 200 else 2))
    assert line.at(4) == pytest.approx(10, rel=0.03)
