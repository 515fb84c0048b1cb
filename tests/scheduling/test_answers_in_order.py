"""`preserve_ordering`: plain answers leave in the order of arrival; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduling.errors import Cancelled, GenerationFailed, Overloaded, ServingError
from scheduling.extensions import ResponseOrder
from scheduling.inference import Inference, Iteration, State
from scheduling.policies import Dynamic, Order, Policy, Priority
from scheduling.scheduler import Scheduler
from tests.counts import examples
from tests.virtual import Ask, any_order, any_policy, begun, run, step

QUEUES = "1:timeout_ms=3000;2:timeout_ms=2000,action=delay;3:max_size=2"
ORDERS = any_order() | st.sampled_from(
    [Priority(queue_policy=each) for each in (QUEUES, "2:timeout_ms=4000,max_size=3")]
)
ASKS = st.lists(
    st.builds(
        Ask, at=st.integers(0, 12).map(float), prompt=st.integers(1, 9), tokens=st.integers(1, 9),
        rows=st.integers(1, 2), n=st.integers(1, 2), content=st.none() | st.integers(0, 1),
        user=st.sampled_from([None, "a"]), priority=st.integers(0, 3), streamed=st.booleans(),
    ),
    min_size=1, max_size=10,
).map(lambda asks: sorted(asks, key=lambda ask: ask.at))  # fmt: skip


@examples(150)
@given(any_policy(), ORDERS, ASKS, st.integers(4, 6), st.integers(0, 20))
def test_every_answer_leaves_when_it_and_all_before_it_are_there_and_nothing_else_changes(
    policy: Policy, order: Order, asks: list[Ask], rows: int, spare_blocks: int
) -> None:
    """A rejected request releases those behind it, too."""
    assume(not order.preemptive or isinstance(policy, Dynamic))
    limits: dict[str, Any] = {"order": order, "max_batch_size": rows, "n_blocks": 20 + spare_blocks}
    free = run(policy, asks, **limits)
    kept = run(policy, asks, check_held, preserve_ordering=True, **limits)
    assert kept.batches == free.batches
    latest = 0.0
    for one, other in zip(free.inferences, kept.inferences):
        assert (one.state, one.token_times) == (other.state, other.token_times)
        if one.streamed or one.answered_at is None:  # it was refused
            assert one.answered_at == other.answered_at
            continue
        latest = max(latest, one.answered_at)
        rejected = other.state is State.EXPIRED
        assert other.answered_at == (one.answered_at if rejected else latest)


def check_held(scheduler: Scheduler, _: Iteration) -> None:
    """Held ones are finished; they have no row and no KV blocks, and wait for one that is not."""
    held = scheduler.held
    others = [*scheduler.waiting.values(), *scheduler.running.values()]
    awaited = [i.id for i in others if i.answered_at is None and not i.streamed]
    for inference in held.values():
        assert inference.is_over and inference.answered_at is None and not inference.streamed
        assert inference.blocks == [] and inference.id not in scheduler.running
        assert min(awaited) < inference.id
    seen = scheduler.snapshot()
    assert seen.waiting + seen.running == len(scheduler.in_flight()) - sum(
        i.answered_at is not None for i in scheduler.running.values()
    )


def three(**more: Any) -> tuple[Scheduler, list[Inference]]:
    """A runs for long; B and C are finished, and held."""
    asked = [Inference([0], n, deadline=at) for n, at in ((20, 9.0), (1, None), (1, 6.0))]
    scheduler = begun(Dynamic(), *asked, max_batch_size=3, preserve_ordering=True, **more)
    assert [i.state for i in asked] == 3 * [State.RUNNING]
    return scheduler, asked


def test_held_ones_run_by_the_count_hold_nothing_and_are_in_flight() -> None:
    scheduler, (long, *held) = three(max_in_flight=3)
    seen = scheduler.snapshot()
    assert (seen.waiting, seen.running, seen.blocks_used) == (0, 3, len(long.blocks))
    assert scheduler.in_flight() == [long, *held] and list(scheduler.running) == [long.id]
    with pytest.raises(Overloaded, match="0 requests are waiting and 3 running"):
        scheduler.enqueue([Inference([0], 1)], 1.0)
    assert scheduler.fail([held[0]], Cancelled("gone"), 1.0) == [held[0]]
    more = Inference([0], 1)
    scheduler.enqueue([more], 1.0)  # and its row is free at once
    assert step(scheduler, 1.0)[1] == [] and more.tokens


@pytest.mark.parametrize("error", [Cancelled("gone"), GenerationFailed("broken")], ids=str)
def test_one_that_fails_or_is_cancelled_releases_those_behind_it(error: ServingError) -> None:
    scheduler, (long, *held) = three()
    assert scheduler.fail([long], error, 3.0) == [long, *held]
    assert [i.answered_at for i in held] == [3.0, 3.0]
    assert [i.state for i in held] == 2 * [State.FINISHED] and not scheduler.has_work


def test_one_that_expires_releases_those_behind_it_and_a_held_one_expires_at_its_own_time() -> None:
    scheduler, asked = three()
    assert scheduler.next_deadline() == 6.0
    assert scheduler.expire(6.0) == [asked[2]] and asked[2].state is State.EXPIRED
    assert scheduler.expire(9.0) == asked[:2] and asked[1].state is State.FINISHED
    assert not scheduler.in_flight()


def test_those_that_were_answered_meanwhile_are_not_kept_behind_a_long_one() -> None:
    """Requests that were given up were kept until the longest one before was answered."""
    scheduler = begun(Dynamic(), Inference([0], 300), steps=0, preserve_ordering=True)
    for second in range(200):
        gone = Inference([0] * 100, 1)
        scheduler.enqueue([gone], second)
        scheduler.fail([gone], Cancelled("gone"), second)
        scheduler.enqueue([Inference([0], 1, streamed=True)], second)
        assert len(step(scheduler, second)[1]) == 1
    [ordering] = [each for each in scheduler.extensions if isinstance(each, ResponseOrder)]
    assert len(ordering._unanswered) == 1 == len(scheduler.in_flight())
