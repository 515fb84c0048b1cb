"""The scheduler's exits (cancel, expire, fail) and its admission."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import Cancelled, GenerationFailed, InvalidRequest, Overloaded
from scheduling.extensions import HOOKS
from scheduling.inference import Inference, Row, State, TokenEvent
from scheduling.memory import BlockPool
from scheduling.policies import Dynamic, Fair, Plan, Policy, Static, View, Windowed
from tests.virtual import begun, make_scheduler, step


def test_a_queue_is_full_at_max_in_flight() -> None:
    three = [Inference([0], 9) for _ in range(3)]
    for steps in (0, 1):  # then two run, and one waits
        scheduler = begun(Dynamic(), *three, steps=steps, max_in_flight=3)
        with pytest.raises(Overloaded, match="--max-waiting"):
            scheduler.enqueue([Inference([0], 1)], now=1.0)


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = make_scheduler(Dynamic(), n_blocks=2)
    message = "needs 3 KV blocks of 4 tokens and the whole pool has 2"
    with pytest.raises(InvalidRequest, match=message):
        scheduler.enqueue([Inference([0] * 4, 5)], now=0.0)
    scheduler.enqueue([Inference([0] * 4, 4), Inference([0] * 4, 4)], now=0.0)  # one after another
    together = make_scheduler(Static(), n_blocks=3)
    with pytest.raises(InvalidRequest, match="needs 4 KV blocks"):
        together.enqueue([Inference([0] * 4, 4), Inference([0] * 4, 4)], now=0.0)


def test_decode_iterations_are_padded_to_the_smallest_size_that_holds_them() -> None:
    """RBLN's example: four run on the decoder of 4, seven on that of 8. Prompts have no such shape;
    rows of prompts of one token were taken for decode rows.
    """
    limits = {"max_batch_size": 8, "decoder_batch_sizes": [1, 4, 8], "token_budget": 3}
    scheduler, padded = make_scheduler(Dynamic(), **limits), []
    for rows in (1, 3, 3):
        scheduler.enqueue([Inference([0], 50) for _ in range(rows)], now=0.0)
        for now in (0.0, 1.0):
            iteration, _ = step(scheduler, now)
            padded.append((sum(not row.decodes for row in iteration.rows), iteration.padding))
    assert padded == [(1, 0), (0, 0), (3, 0), (0, 0), (3, 0), (0, 1)]


def test_an_engine_with_fewer_blocks_refuses_what_waits_and_can_never_fit() -> None:
    group, fits = [Inference([0] * 4, 4), Inference([0] * 4, 4)], [Inference([0] * 4, 4)]
    scheduler = begun(Static(), *group, steps=0, n_blocks=8)
    scheduler.enqueue(fits, now=0.0)
    assert scheduler.limit_blocks(3, now=1.0) == group
    assert {str(member.error) for member in group} == {
        "The request needs 4 KV blocks of 4 tokens and the whole pool has 3: ask for fewer tokens, "
        "or start the server with a larger --kv-cache."
    }
    step(scheduler, 1.0)
    assert fits[0].state is State.RUNNING and scheduler.snapshot().n_blocks == 3
    dynamic = begun(Dynamic(), Inference([0] * 4, 4), Inference([0] * 4, 4), steps=0, n_blocks=8)
    assert dynamic.limit_blocks(3, now=1.0) == [], "there each runs on its own"


def test_too_few_ids_fail_an_iteration() -> None:
    scheduler = begun(Dynamic(), Inference([0], 9), Inference([0], 9), steps=0)
    iteration, _ = scheduler.schedule(0.0)
    with pytest.raises(IndexError, match="too few ids"):
        scheduler.apply(iteration, [7], 1.0)


def test_a_cancelled_row_of_dynamic_is_free_before_the_next_iteration() -> None:
    first, second = Inference([0], 9), Inference([0], 1)
    scheduler = begun(Dynamic(), first, second, max_batch_size=1)
    assert scheduler.fail([first], Cancelled("gone"), now=1.0) == [first]
    assert first.state is State.CANCELLED and first.blocks == []
    assert step(scheduler, 1.0)[1] == [second]
    assert scheduler.fail([first, second], Cancelled("again"), now=2.0) == []
    assert second.state is State.FINISHED


def test_a_request_cancelled_during_an_iteration_loses_that_iterations_token() -> None:
    scheduler = begun(Dynamic(), inference := Inference([0], 9), steps=0)
    iteration, _ = scheduler.schedule(0.0)
    scheduler.fail([inference], Cancelled("gone"), now=0.5)
    assert iteration.rows[0].blocks, "the engine still needs the blocks it was given"
    assert scheduler.apply(iteration, [7], 1.0) == []
    assert inference.tokens == [] and not scheduler.has_work


def test_a_cancelled_row_of_a_static_batch_stays_idle_and_its_blocks_are_free_at_once() -> None:
    gone, stays = Inference([0], 3), Inference([0], 3)
    scheduler = begun(Static(), gone, stays)
    scheduler.fail([gone], Cancelled("gone"), now=1.0)
    assert scheduler.pool.n_blocks - scheduler.pool.free_blocks == len(stays.blocks) == 1
    iteration, _ = scheduler.schedule(1.0)
    rows = [(row.inference, row.idle, bool(row.blocks)) for row in iteration.rows]
    assert rows == [(gone, True, False), (stays, False, True)]
    scheduler.apply(iteration, [7, 7], 2.0)
    assert step(scheduler, 2.0)[1] == [stays]
    assert not scheduler.has_work


def test_a_prompt_cancelled_half_way_is_an_idle_row_and_gives_its_share_of_the_budget_up() -> None:
    gone, stays = Inference([0] * 30, 1), Inference([0] * 30, 1)
    scheduler = begun(Static(), gone, stays, token_budget=10)
    scheduler.fail([gone], Cancelled("gone"), now=1.0)
    iteration, _ = scheduler.schedule(1.0)
    assert [(row.n_tokens, row.idle) for row in iteration.rows] == [(1, True), (10, False)]


def test_new_prompt_tokens_of_a_row_are_those_of_the_prompt_that_were_not_computed_before() -> None:
    chunk = Row(Inference([0] * 30, 9), 20, 8, [], samples=False, idle=False)
    rows = [chunk, chunk._replace(recomputed=3), chunk._replace(start=25), chunk._replace(start=30)]
    assert [row.new_prompt_tokens for row in rows] == [8, 5, 5, 0]


def test_an_idle_row_computes_its_last_token_over_and_over_and_its_cache_does_not_grow() -> None:
    done, long = Inference([0, 0, 0], 2), Inference([0], 5)
    scheduler = begun(Static(), done, long, steps=2)
    for now in (2.0, 3.0):
        iteration, _ = scheduler.schedule(now)
        idle = iteration.rows[0]
        # positions 0 … 3 were computed: three of the prompt and the first completion token
        assert (idle.inference, idle.idle, idle.start, idle.n_tokens) == (done, True, 4, 1)
        assert done.computed == 4
        scheduler.apply(iteration, [7, 7], now + 1)
    assert len(done.tokens) == 2


@pytest.mark.parametrize("compact", [False, True])
def test_cancelling_the_last_live_row_of_a_batch_answers_held_ones(compact: bool) -> None:
    held, long = Inference([0], 1), Inference([0], 9)
    scheduler = begun(Static(compact), held, long)
    assert held.is_over and held.state is State.RUNNING
    assert scheduler.fail([long], Cancelled("gone"), now=1.0) == [long, held]
    assert (held.state, long.state) == (State.FINISHED, State.CANCELLED)
    assert not scheduler.has_work


def test_deadlines_end_waiting_and_running_requests_and_no_others() -> None:
    running, patient = Inference([0], 9, deadline=2.0), Inference([0], 1)
    waiting = Inference([0], 1, deadline=1.0)
    scheduler = begun(Dynamic(), running, waiting, patient, max_batch_size=1)
    assert scheduler.next_deadline() == 1.0
    assert scheduler.expire(1.0) == [waiting]
    assert scheduler.expire(1.5) == []
    assert scheduler.expire(2.0) == [running]
    assert running.state is waiting.state is State.EXPIRED
    assert step(scheduler, 2.0)[1] == [patient]


def test_a_policy_that_admits_what_does_not_fit_loses_nobody() -> None:
    class Greedy(Dynamic):
        def plan(self, view: View) -> Plan:
            return Plan(admit=[(inference, 2) for inference in view.waiting])

    inferences = [Inference([0], 1), Inference([0], 1)]
    scheduler = begun(Greedy(), *inferences, steps=0, n_blocks=1)
    impossible = "plan of .*Greedy.* is impossible: it needs 1 KV blocks more than are free"
    with pytest.raises(ValueError, match=impossible):
        scheduler.schedule(0.0)
    assert scheduler.in_flight() == inferences and not scheduler.running


def test_a_failed_inference_takes_its_row_along_even_in_a_static_batch() -> None:
    first, second = Inference([0] * 5, 2), Inference([0] * 5, 2)
    scheduler = begun(Static(), first, second, steps=0, token_budget=5)
    iteration, _ = scheduler.schedule(0.0)  # the budget covers the first alone
    computed = [row.inference for row in iteration.rows]
    failed = scheduler.fail(computed, GenerationFailed("broken"), now=1.0)
    assert failed == [first] and first.state is State.FAILED
    assert list(scheduler.running.values()) == [second]
    assert step(scheduler, 1.0)[1] == [] and step(scheduler, 2.0)[1] == [second]


def test_a_pool_gives_consecutive_blocks_while_it_can_and_scattered_ones_when_it_must() -> None:
    pool = BlockPool(14, 4)
    taken = [pool.allocate(n) for n in (3, 4, 3, 1, 3)]
    assert taken == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10], [11, 12, 13]]
    for blocks in taken[::2]:
        pool.free(blocks)
    assert pool.allocate(4) == [0, 1, 2, 7]
    assert pool.allocate(5) == [8, 9, 11, 12, 13]
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    for neighbours in ([3, 4], [5, 6]), ([5, 6], [3, 4]):  # freed one by one, they are one range
        for blocks in ([0, 1], *neighbours):
            pool.free(blocks)
        assert pool.allocate(4) == [3, 4, 5, 6]
        assert pool.allocate(2) == [0, 1]
    pool.free([2, 7, 8, 11])
    assert pool._ranges == [(2, 3), (7, 9), (11, 12)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_a_pool_gives_ascending_blocks_and_ends_as_one_range(steps: list[tuple[bool, int]]) -> None:
    pool, live = BlockPool(40, 4), list[list[int]]()
    for allocate, n in steps:
        if allocate and n <= pool.free_blocks:
            live.append(pool.allocate(n))
            assert live[-1] == sorted(live[-1])
        elif live:
            pool.free(live.pop(n % len(live)))
    for blocks in live:
        pool.free(blocks)
    assert pool._ranges == [(0, 40)]


def test_who_only_listens_is_answered_with_its_batch_and_a_stream_with_its_own_last_token() -> None:
    """A listener alone once made a request of a static batch end early, as if it were streamed."""
    heard: list[TokenEvent] = []
    listener, long = Inference([0], 1, listener=heard.append), Inference([0], 3)
    stream = Inference([0], 1, listener=heard.append, streamed=True)
    scheduler = begun(Static(), listener, stream, long, steps=0, max_batch_size=3)
    assert [step(scheduler)[1] for _ in range(3)] == [[stream], [], [listener, long]]


@pytest.mark.parametrize("policy", [Static(), Static(compact_batches=True), Windowed()])
def test_a_policy_that_splits_no_group_says_its_largest(policy: Policy) -> None:
    """A Static scheduler that was not told the limit besides let a larger group wait for ever."""
    scheduler = make_scheduler(policy, max_batch_size=4)
    message = "exceeded: 5 completions in one request, at most 4 in this mode"
    with pytest.raises(InvalidRequest, match=message):
        scheduler.enqueue([Inference([0], 1) for _ in range(5)], now=0.0)
    assert not scheduler.has_work
    group = [Inference([0], 1) for _ in range(4)]
    scheduler.enqueue(group, now=0.0)
    assert step(scheduler, now=5.0)[1] == group


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, ["PausedRows_planned"]),
    ({"order": Fair(), "shed": True}, [
        "History_planned", "PausedRows_planned", "Ledger_sampled", "History_sampled",
    ]),
], ids=["none", "fair, shed"])  # fmt: skip
def test_a_decode_step_calls_the_features_that_are_on_and_no_others(
    settings: dict[str, Any], expected: list[str]
) -> None:
    scheduler = begun(Dynamic(), Inference([0], 9), Inference([0], 9), **settings)
    calls = mock.Mock()
    for extension in scheduler.extensions:
        for hook in HOOKS:
            spy = mock.Mock(wraps=getattr(extension, hook))
            calls.attach_mock(spy, f"{type(extension).__name__}_{hook}")
            setattr(extension, hook, spy)
    step(scheduler, 1.0)
    assert [name for name, *_ in calls.mock_calls] == expected


def test_answered_requests_are_not_kept_until_their_deadlines() -> None:
    """One request with an early deadline, in flight, kept all that were answered behind it."""
    scheduler = make_scheduler(Dynamic())
    stays = Inference([0], 390, deadline=1e8)
    scheduler.enqueue([stays], now=0.0)
    for n in range(300):
        scheduler.enqueue([Inference([0], 1, deadline=1e9 + n)], now=0.0)
        scheduler.expire(0.0)
        step(scheduler, 0.0)
    assert len(scheduler._deadlines) < 100
    assert scheduler.next_deadline() == 1e8 and scheduler.expire(1e8) == [stays]
