"""Levels, their queue policies and preferred batch sizes, in virtual time: Triton's own tests
(qa/L0_model_queue, qa/L0_batcher), told again from what they say they show, with ten times their
seconds; and what our groups, exits and preemptions add to them.
"""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.errors import Cancelled, DeadlinePassed, InvalidRequest, Overloaded
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic, MultiBin, NoBatching, Policy, Priority, Static, Windowed
from scheduling.queue import Timers
from scheduling.scheduler import Scheduler
from tests.virtual import Ask, ServedAsks, begun, make_scheduler, run, step

MODES: list[Policy] = [
    NoBatching(), Static(), Static(compact_batches=True), Windowed(batch_size_target=1),
    Windowed(preferred_batch_sizes=(1,)), MultiBin(batch_size_target=1), Dynamic(),
    Dynamic(kv_reservation="demand"),
]  # fmt: skip
in_every_mode = pytest.mark.parametrize("policy", MODES, ids=lambda policy: type(policy).__name__)


def levels(queue_policy: str = "", n: int = 2, default: int = 1, **more: float) -> Priority:
    return Priority(
        priority_levels=n, default_priority_level=default, queue_policy=queue_policy, **more
    )


def triton(asks: list[Ask], order: Priority, sizes: tuple[int, ...] = (4, 8)) -> ServedAsks:
    """Its dynamic batcher: these preferred sizes, else a batch forms after 100 s."""
    policy = Windowed(max_batch_delay_ms=100_000, preferred_batch_sizes=sizes)
    return run(policy, asks, order=order, max_batch_size=32)


def ends(served: ServedAsks) -> list[float | None]:
    """When each request ended, all of it at one instant."""
    for group in served.groups:
        assert len({(i.answered_at, i.state, str(i.error)) for i in group}) == 1, "only a half did"
    return [group[0].answered_at for group in served.groups]


def states(served: ServedAsks) -> str:
    """How each request ended: F(inished), E(xpired), W(aiting): it never came in."""
    return "".join(group[0].state.name[0] for group in served.groups)


# ---- Triton's queue tests


@in_every_mode
def test_max_queue_size_of_ten_that_come_to_a_busy_engine_eight_may_wait(policy: Policy) -> None:
    asks = [Ask(0.0, tokens=5), *[Ask(1.0) for _ in range(10)]]
    served = run(policy, asks, order=levels("1:max_size=8"), max_batch_size=1)
    assert states(served) == "F" + 8 * "F" + 2 * "W"
    for [refused] in served.groups[9:]:
        assert isinstance(refused.error, Overloaded)
        assert str(refused.error) == (
            "8 requests of level 1 are waiting, of 8 that its queue holds; try again later, or "
            "raise its max_size in --queue-policy."
        )


def test_policy_delay_and_reject_a_first_request_while_two_later_ones_are_batched() -> None:
    asks = [Ask(0.0), Ask(2.0, rows=2), Ask(2.0, rows=2)]
    served = triton(asks, levels("1:timeout_ms=1000,action=delay"))
    assert served.batches == ["BCDE", "A"]
    assert ends(served) == [101, 3, 3]
    served = triton(asks, levels("1:timeout_ms=1000"))
    assert (states(served), ends(served)) == ("EFF", [1, 3, 3])
    error = served.groups[0][0].error
    assert isinstance(error, DeadlinePassed)
    assert str(error) == (
        "The request waited for 1000 ms, the longest that the queue policy of level 1 allows."
    )


@pytest.mark.parametrize(
    ("asked_s", "ended"), [(1.0, [1, 3, 3]), (100.0, [10, 11, 11]), (None, [10, 11, 11])],
    ids=["shorter", "longer, which has no effect", "none"],
)  # fmt: skip
def test_timeout_override_only_shortens(asked_s: float | None, ended: list[float]) -> None:
    """1 + 2 + 2 rows are none of the preferred 4 and 8: only without the first one 4 are there."""
    asks = [Ask(0.0, queue_timeout_s=asked_s), Ask(2.0, rows=2), Ask(2.0, rows=2)]
    served = triton(asks, levels("1:timeout_ms=10000,override=yes"))
    assert (states(served), ends(served)) == ("EFF", ended)
    assert served.batches == ["BCDE"]
    assert f"waited for {1000 if asked_s == 1.0 else 10000} ms" in str(served.groups[0][0].error)


