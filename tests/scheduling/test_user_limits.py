"""How many requests and tokens a user may ask for in a minute: a window of 60 s that slides, in
virtual time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.admission import IDLE_USERS, UserLimits
from scheduling.errors import InvalidRequest, Overloaded, RateLimited, ServingError
from scheduling.policies import Dynamic, Priority
from tests.virtual import Ask, make_scheduler


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
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    return int(error.headers["Retry-After"])


# ---- the window


def test_tokens_are_those_of_the_prompts_and_all_that_may_be_generated() -> None:
    limits = UserLimits(None, 30)
    limits.check(Ask(0.0, prompt=4, tokens=3, rows=2, n=2).group(4), 0.0)  # 2 · 4 + 4 · 3 = 20
    limits.check(Ask(0.0, prompt=4, tokens=6).group(4), 0.0)
    with pytest.raises(RateLimited, match=r"2 requests and 30 tokens .* of any number and 30"):
        limits.check(Ask(0.0, prompt=1, tokens=1).group(4), 0.0)


def test_a_request_of_several_prompts_is_one_request() -> None:
    limits = UserLimits(2, None)
    for _ in range(2):
        limits.check(Ask(0.0, rows=9, n=9).group(4), 0.0)
    with pytest.raises(RateLimited, match=r"2 requests and .* of 2 and any number"):
        limits.check(Ask(0.0).group(4), 0.0)


@given(
    requests=st.none() | st.integers(1, 4),
    tokens=st.none() | st.integers(10, 30),
    asks=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 10)), max_size=25),
)
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


# ---- whose window


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
    error = gate.refusal(0.0, tokens=11)
    assert isinstance(error, InvalidRequest) and error.status == 400
    assert str(error) == (
        "The request asks for 11 tokens, and a user may ask for 10 a minute; ask for fewer."
    )
    assert gate.lets_in(0.0, tokens=10)
    assert isinstance(gate.refusal(0.0, tokens=11), InvalidRequest), "no wait would help"


def test_what_another_refusal_turns_away_counts_for_nothing() -> None:
    """One is too large for the pool, one finds the server full, one its level's queue, one has no
    level: after all of them both requests of the minute are left.
    """
    order = Priority(queue_policy="1:max_size=1")
    scheduler = make_scheduler(
        Dynamic(), order=order, n_blocks=2, max_in_flight=3, user_limits=UserLimits(2, None)
    )
    scheduler.enqueue(Ask(0.0, user="bob", priority=1).group(4), 0.0)
    ask = Ask(0.0, user="ann")
    for refused in (
        replace(ask, prompt=9), replace(ask, rows=3), replace(ask, priority=1),
        replace(ask, priority=4),
    ):  # fmt: skip
        with pytest.raises((InvalidRequest, Overloaded)) as caught:
            scheduler.enqueue(refused.group(4), 0.0)
        assert not isinstance(caught.value, RateLimited)
    for _ in range(2):
        scheduler.enqueue(Ask(0.0, user="ann").group(4), 0.0)
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
