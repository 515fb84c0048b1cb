"""Requests with limits of their own: what is due first, classes, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.admission import IDLE_USERS, UserLimits
from scheduling.errors import DeadlinePassed, InvalidRequest, Overloaded, RateLimited, ServingError
from scheduling.inference import Inference, Slo
from scheduling.policies import Dynamic, Edf, Fcfs, Order, Priority
from scheduling.policies.deadlines import due_at, read_slo_classes
from scheduling.scheduler import Scheduler
from tests.virtual import Ask, begun, make_scheduler, run, step

# One row, an iteration per second.
#
#     request   arrives   tokens   first token due    each later one due
#     A         0.0       4        never
#     B         0.5       3        2.5                2 s after the one before
#     C         1.5       1        5.5
#
#     t       0 1 2 3 4 5 6 7
#     fcfs    A A A A B B B C      B's first token comes at 5, C's at 8
#     edf     A B B C B A A A      at 3 B's next token is due at 6: C goes before it
EXAMPLE = [Ask(0.0, tokens=4), Ask(0.5, tokens=3, slo=Slo(2000, 2000)), Ask(1.5, slo=Slo(4000))]


def test_what_is_due_first_is_computed_and_a_row_that_is_ahead_is_paused() -> None:
    served = run(Dynamic(), EXAMPLE, order=Edf(), max_batch_size=1)
    assert " ".join(served.batches) == "A B B C B A A A"
    assert served.inferences[1].token_times == [2, 3, 5]


def test_a_late_row_goes_before_a_prompt_and_after_a_preemption_its_next_token_is_due() -> None:
    late, prompt = Inference([0], 9, slo=Slo(50, 10)), Inference([0], 9, slo=Slo(100))
    prompt.arrived_at = 3.0
    assert due_at(late) == 0.05 and due_at(prompt) == 3.1
    late.token_times = [2.0, 3.0]
    assert due_at(late) == 2.02 and Edf().turn(late) < Edf().turn(prompt)
    late.slo = Slo(50)
    assert due_at(late) == float("inf"), "its first token is there, and it states no other limit"


def test_classes_are_read_and_others_refused_with_the_form() -> None:
    classes = {"a": Slo(200, 50), "b": Slo(None, 0.5)}
    assert read_slo_classes("a=ttft:200,tpot:50 b=tpot:0.5") == classes
    assert read_slo_classes("none") == read_slo_classes("") == {}
    for wrong in ("a", "a=", "=ttft:1", "a=ttft", "a=ttft:0", "a=ttft:1,ttft:2", "a=e2el:1"):
        with pytest.raises(ValueError, match="is no class; write NAME=ttft:MS"):
            read_slo_classes(wrong)
    with pytest.raises(ValueError, match="class a is defined twice"):
        read_slo_classes("a=ttft:1 a=tpot:1")


def limits(classes: str, stated: Slo) -> tuple[float | None, float | None]:
    """Return the limits of a request once it is queued."""
    scheduler = make_scheduler(Dynamic(), slo_classes=classes)
    inference = Inference([0], 1, slo=stated)
    scheduler.enqueue([inference], 0.0)
    return inference.slo[:2]


def test_a_class_fills_in_what_a_request_does_not_state() -> None:
    classes = "chat=ttft:200,tpot:50 batch=ttft:9000"
    assert limits(classes, Slo(name="chat")) == (200, 50)
    assert limits(classes, Slo(None, 70, "chat")) == (200, 70)
    assert limits(classes, Slo()) == (None, None)
    assert limits("", Slo(5, None, "any")) == (5, None), "a label, where no classes are defined"
    for defined, ttft_ms, known in ((classes, 5, "chat, batch"), ("", None, "none")):
        with pytest.raises(InvalidRequest, match=f"no class 'cat' here; .*{known}") as refused:
            limits(defined, Slo(ttft_ms, None, "cat"))
        assert refused.value.param == "slo_class"


def ticking(order: Order = Fcfs(), **limits: Any) -> Scheduler:  # noqa: B008  (it is frozen)
    """A scheduler with --shed on which A, of 20 tokens, has run for five iterations of 1 s."""
    settings = {"order": order, "shed": True, "max_batch_size": 1} | limits
    return begun(Dynamic(), Inference([0], 20), steps=5, **settings)


@pytest.mark.parametrize(("order", "limits", "within_s", "beyond_s"), [
    (Fcfs(), {}, 26, 25),  # 15 tokens of A and 10 of B go before it
    (Fcfs(), {"max_batch_size": 2}, 11, 10),  # B has the second row
    (Fcfs(), {"max_batch_size": 3}, 2, 0.5),  # it joins at once
    (Fcfs(), {"max_batch_size": 3, "n_blocks": 9}, 11, 10),  # it waits for B's blocks
    (Edf(), {}, 2, 0.5),  # A and B have no limits and are paused for it
    (Edf(), {"n_blocks": 8}, 16, 15),  # A keeps its blocks
])  # fmt: skip
def test_a_request_that_cannot_meet_its_limit_is_refused_at_the_door(
    order: Order, limits: dict[str, Any], within_s: float, beyond_s: float
) -> None:
    """A has 15 tokens left, B waits with 10, and C arrives."""
    scheduler = ticking(order, **limits)
    scheduler.enqueue([Inference([0], 10)], 5.0)
    with pytest.raises(Overloaded, match=f"its limit of {1e3 * beyond_s:g} ms; try again later"):
        scheduler.enqueue([Inference([0], 9, slo=Slo(1e3 * beyond_s))], 5.0)
    scheduler.enqueue([Inference([0], 9, slo=Slo(1e3 * within_s))], 5.0)
    scheduler.enqueue([Inference([0], 9)], 5.0)  # without a limit


def test_the_estimate_counts_the_prompts_that_come_first() -> None:
    unknown = begun(Dynamic(), Inference([0], 99), steps=0, shed=True, max_batch_size=1)
    unknown.enqueue([Inference([0], 99, slo=Slo(1))], 0.0)  # before an iteration was seen
    scheduler = ticking(max_batch_size=3)
    scheduler.enqueue([Inference([0] * 10, 1)], 5.0)
    step(scheduler, 8.0)  # after 4 s, and without the prompt after one: 0.3 s for a token of it
    with pytest.raises(Overloaded, match="its limit of 6900 ms"):
        scheduler.enqueue([Inference([0] * 20, 9, slo=Slo(6900))], 8.0)
    scheduler.enqueue([Inference([0] * 20, 9, slo=Slo(7100))], 8.0)


def test_who_still_waits_when_its_first_token_is_due_is_ended() -> None:
    """The estimate let it in, and then requests that are due earlier went before it."""
    scheduler = ticking(Edf(), n_blocks=100)
    waits, runs = (Inference([0], 3, slo=Slo(4000)) for _ in range(2))
    scheduler.enqueue([runs], 5.0)
    step(scheduler, 5.0)
    scheduler.enqueue([waits], 6.0)
    assert scheduler.next_deadline() == 10.0 and scheduler.expire(9.9) == []
    assert scheduler.expire(10.0) == [waits]
    assert isinstance(waits.error, DeadlinePassed)
    assert runs.error is None and runs.tokens


# ---- requests and tokens that a user may ask for in a minute: a window of 60 s that slides


class Gate:
    """Asks for admission only."""

    def __init__(self, requests: int | None = None, tokens: int | None = None):
        self.limits = UserLimits(requests, tokens)

    def refusal(self, now: float, tokens: int = 2, user: str | None = None) -> ServingError | None:
        """Why a request of so many tokens, one of them a prompt's, is not let in; None: it is."""
        try:
            self.limits.check(Ask(now, tokens=tokens - 1, user=user).group(4), now)
        except ServingError as error:
            return error
        return None

    def lets_in(self, now: float, tokens: int = 2, user: str | None = None) -> bool:
        return self.refusal(now, tokens, user) is None