@pytest.mark.parametrize(
    "queue_policy", ["", "1:timeout_ms=10000", "1:timeout_ms=10000,override=no", "2:max_size=1"]
)
def test_a_timeout_that_a_level_does_not_allow_is_a_400_naming_it(queue_policy: str) -> None:
    scheduler = make_scheduler(Dynamic(), order=levels(queue_policy))
    with pytest.raises(InvalidRequest, match="this request's level has none") as refused:
        scheduler.enqueue(Ask(0.0, queue_timeout_s=1.0).group(4), 0.0)
    assert refused.value.param == "queue_timeout_s"
    assert not scheduler.has_work and scheduler.next_deadline() is None


@pytest.mark.parametrize("lowest", [2, 64])
def test_priority_levels_who_comes_third_at_level_1_is_batched_with_the_first(lowest: int) -> None:
    """`priority_levels` and, with as many levels as there may be, `max_priority_levels`."""
    asks = [Ask(0.0, rows=2), Ask(1.0, priority=lowest), Ask(3.0, rows=2, priority=1)]
    served = triton(asks, levels(n=lowest, default=lowest))
    assert served.batches == ["DEAB", "C"]
    assert ends(served) == [4, 102, 4]


def test_a_priority_beyond_the_levels_is_a_400_that_names_it_and_0_is_the_default() -> None:
    for n, default, middle in ((3, None, 2), (4, None, 2), (1, None, 1), (3, 3, 3)):
        order = Priority(priority_levels=n, default_priority_level=default)
        scheduler = make_scheduler(Dynamic(), order=order)
        for beyond in (-1, n + 1, 2**63 - 1):
            with pytest.raises(InvalidRequest, match=f"1 … {n}, .* 0 for level {middle}") as got:
                scheduler.enqueue(Ask(0.0, priority=beyond).group(4), 0.0)
            assert got.value.param == "priority"
        for asked, level in ((0, middle), (1, 1), (n, n)):
            group = Ask(0.0, priority=asked, rows=2).group(4)
            scheduler.enqueue(group, 0.0)
            assert [member.priority for member in group] == [level, level]


# ---- and its preferred batch sizes


@pytest.mark.parametrize("sizes", [(2, 6), (6, 2), (2, 6, 2)], ids=str)
@pytest.mark.parametrize(("n", "batches", "ended"), [
    (6, [2, 6], 6 * [4]),
    (5, [2, 2, 2, 1], [4, 4, 5, 5, 102]),
    (3, [2, 2, 1], [4, 4, 102]),
    (9, [2, 6, 2, 1], 6 * [4] + [5, 5, 102]),
])  # fmt: skip
def test_use_biggest_preferred_the_largest_size_that_the_queue_fills_goes_at_once(
    sizes: tuple[int, ...], n: int, batches: list[int], ended: list[float]
) -> None:
    """Two run until 3, and n come meanwhile; what fills no size waits until 1 + 100."""
    asks = [Ask(0.0, tokens=3, rows=2), *[Ask(1.0) for _ in range(n)]]
    served = triton(asks, levels(), sizes)
    joined = [(len(it.rows), it.reason) for _, it in served.iterations if it.reason]
    assert joined == [(size, "delay" if size == 1 else "preferred") for size in batches]
    assert ends(served) == [3, *ended]


def test_a_batch_of_preferred_size_is_exactly_that_and_groups_stay_whole() -> None:
    """A queue of 1 + 3 rows was once taken for one that fills 2, and the first row went alone."""
    asks = [Ask(0.0, rows=1), Ask(0.0, rows=3)]
    assert triton(asks, levels(), (2, 8)).batches == ["ABCD"], "after their delay"
    assert triton(asks, levels(), (2, 4)).answered_at == [1, 1, 1, 1], "at once"
    assert triton(asks, levels(), (1, 2)).batches == ["A", "BCD"], "one is preferred, three are not"
    policy = Windowed(max_batch_delay_ms=100_000, preferred_batch_sizes=(2, 4))
    served = run(policy, [Ask(0.0)] * 4, max_batch_size=3)
    assert served.batches == ["AB", "CD"] and served.answered_at == [1, 1, 2, 2], "4 is too many"


