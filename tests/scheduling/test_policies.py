"""Policies in virtual time: worked examples, then properties that hold for any workload."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduling.adapters import Adapters, Rule
from scheduling.history import LeastSquares
from scheduling.inference import Iteration
from scheduling.policies import (
    Dynamic,
    NoBatching,
    Order,
    Policy,
    Srpt,
    Static,
    Windowed,
)
from tests.contract import ASKS, LIMITS, serve_within_limits
from tests.counts import examples
from tests.virtual import Ask, any_order, any_policy, run

# A worked example, after Orca's figures 3 and 4: two rows, an iteration per second.
#
#     request   arrives   tokens
#     A         0.0       5
#     B         0.0       2
#     C         0.5       3          both come while A and B run
#     D         0.6       1
EXAMPLE = [Ask(0.0, tokens=5), Ask(0.0, tokens=2), Ask(0.5, tokens=3), Ask(0.6, tokens=1)]


@pytest.mark.parametrize(("policy", "batches", "answered_at"), [
    (NoBatching(), "A A A A A B B C C C D", [5, 7, 10, 11]),
    (Static(), "AB AB Ab Ab Ab CD Cd Cd", [5, 5, 8, 8]),
    (Static(compact_batches=True), "AB AB A A A CD C C", [5, 5, 8, 8]),
    (
        Windowed(max_batch_delay_ms=9000, batch_size_target=2),
        "AB AB Ab Ab Ab CD Cd Cd",
        [5, 5, 8, 8],
    ),
    (Dynamic(), "AB AB AC AC AC D", [5, 2, 5, 6]),
], ids=["nobatch", "static", "static, compacted", "windowed", "dynamic"])  # fmt: skip
def test_modes_serve_the_example(policy: Policy, batches: str, answered_at: list[float]) -> None:
    served = run(policy, EXAMPLE)
    assert " ".join(served.batches) == batches
    assert served.answered_at == answered_at


@pytest.mark.parametrize(("at", "admitted"), [(2.5, 5.0), (4.5, 6.5)])
def test_a_window_is_measured_from_the_oldest_arrival(at: float, admitted: float) -> None:
    """A runs from 2 to 5. When the engine is idle again B's 2 s are over, or it waits for the rest
    of them.
    """
    policy = Windowed(max_batch_delay_ms=2000, batch_size_target=9)
    assert run(policy, [Ask(0.0, tokens=3), Ask(at)]).admitted_at == [2.0, admitted]


def test_a_window_closes_at_the_target_or_at_the_rows_of_a_batch() -> None:
    """A batch of two never holds three: the second fills it, and the third waits for its delay."""
    policy = Windowed(max_batch_delay_ms=10000, batch_size_target=3)
    served = run(policy, [Ask(0.0), Ask(0.25), Ask(0.5)], max_batch_size=2)
    assert served.admitted_at == [0.25, 0.25, 10.5]
    assert [iteration.reason for _, iteration in served.iterations] == ["target", "delay"]


def test_a_long_prompt_is_computed_in_chunks_and_does_not_stall_the_row_that_decodes() -> None:
    asks = [Ask(0.0, prompt=1, tokens=6), Ask(0.5, prompt=25, tokens=2)]
    served = run(Dynamic(), asks, token_budget=10)
    assert served.chunks == [[1], [1, 10], [1, 10], [1, 5], [1, 1], [1]]
    assert [i.token_times for i in served.inferences] == [[1, 2, 3, 4, 5, 6], [4, 5]]


def test_prompts_share_the_budget_in_order_and_the_last_sits_out() -> None:
    served = run(Static(), [Ask(0.0, prompt=6)] * 3, max_batch_size=3, token_budget=10)
    assert (served.batches, served.chunks) == (["AB", "aBC"], [[6, 4], [1, 2, 6]])


RULES, WAITS = st.sampled_from(get_args(Rule)), st.sampled_from([None, 0.5, 4.0])


@examples(200)
@given(
    policy=any_policy(), order=any_order(), asks=ASKS,
    length_predictor=st.sampled_from(["exact", "noisy:1", "prompt"]),
    preserve_ordering=st.booleans(),
    adapters=st.none() | st.builds(Adapters, st.integers(1, 3), RULES, WAITS), **LIMITS,
)  # fmt: skip
def test_any_load_is_served(policy: Policy, order: Order, asks: list[Ask], **options: Any) -> None:
    assume(not order.preemptive or isinstance(policy, Dynamic))
    serve_within_limits(policy, order, asks, **options)


# ---- prompts and decode rows, in one iteration or apart


# A decodes when B comes with a prompt of 13 and C with one of 3; the budget is 9
PROMPTS = [Ask(0.0, tokens=7), Ask(0.5, 13, 2), Ask(0.6, 3, 2)]


def rows(iteration: Iteration) -> str:
    """Return "A1 B9" for a decode row of A's beside nine tokens of B's prompt."""
    return " ".join(f"{chr(65 + row.inference.id)}{row.n_tokens}" for row in iteration.rows)


@pytest.mark.parametrize(("policy", "expected", "paused_s"), [
    (Dynamic(), "A1, A1 B9, A1 B4 C3, A1 B1 C1, A1, A1, A1", [0, 0, 1]),
    (Dynamic(prefill="first"), "A1, B9, B4 C3, A1 B1 C1, A1, A1, A1, A1, A1", [2, 0, 1]),
    # until A is done; then B and C, each prompt as soon as nothing decodes
    (Dynamic(prefill="last"), "A1, A1, A1, A1, A1, A1, A1, B9, B4 C3, B1 C1", [0, 0, 1]),
    # at most one row decodes when a prompt is computed
    (Dynamic(prefill="last:2"), "A1, B9, B4 C3, A1 B1 C1, A1, A1, A1, A1, A1", [2, 0, 1]),
    (Dynamic(prefill="every:2"), "A1, A1, A1, B9, A1, A1, B4 C3, A1 B1 C1, A1", [2, 2, 3]),
], ids=lambda value: getattr(value, "prefill", None))  # fmt: skip
def test_rules_serve_the_example(policy: Dynamic, expected: str, paused_s: list[float]) -> None:
    """Also with --shed, which keeps a history: with it, last computed prompts first."""
    for shed in (False, True):
        served = run(policy, PROMPTS, max_batch_size=3, token_budget=9, shed=shed)
        assert ", ".join(rows(iteration) for _, iteration in served.iterations) == expected
        assert [i.interruptions.paused_s for i in served.inferences] == paused_s


@pytest.mark.parametrize(("padded", "expected"), [("apart", [0, 0, 1]), ("together", [0, 8, 4])])
def test_rectangles_are_filled_up_to_their_longest_row(padded: str, expected: list[int]) -> None:
    """B's 9 beside A's 1, then B's 4 and C's 3 beside it; later all decode."""
    served = run(Dynamic(), PROMPTS, max_batch_size=3, token_budget=9, padded=padded)
    assert [each.padding for _, each in served.iterations] == [*expected, 0, 0, 0, 0]


@pytest.mark.parametrize("rule", ["first", "every:1"])
def test_a_prompt_that_does_not_fit_stops_no_decode_row(rule: str) -> None:
    """B has no block before A is done, and C none before B is."""
    asks = [Ask(0.0, 4, 4), Ask(0.5, 7, 1), Ask(0.5, 1, 1)]
    served = run(Dynamic(prefill=rule), asks, n_blocks=2)
    assert served.answered_at == [4, 5, 6]


@dataclass
class AskInFlight:
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
    arriving = [AskInFlight(i, a.at, a.prompt, end) for i, (a, end) in enumerate(zip(asks, ends))]
    waiting, running = list[AskInFlight](), list[AskInFlight]()
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
    st.integers(1, 4), st.integers(7, 20), st.integers(26, 60),
)  # fmt: skip
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
    policy = Dynamic(prefill=f"adaptive:{tbt_ms}", **settings)
    asks = [Ask(0.0, 1, 400), *(Ask(0.4 + 0.3 * k, 60, 4) for k in range(12))]

    def cost_s(iteration: Iteration) -> float:
        decodes = [row.decodes for row in iteration.rows].count(True)
        prompts = sum(row.n_tokens for row in iteration.rows if not row.decodes)
        return 0.020 + 0.001 * decodes + 0.002 * prompts

    served = run(policy, asks, seconds=cost_s, max_batch_size=8, n_blocks=500)
    assert all(served.answered_at)
    return [round(b - a, 6) for a, b in pairwise(served.inferences[0].token_times)]


@pytest.mark.parametrize("counts", ["prefill", "all"])
def test_adaptive_keeps_the_time_between_two_tokens_within_its_limit(counts: str) -> None:
    first, *later = [gap for gap in gaps(35.0, budget_counts=counts) if gap > 0.026]
    assert first > 0.1, "nothing is known of prompts before the first"
    assert len(later) > 50 and max(later) == 0.035
    first, *others = sorted(gaps(1.0), reverse=True)  # of 60 tokens, of one whatever the limit
    assert first == 0.141 and max(others) == 0.024, "beside two decode rows"


def test_a_fit_follows_an_engine_that_grows_slow() -> None:
    line = LeastSquares()
    for k in range(400):
        line.add(k % 8, (1 + k % 8) * (1 if k < 200 else 2))
    assert line.at(4) == pytest.approx(10, rel=0.03)