def retry_after_s(error: ServingError | None) -> int:
    assert isinstance(error, RateLimited)
    assert error.code == "rate_limit_exceeded"
    return math.ceil(error.retry_after_s)


def test_tokens_are_those_of_prompts_and_answers_and_several_prompts_are_one_request() -> None:
    asks = [Ask(0.0, prompt=4, tokens=3, rows=2, n=2), Ask(0.0, prompt=4, tokens=6)]
    for limits, refusal in (
        (UserLimits(None, 30), "of any number and 30"),  # 2 · 4 + 4 · 3 = 20, and 10
        (UserLimits(2, None), "of 2 and any number"),
    ):
        for ask in asks:
            limits.check(ask.group(4), 0.0)
        with pytest.raises(RateLimited, match=f"2 requests and 30 tokens .* {refusal}"):
            limits.check(Ask(0.0).group(4), 0.0)


@given(
    requests=st.none() | st.integers(1, 4), tokens=st.none() | st.integers(10, 30),
    asks=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 10)), max_size=25),
)  # fmt: skip
def test_whoever_comes_back_when_told_is_let_in_and_an_eighth_of_a_second_before_is_not(
    requests: int | None, tokens: int | None, asks: list[tuple[int, int]]
) -> None:
    """Against a window that remembers everything. Times are eighths of a second."""
    gate, now = Gate(requests, tokens), 0.0
    came: list[tuple[float, int]] = []

    def has_room(at: float, asked: int) -> bool:
        last = [its for then, its in came if then + 60 > at]
        return (requests is None or len(last) < requests) and (
            tokens is None or sum(last) + asked <= tokens
        )

    for later, asked in asks:
        now += later / 8
        if not has_room(now, asked):
            first = min(then + 60 for then, _ in came if has_room(then + 60, asked))
            told = retry_after_s(gate.refusal(now, asked))
            assert told == math.ceil(first - now)
            before = max(now, first - 1 / 8)
            assert not gate.lets_in(before, asked), "refused ones count for nothing"
            now = first
        assert gate.lets_in(now, asked)
        came.append((now, asked))


