"""Orders that pause rows: whose turn it is, and what pausing costs."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import Cancelled, DeadlinePassed
from scheduling.inference import Inference, Iteration, State
from scheduling.policies import Dynamic, Mlfq, Order, Srpt
from scheduling.scheduler import Scheduler
from tests.counts import examples
from tests.virtual import Ask, begun, run, step

# A worked example: one row, an iteration per second.
#
#     request   arrives   tokens
#     A         0.0       5
#     B         0.5       2
#     C         1.5       1
#
#     t       0 1 2 3 4 5 6 7
#     fcfs    A A A A A B B C
#     srpt    A B B C A A A A      at 1 B needs 2 and A 4; at 2 C and B need 1, and B was first
EXAMPLE = [Ask(0.0, tokens=5), Ask(0.5, tokens=2), Ask(1.5, tokens=1)]


def test_the_shortest_remaining_one_runs_and_the_others_are_paused() -> None:
    served = run(Dynamic(), EXAMPLE, order=Srpt(), max_batch_size=1)
    assert " ".join(served.batches) == "A B B C A A A A"
    a, b, c = (each.interruptions for each in served.inferences)
    assert [each.paused_s for each in (a, b, c)] == [3.0, 0.0, 0.0]
    assert served.admitted_at[0] == 0.0 and a.preemptions == a.recomputed_tokens == 0
    assert max(iteration.running for _, iteration in served.iterations) == 2, "paused ones run"


# Skip-join MLFQ: one row, quanta of 2, 4, 8 tokens, an iteration per second.
#
#     request   arrives   prompt   tokens
#     A         0.0       1        5        enters level 0; its prompt and a token use 2
#     B         2.2       3        2        a prompt of 3 skips level 0: it enters level 1
#     C         2.5       1        1        enters level 0, and goes before all
#
#     t         0 1 2 3 4 5 6 7
#     runs      A A A C A A B B
#     level     0 0 1 0 1 1 1 1          A falls at 2; B came to level 1 after it
class ThreeLevels(Mlfq):
    levels = 3


MLFQ_EXAMPLE = [Ask(0.0, tokens=5), Ask(2.2, prompt=3, tokens=2), Ask(2.5, tokens=1)]


def test_levels_of_the_feedback_queue() -> None:
    levels: list[int] = []

    def check(scheduler: Scheduler, iteration: Iteration) -> None:
        levels.extend(row.inference.standing.state.number for row in iteration.rows)

    order = ThreeLevels(mlfq_quantum=2)
    served = run(Dynamic(), MLFQ_EXAMPLE, check, order=order, max_batch_size=1)
    assert " ".join(served.batches) == "A A A C A A B B"
    assert levels == [0, 0, 1, 0, 1, 1, 1, 1]
    # a request not computed for three seconds returns to the first level, as its last one
    long = [Ask(0.0, tokens=30), *(Ask(float(at), tokens=2) for at in range(1, 21, 2))]
    for each, widest in (order, 21.0), (ThreeLevels(3.0, 2), 9.0):
        times = run(Dynamic(), long, order=each, max_batch_size=1).inferences[0].token_times
        assert max(b - a for a, b in itertools.pairwise(times)) == widest


def test_a_level_is_entered_by_the_prompt_and_left_by_the_quantum() -> None:
    order, asked = ThreeLevels(mlfq_quantum=2), [Inference([0] * n, 1) for n in (2, 3, 99)]
    for inference in asked:
        order.arrive([inference], 0)
    assert [inference.standing.state.number for inference in asked] == [0, 1, 2]
    falls = asked[0]
    for now, expected in ((4.0, (0, 1, 0.0)), (5.0, (1, 0, 5.0))):
        order.computed(falls, 1, now)
        level = falls.standing.state
        assert (level.number, level.tokens, level.since) == expected


def test_recomputed_tokens_use_no_quantum_up() -> None:
    used: Counter[int] = Counter()

    class Counts(Mlfq):
        def computed(self, inference: Inference, tokens: int, now: float) -> None:
            used[inference.id] += tokens
            super().computed(inference, tokens, now)

    asks = [Ask(float(i), prompt=4, tokens=9) for i in range(6)]
    policy = Dynamic("demand", watermark=0.0)
    served = run(policy, asks, order=Counts(mlfq_quantum=2), max_batch_size=2, n_blocks=6)
    assert sum(each.interruptions.recomputed_tokens for each in served.inferences) > 0
    assert set(used.values()) == {4 + 9 - 1}, "its last token is never computed"


@examples(150)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_on_one_row_no_schedule_has_a_smaller_mean_latency(jobs: list[tuple[int, int]]) -> None:
    """Against all schedules, by brute force (Schrage, 1968: SRPT is optimal)."""
    jobs = sorted(jobs)

    @cache
    def least(now: int, left: tuple[int, ...]) -> int:
        """The least sum of latencies from `now` on."""
        here = [i for i, n in enumerate(left) if n and jobs[i][0] <= now]
        if not any(left):
            return 0
        if not here:
            return least(now + 1, left)
        waiting = len(here)
        after = [(*left[:i], left[i] - 1, *left[i + 1 :]) for i in here]
        return waiting + min(least(now + 1, each) for each in after)

    asks = [Ask(float(at), tokens=tokens) for at, tokens in jobs]
    served = run(Dynamic(), asks, order=Srpt(), max_batch_size=1)
    latencies = [(group[0].answered_at or 0.0) - group[0].arrived_at for group in served.groups]
    assert sum(latencies) == least(0, tuple(tokens for _, tokens in jobs))


def test_what_a_preemption_took_is_left_to_compute_again() -> None:
    order, taken = Srpt(), Inference([0] * 8, 5)
    taken.standing.predicted_tokens, taken.tokens, taken.admitted_at = 5, [7] * 3, 0.0
    assert order.key(taken) == pytest.approx(2 + 0.2 * 11)
    taken.computed, taken.decodes = 10, True
    assert order.key(taken) == 2


def test_more_are_admitted_than_rows_are_computed_as_far_as_blocks_go() -> None:
    """Of 4 blocks A and B have two each, and C would need one more. It waits until B is done, where
    blocks of a whole life are kept; on demand it takes one of A, whose turn comes last.
    """
    asks = [Ask(0.0, tokens=7), Ask(1.0, tokens=5)]
    limits: dict[str, Any] = {"max_batch_size": 1, "n_blocks": 4}
    served = run(Dynamic(), [*asks, Ask(2.0, tokens=3)], order=Srpt(), **limits)
    assert "".join(served.batches) == "ABBBBBCCCAAAAAA"
    a = served.inferences[0].interruptions
    assert (served.admitted_at[2], a.preemptions, a.paused_s) == (6.0, 0, 8.0)
    demand = Dynamic("demand", watermark=0.0)
    served = run(demand, [*asks, Ask(2.0, prompt=9)], order=Srpt(), **limits)
    a, b, _ = (each.interruptions for each in served.inferences)
    assert (served.admitted_at[2], a.preemptions, b.preemptions) == (2.0, 1, 0)
    assert a.recomputed_tokens == 1 and a.preempted_s > 0
    assert [len(inference.tokens) for inference in served.inferences] == [7, 5, 1]


@pytest.mark.parametrize("order", [Srpt(), Mlfq(mlfq_quantum=2), Mlfq(2.0, 2)])
def test_who_is_paused_is_cancelled_and_expires_like_anybody(order: Order) -> None:
    long, late = Inference([0], 9), Inference([0], 9, deadline=4.0)
    scheduler = begun(Dynamic(), long, steps=2, order=order, max_batch_size=1)
    scheduler.enqueue([short := Inference([0], 1)], 2.0)
    step(scheduler, 2.0)
    assert short.state is State.FINISHED and long.interruptions.paused_at == 2.0 and long.blocks
    assert scheduler.snapshot().running == len(scheduler.running)
    scheduler.enqueue([late], 3.0)
    assert scheduler.fail([long], Cancelled("gone"), 3.5) == [long]
    assert (long.interruptions.paused_s, long.blocks) == (1.5, [])
    scheduler.schedule(3.5)
    ended = scheduler.expire(4.5)
    assert ended == [late] and isinstance(late.error, DeadlinePassed)
    assert not scheduler.has_work and scheduler.pool.free_blocks == scheduler.pool.n_blocks


def test_completions_that_wait_for_the_first_of_their_prompt_take_no_row() -> None:
    """Three of them had the first turns, and with prompts first no iteration computed anything."""
    asks = [*7 * [Ask(0.0)], Ask(0.0, tokens=4, rows=3), Ask(0.0, prompt=17, n=4)]
    limits: dict[str, Any] = {"max_batch_size": 3, "token_budget": 12, "n_blocks": 26}
    served = run(Dynamic(prefill="first"), asks, order=Mlfq(0.5, mlfq_quantum=2), **limits)
    assert all(each.state is State.FINISHED for each in served.inferences)