@in_every_mode
def test_delayed_requests_go_last_in_their_level_and_before_the_next(policy: Policy) -> None:
    """A runs until 5. B's 2.5 s are over at 3.5 and C's at 4.5; D has until 5.5."""
    asks = [Ask(0.0, tokens=5), Ask(0.5, priority=2), Ask(1.0), Ask(2.0), Ask(3.0)]
    order = levels("1:timeout_ms=2500,action=delay")
    served = run(policy, asks, order=order, max_batch_size=1)
    assert " ".join(served.batches) == "A A A A A E C D B"


def test_who_is_delayed_may_starve_unless_a_longest_wait_is_promised() -> None:
    """Somebody fresh comes every second: B, whose time was over at 1, is served after all of
    them; with --max-wait-s 5 at the first instant from 5 on.
    """
    asks = [Ask(0.0, tokens=2), Ask(0.0, tokens=1), *[Ask(1.5 + i) for i in range(10)]]
    delay = "1:timeout_ms=1000,action=delay"
    starved = run(Dynamic(), asks, order=levels(delay), max_batch_size=1)
    assert starved.groups[1][0].admitted_at == 12
    promised = run(Dynamic(), asks, order=levels(delay, max_wait_s=5.0), max_batch_size=1)
    assert promised.groups[1][0].admitted_at == 5


@pytest.mark.parametrize("shape", [{"rows": 3}, {"n": 3}, {"rows": 2, "n": 2}], ids=str)
@pytest.mark.parametrize("action", ["reject", "delay"])
@in_every_mode
def test_a_group_is_delayed_as_a_whole(policy: Policy, action: str, shape: dict[str, Any]) -> None:
    """A runs until 5, and leaves no KV blocks for any other. B's time is over at 2."""
    asks = [Ask(0.0, prompt=395, tokens=5), Ask(0.0, prompt=9, content=3, **shape), Ask(4.0)]
    order = levels(f"1:timeout_ms=2000,action={action}")
    served = run(policy, asks, order=order, max_batch_size=4, token_budget=1000)
    group, last = served.groups[1], served.groups[2][0]
    if action == "reject":
        ended = {(i.state, i.answered_at, i.admitted_at) for i in group}
        assert ended == {(State.EXPIRED, 2.0, None)}
    else:
        assert all(i.state is State.FINISHED for i in group)
        assert last.admitted_at is not None
        assert all(i.admitted_at and i.admitted_at >= last.admitted_at for i in group)


@pytest.mark.parametrize("action", ["reject", "delay"])
def test_a_request_of_which_some_were_admitted_is_not_timed_out_any_more(action: str) -> None:
    """Of two rows A has one until 6. B has three prompts for the other; C comes after B."""
    asks = [Ask(0.0, tokens=6), Ask(0.0, tokens=3, rows=3), Ask(5.5, tokens=2)]
    served = run(Dynamic(), asks, order=levels(f"1:timeout_ms=2000,action={action}"))
    assert states(served) == "FFF"
    assert [i.admitted_at for i in served.groups[1]] == [0, 3, 6]


@in_every_mode
def test_a_delayed_request_that_is_cancelled_or_late_leaves_at_once(policy: Policy) -> None:
    order = levels("1:timeout_ms=1000,action=delay,max_size=3")
    scheduler = begun(policy, first := Inference([0], 3), order=order, max_batch_size=1)
    given_up, late, stays = Inference([0], 1), Inference([0], 1, deadline=2.5), Inference([0], 1)
    for each in (given_up, late, stays):
        scheduler.enqueue([each], 0.5)
    with pytest.raises(Overloaded, match="3 requests of level 1 are waiting, of 3"):
        scheduler.enqueue([Inference([0], 1)], 0.5)
    assert scheduler.expire(1.0) == [] and scheduler.next_deadline() == 1.5
    assert scheduler.expire(1.5) == [], "they are delayed, and wait on"
    assert scheduler.next_deadline() == 2.5
    with pytest.raises(Overloaded):  # the queue holds delayed ones too
        scheduler.enqueue([Inference([0], 1)], 1.5)
    assert counts(scheduler) == (3, 1)
    assert scheduler.fail([given_up], Cancelled("gone"), 2.0) == [given_up]
    assert scheduler.expire(2.5) == [late] and late.state is State.EXPIRED
    assert counts(scheduler) == (1, 1)
    for _ in range(2):
        scheduler.enqueue([Inference([0], 1)], 2.5)
    with pytest.raises(Overloaded):
        scheduler.enqueue([Inference([0], 1)], 2.5)
    assert drained(scheduler, 3.0)[0] == first
    assert scheduler.next_deadline() is None


