"""Policies in virtual time: worked examples, then properties that hold for any workload."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduling.adapters import Adapters, Rule
from scheduling.inference import Inference, State
from scheduling.policies import (
    Dynamic,
    Fcfs,
    Limits,
    NoBatching,
    Order,
    Policy,
    Static,
    View,
    Windowed,
)
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Queue
from tests.contract import ASKS, LIMITS, serve_within_limits
from tests.counts import examples
from tests.virtual import Ask, any_order, any_policy, every_policy, run

# A worked example, after Orca's figures 3 and 4: two rows, an iteration a second.
#
#     request   arrives   tokens
#     A         0.0       5
#     B         0.0       2
#     C         0.5       3          both come while A and B run
#     D         0.6       1
EXAMPLE = [Ask(0.0, tokens=5), Ask(0.0, tokens=2), Ask(0.5, tokens=3), Ask(0.6, tokens=1)]


@pytest.mark.parametrize(
    ("policy", "batches", "answered_at"),
    [
        (NoBatching(), "A A A A A B B C C C D", [5, 7, 10, 11]),
        (Static(), "AB AB Ab Ab Ab CD Cd Cd", [5, 5, 8, 8]),
        (Static(compact_batches=True), "AB AB A A A CD C C", [5, 5, 8, 8]),
        (
            Windowed(max_batch_delay_ms=9000, batch_size_target=2),
            "AB AB Ab Ab Ab CD Cd Cd",
            [5, 5, 8, 8],
        ),
        (Dynamic(), "AB AB AC AC AC D", [5, 2, 5, 6]),
    ],
    ids=["nobatch", "static", "static, compacted", "windowed", "dynamic"],
)
def test_each_mode_serves_the_worked_example_iteration_by_iteration(
    policy: Policy, batches: str, answered_at: list[float]
) -> None:
    served = run(policy, EXAMPLE)
    assert " ".join(served.batches) == batches
    assert served.answered_at == answered_at


def test_a_window_is_measured_from_the_oldest_arrival_not_from_when_the_engine_looked() -> None:
    # A goes at 2 and runs to 5. B came at 2.5: when the engine is idle again its 2 s are over, and
    # it goes at once.
    served = run(
        Windowed(max_batch_delay_ms=2000, batch_size_target=9), [Ask(0.0, tokens=3), Ask(2.5)]
    )
    assert served.admitted_at == [2.0, 5.0]
    # B came at 4.5, half a second before the engine was idle: it waits for the rest of its 2 s.
    served = run(
        Windowed(max_batch_delay_ms=2000, batch_size_target=9), [Ask(0.0, tokens=3), Ask(4.5)]
    )
    assert served.admitted_at == [2.0, 6.5]


def test_a_window_closes_at_the_target_and_takes_up_to_its_limit() -> None:
    asks = [Ask(0.0, rows=1), Ask(0.25), Ask(0.5)]
    served = run(
        Windowed(max_batch_delay_ms=10000, batch_size_target=3, batch_size_limit=2),
        asks,
        max_batch_size=8,
    )
    # a batch of two can never hold three: the second arrival fills it, and the third waits for its
    # own delay
    assert served.admitted_at == [0.25, 0.25, 10.5]
    assert [iteration.reason for _, iteration in served.iterations] == ["target", "delay"]


def test_a_group_is_never_split_and_nobody_overtakes_it() -> None:
    asks = [Ask(0.0, tokens=2), Ask(0.0, tokens=2, rows=3), Ask(0.0, tokens=2)]
    assert run(Static(), asks, max_batch_size=3).batches == ["A", "A", "BCD", "BCD", "E", "E"]
    assert run(Dynamic(), asks, max_batch_size=3).batches == ["ABC", "ABC", "DE", "DE"]


def test_nobody_overtakes_a_head_of_queue_whose_whole_life_does_not_fit() -> None:
    # 4 blocks of 4 tokens: A needs 3 (1 + 8 tokens), B needs 2, C needs 1 and would fit beside A
    asks = [Ask(0.0, tokens=8), Ask(0.0, tokens=6), Ask(0.0, tokens=1)]
    served = run(Dynamic(), asks, max_batch_size=8, n_blocks=4)
    assert served.admitted_at == [0.0, 8.0, 8.0]


def test_a_long_prompt_is_computed_in_chunks_and_does_not_stall_the_row_that_decodes() -> None:
    asks = [Ask(0.0, prompt=1, tokens=6), Ask(0.5, prompt=25, tokens=2)]
    served = run(Dynamic(), asks, token_budget=10)
    chunks = served.chunks
    assert chunks == [[1], [1, 10], [1, 10], [1, 5], [1, 1], [1]]
    assert served.groups[0][0].token_times == [1, 2, 3, 4, 5, 6]
    assert served.groups[1][0].token_times == [4, 5]


def test_prompts_share_the_budget_in_order_and_the_last_sits_out() -> None:
    served = run(
        Static(),
        [Ask(0.0, prompt=6), Ask(0.0, prompt=6), Ask(0.0, prompt=6)],
        max_batch_size=3,
        token_budget=10,
    )
    chunks = [
        [(row.n_tokens, row.idle) for row in iteration.rows] for _, iteration in served.iterations
    ]
    assert chunks == [[(6, False), (4, False)], [(1, True), (2, False), (6, False)]]


def test_a_policy_keeps_no_state() -> None:
    inference, queue, pool = Inference([0], 1), Queue(), PrefixCache(1, 2)
    queue.add(inference, by_user=False)
    for policy in every_policy():
        queues = [queue] * policy.n_bins
        view = View(0.0, queues, [], pool, pool.finder(), Limits(1, 1, 2), Fcfs())
        assert policy.plan(view) == policy.plan(view)
        assert inference.state is State.WAITING


@examples(200)
@given(
    policy=any_policy(),
    order=any_order(),
    asks=ASKS,
    length_predictor=st.sampled_from(["exact", "noisy:1", "prompt"]),
    preserve_ordering=st.booleans(),
    adapters=st.none()
    | st.builds(
        Adapters,
        st.integers(1, 3),
        st.sampled_from(get_args(Rule)),
        st.sampled_from([None, 0.5, 4.0]),
    ),
    **LIMITS,
)
def test_any_workload_is_served_once_within_every_limit(
    policy: Policy, order: Order, asks: list[Ask], **options: Any
) -> None:
    assume(not order.preemptive or isinstance(policy, Dynamic))
    serve_within_limits(policy, order, asks, **options)