def test_other_users_are_unharmed_and_whoever_names_none_is_one_user() -> None:
    gate = Gate(requests=1)
    for user in ("ann", "bob", None):
        assert gate.lets_in(0.0, user=user)
        assert not gate.lets_in(1.0, user=user)
    assert "This user has asked" in str(gate.refusal(1.0, user="ann"))
    assert "The user without a name has asked" in str(gate.refusal(1.0))
    assert gate.lets_in(1.0, user="eve")


def test_a_request_of_exactly_a_minutes_tokens_is_let_in_and_a_larger_one_is_a_400() -> None:
    gate = Gate(tokens=10)
    for n in (10, 11):
        error = gate.refusal(0.0, tokens=11)
        assert isinstance(error, InvalidRequest), "no wait would help"
        assert "asks for 11 tokens, and a user may ask for 10 a minute; ask for fewer" in str(error)
        assert gate.lets_in(0.0, tokens=n) == (n == 10)


def test_what_another_refusal_turns_away_counts_for_nothing() -> None:
    """Too large for the pool, the server full, a level's queue full, no such level."""
    order = Priority(queue_policy="1:max_size=1")
    limits = {"n_blocks": 2, "max_in_flight": 3, "user_limits": UserLimits(2, None)}
    scheduler = make_scheduler(Dynamic(), order=order, **limits)
    scheduler.enqueue(Ask(0.0, user="bob", priority=1).group(4), 0.0)
    ask = Ask(0.0, user="ann")
    wrongs: list[dict[str, Any]] = [{"prompt": 9}, {"rows": 3}, {"priority": 1}, {"priority": 4}]
    for wrong in wrongs:
        with pytest.raises((InvalidRequest, Overloaded)) as caught:
            scheduler.enqueue(replace(ask, **wrong).group(4), 0.0)
        assert not isinstance(caught.value, RateLimited)
    for _ in range(2):
        scheduler.enqueue(ask.group(4), 0.0)
    assert len(scheduler.waiting) == 3


def test_the_windows_of_idle_users_are_dropped_and_those_of_others_are_not() -> None:
    gate = Gate(requests=1)
    for i in range(IDLE_USERS):
        assert gate.lets_in(0.0, user=f"idle {i}")
    assert gate.lets_in(59.0, user="ann")
    assert len(gate.limits._windows) == IDLE_USERS + 1, "none of them was idle for a minute"
    most = IDLE_USERS + 1
    for i in range(10 * IDLE_USERS):
        assert gate.lets_in(60.0 + 60.0 * i, user=f"visitor {i}")
        most = max(most, len(gate.limits._windows))
    assert most <= 2 * (IDLE_USERS + 1) + 1
    assert len(gate.limits._windows) <= IDLE_USERS


def test_what_shedding_refuses_does_not_count_against_its_user() -> None:
    limited = {"shed": True, "user_limits": UserLimits(3, None), "max_batch_size": 1}
    scheduler = make_scheduler(Dynamic(), **limited)
    scheduler.enqueue([Inference([1], 60, user="busy")], 0.0)
    for now in range(4):
        step(scheduler, float(now))
    for _ in range(5):
        with pytest.raises(Overloaded) as refused:
            scheduler.enqueue([Inference([1], 3, user="u", slo=Slo(ttft_ms=5.0))], 4.0)
        assert not isinstance(refused.value, RateLimited)
    for _ in range(3):
        scheduler.enqueue([Inference([1], 3, user="u")], 4.1)
    with pytest.raises(RateLimited):
        scheduler.enqueue([Inference([1], 3, user="u")], 4.1)