def counts(scheduler: Scheduler) -> tuple[int, int]:
    seen = scheduler.snapshot()
    assert seen.waiting + seen.running == len(scheduler.in_flight())
    return seen.waiting, seen.running


def drained(scheduler: Scheduler, now: float) -> list[Inference]:
    """Answered requests, in order, until none is left."""
    answered: list[Inference] = []
    for second in range(100):
        answered += scheduler.expire(now + second)
        if not scheduler.has_work:
            assert counts(scheduler) == (0, 0)
            assert scheduler.pool.free_blocks == scheduler.pool.n_blocks
            return answered
        answered += step(scheduler, now + second)[1]
    raise AssertionError("the scheduler makes no progress")


def test_each_level_has_a_queue_of_its_own_which_counts_prompts_and_is_all_or_none() -> None:
    scheduler = make_scheduler(Dynamic(), order=levels("1:max_size=4;2:max_size=1"))
    for ask in (Ask(0.0, rows=2), Ask(0.0, n=2), Ask(0.0, priority=2)):
        scheduler.enqueue(ask.group(4), 0.0)
    for ask in (Ask(0.0), Ask(0.0, priority=2)):
        with pytest.raises(Overloaded):
            scheduler.enqueue(ask.group(4), 0.0)
    step(scheduler, 0.0)  # two of level 1 run and are answered: half of its queue is free
    for ask in (Ask(0.0, rows=3), Ask(0.0, n=3)):
        with pytest.raises(Overloaded, match="2 requests of level 1 are waiting, of 4"):
            scheduler.enqueue(ask.group(4), 1.0)
    assert counts(scheduler) == (3, 0), "nothing of them was queued"
    scheduler.enqueue(Ask(1.0, rows=2).group(4), 1.0)
    others = make_scheduler(Dynamic(), order=levels("1:max_size=2;default:max_size=1"))
    others.enqueue(Ask(0.0, rows=2).group(4), 0.0)
    with pytest.raises(Overloaded, match="0 requests of level 2 are waiting, of 1"):
        others.enqueue(Ask(0.0, rows=2, priority=2).group(4), 0.0)
    unlimited = make_scheduler(Dynamic(), order=levels("1:max_size=0;2:max_size=1"))
    unlimited.enqueue(Ask(0.0, rows=100).group(4), 0.0)


def test_a_preempted_request_waits_in_its_levels_queue_again() -> None:
    policy, order = Dynamic("demand", watermark=0.0), levels("1:max_size=2")
    first, second = Inference([0], 11), Inference([0], 11)
    scheduler = begun(policy, first, second, steps=9, order=order, n_blocks=4)
    assert second.interruptions.preemptions and counts(scheduler) == (1, 1)
    scheduler.enqueue([Inference([0], 1)], 9.0)
    with pytest.raises(Overloaded, match="2 requests of level 1 are waiting, of 2"):
        scheduler.enqueue([Inference([0], 1)], 9.0)
    drained(scheduler, 9.0)


def test_timers_come_in_the_order_of_their_times_without_those_that_are_over() -> None:
    over: set[str] = set()
    timers: Timers[str] = Timers(over.__contains__)
    for at, entry in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (2.0, "b, later"), (4.0, "d")):
        timers.add(at, entry)
    over |= {"a", "d"}
    assert list(timers.due(0.5)) == [] and timers.next == 2.0, "what is over is not waited for"
    assert list(timers.due(2.0)) == ["b", "b, later"]
    assert timers.next == 3.0
    over.add("c")
    assert list(timers.due(2.5)) == [] and timers.next is None and len(timers) == 0
