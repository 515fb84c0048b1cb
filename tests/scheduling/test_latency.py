"""Where a request's time goes: parts that sum to its latency, and neighbours."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.inference import State
from scheduling.latency import PARTS, Times, neighbours, parts_of, times_of
from scheduling.policies import Dynamic, Order, Policy, Static
from stats import timings_of
from tests.virtual import Ask, any_asks, any_order, any_policy, run

near = partial(pytest.approx, abs=1e-5)  # parts are rounded
DEMAND = Dynamic(kv_reservation="demand", watermark=0)


@given(
    st.one_of([any_policy(), st.just(DEMAND)]), any_order(),
    any_asks(8, streamed=st.booleans(), deadline=st.none() | st.integers(1, 60)),
    st.integers(1, 4), st.integers(8, 30), st.integers(11, 16),
)  # fmt: skip
def test_parts_sum_to_the_latency_in_every_mode_and_order(
    policy: Policy, order: Order, asks: list[Ask], rows: int, budget: int, blocks: int
) -> None:
    limits: dict[str, Any] = {"max_batch_size": rows, "token_budget": budget, "n_blocks": blocks}
    served = run(policy, asks, order=order, **limits)
    computed = Counter(  # an iteration takes a second
        id(row.inference) for _, each in served.iterations for row in each.rows if not row.idle
    )
    for each in served.inferences:
        if each.answered_at is None:  # refused
            continue
        parts = parts_of(each, times_of(each))
        assert sum(parts.values()) == near(each.answered_at - each.arrived_at)
        assert all(seconds > 0 for seconds in parts.values())
        parts, interrupted = dict.fromkeys(PARTS, 0.0) | parts, each.interruptions
        expected = [interrupted.preempted_s, interrupted.paused_s]
        assert [parts["preempted"], parts["paused"]] == near(expected)
        assert interrupted.preemptions or not parts["recompute"]
        if each.state is State.FINISHED:
            busy_s = parts["prefill"] + parts["decode"] + parts["recompute"]
            assert busy_s == near(computed[id(each)]), "seconds in which it had a row"
            told = timings_of(each)
            assert sum(told["parts"].values()) == near(told["e2e_s"])
            assert parts["batch"] + parts["blocks"] == near(told["queue_s"])
            assert parts["held"] == near(told["held_s"])


def parts(policy: Policy, *asks: Ask, **limits: Any) -> list[dict[str, float]]:
    served = run(policy, asks, **limits)
    return [timings_of(each)["parts"] for each in served.inferences]


def test_a_request_waits_for_blocks_while_a_row_is_free() -> None:
    """Three blocks of four tokens; A's whole life is three, and two rows are free for C alone."""
    a, b = Ask(0.0, prompt=4, tokens=5), Ask(0.5, prompt=4, tokens=5)
    assert parts(Dynamic(), a, b, n_blocks=3) == [
        {"prefill": 1.0, "decode": 4.0},
        # until the iteration ends that runs when it comes, there is no plan that blocks could fail
        {"batch": 0.5, "blocks": 4.0, "prefill": 1.0, "decode": 4.0},
    ]
    assert parts(Dynamic(), a, b, max_batch_size=1)[1]["batch"] == 4.5, "no row was free"


def test_a_preempted_request_computes_again() -> None:
    """The worked example of test_demand.py: B gives way at 1, and goes on at 5."""
    asks = [Ask(0.0, prompt=4, tokens=5)] * 2
    assert parts(DEMAND, *asks, n_blocks=3) == [
        {"prefill": 1.0, "decode": 4.0},
        {"prefill": 1.0, "decode": 3.0, "preempted": 4.0, "recompute": 1.0},
    ]
    late = parts(DEMAND, *asks, Ask(0.5, prompt=4), max_batch_size=3, n_blocks=3)[2]
    assert late["batch"] == 0.5, "blocks are short where a row is preempted, too"


def test_a_batch_is_waited_for_and_holds() -> None:
    short, long, late = Ask(0.0, tokens=1), Ask(0.0, tokens=3), Ask(0.5, tokens=1)
    assert parts(Static(), short, long, late) == [
        {"prefill": 1.0, "held": 2.0}, {"prefill": 1.0, "decode": 2.0},
        {"batch": 2.5, "prefill": 1.0},
    ]  # fmt: skip


def test_a_request_that_is_in_flight_has_parts_so_far() -> None:
    served = run(Dynamic(), [Ask(0.0, tokens=5)])
    [each] = served.inferences
    each.tokens, each.token_times = each.tokens[:2], each.token_times[:2]
    assert parts_of(each, times_of(each, 2.5)) == {"prefill": 1.0, "decode": 1.5}


def test_neighbours_are_those_that_ran_before_and_beside() -> None:
    instants = {
        1: (2.0, 3.0, 6.0), 2: (0.0, 1.0, 3.0), 3: (4.0, 5.0, 9.0), 4: (6.0, 7.0, 8.0),
        5: (1.0, 1.5, 2.0),
    }  # fmt: skip
    prompts = {1: 4, 2: 9, 3: 900, 4: 8, 5: 50}
    times = {i: Times(0.0, *at, at[-1], prompt_tokens=prompts[i]) for i, at in instants.items()}
    assert neighbours(1, times) == {
        "ran_before": 2, "ran_beside": 2, "longest_beside": [3, 2],
        "mean_rows": 0.75, "long_prompts": {"3": 900},
    }  # fmt: skip
