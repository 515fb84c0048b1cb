"""Autoscaling: Ray Serve's rule, by cases computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.autoscaling import CONTROL_INTERVAL_S, Autoscaler, Autoscaling, read_autoscaling

SETTINGS = Autoscaling(max_replicas=10)
HASTY = replace(SETTINGS, upscale_delay_s=0, downscale_delay_s=0)


def decide(
    autoscaler: Autoscaler, end: float, load: Callable[[float], dict[int, int]], start: float = 0
) -> list[tuple[float, int]]:
    """Return when the target changed before `end`, and to what. load: requests of those up."""
    changes = []
    for tick in range(round(start / CONTROL_INTERVAL_S), round(end / CONTROL_INTERVAL_S)):
        now, before = tick * CONTROL_INTERVAL_S, autoscaler.target
        if autoscaler.decide(now, load(now)) != before:
            changes.append((round(now, 1), autoscaler.target))
    return changes


def always(*requests: int) -> Callable[[float], dict[int, int]]:
    return lambda now: dict(enumerate(requests))


def shared(autoscaler: Autoscaler, requests: int) -> Callable[[float], dict[int, int]]:
    """So many requests, on as many replicas as are wanted."""

    def load(now: float) -> dict[int, int]:
        n = autoscaler.target
        return {id: requests // n + (id < requests % n) for id in range(n)}

    return load


def test_requests_are_averaged_over_what_was_reported_and_on_to_now() -> None:
    """Samples each 6 s, reports at 0, 10, 20, …: of 4 requests up to 6 s, 10 up to 12 s, then 0.

    t     reported                mean
    9.9   4 from 0                4
    10    4 from 0, 10 from 6     (6 · 4 + 4 · 10) / 10 = 6.4
    16    the same                (6 · 4 + 10 · 10) / 16 = 7.75, though there are none by now
    20    and 0 from 12           (6 · 4 + 6 · 10 + 8 · 0) / 20 = 4.2
    36    those after 0           (6 · 10 + 24 · 0) / 30 = 2
    40    those of 12 and later   0
    """
    autoscaler, means = Autoscaler(SETTINGS), {}
    for tick in range(401):
        now = tick / 10
        up = {0: 4 if now < 6 else 10 if now < 12 else 0}
        autoscaler.decide(now, up)
        means[now] = autoscaler.mean_ongoing(now, up)
    at_times = {at: means[at] for at in (9.9, 10, 16, 20, 36, 40)}
    assert at_times == pytest.approx({9.9: 4, 10: 6.4, 16: 7.75, 20: 4.2, 36: 2, 40: 0})


def test_replicas_that_are_up_are_summed_from_the_instant_when_all_were_seen() -> None:
    """0 has 3 requests, 1 comes at 7 s with 5: at 10 s it is reported with its requests of then."""
    autoscaler = Autoscaler(SETTINGS)

    def load(now: float) -> dict[int, int]:
        return {0: 3} | ({1: 5} if now >= 7 else {})

    decide(autoscaler, 9.95, load)
    assert autoscaler.mean_ongoing(9.9, load(9.9)) == 3, "not reported yet"
    decide(autoscaler, 20.05, load, 10)
    means = [autoscaler.mean_ongoing(20, up) for up in ({0, 1}, {1}, {2})]
    assert means == [8, 5, 0], "both; the first one is gone; a new one has none as far as is known"


@pytest.mark.parametrize(("settings", "replicas", "load", "changes"), [
    ({}, 1, (8,), [(30.0, 4)]),  # 8 requests and a target of 2 each are 4 replicas
    ({"upscale_delay_s": 12.3}, 1, (8,), [(12.3, 4)]),
    ({"upscale_delay_s": 0}, 1, (8,), [(0.0, 4)]),
    ({}, 4, (2, 2, 2, 2), []),  # enough
    ({}, 4, (1, 1, 1, 1), [(600.0, 2)]),
    ({}, 4, (0, 0, 0, 0), [(600.0, 1)]),  # never to 0
    ({}, 3, (), []),  # none is up
])  # fmt: skip
def test_replicas_come_and_go_when_they_have_been_wanted_for_the_delay(
    settings: dict[str, Any], replicas: int, load: tuple[int, ...], changes: list[Any]
) -> None:
    autoscaler = Autoscaler(replace(SETTINGS, **settings), replicas)
    assert decide(autoscaler, 700, always(*load)) == changes


def test_a_delay_begins_again_when_something_else_is_wanted_in_between() -> None:
    """A report of each second over one second, so that what is wanted follows the load."""
    quick = replace(SETTINGS, metrics_interval_s=1, look_back_period_s=1)

    def load(now: float) -> dict[int, int]:
        return {0: 8} if not 20 <= now < 23 else {0: 2}

    [(at, target)] = decide(Autoscaler(quick), 60, load)
    assert target == 4 and 53 <= at <= 54, "30 s from 23 s on, which the next report shows"


def test_each_step_waits_for_the_delay_again() -> None:
    """16 requests, at 2 each, half of what is missing a step: 1 + 7 / 2, 5 + 3 / 2, 7 + 1 / 2."""
    autoscaler = Autoscaler(replace(SETTINGS, upscaling_factor=0.5))
    changes = decide(autoscaler, 200, shared(autoscaler, 16))
    assert [target for _, target in changes] == [5, 7, 8]
    assert [at for at, _ in changes] == pytest.approx([30, 60, 90], abs=0.3)


def test_what_is_wanted_goes_by_those_that_are_up_while_others_start() -> None:
    """8 requests ask for 4 replicas; those are 25 s in starting, and not asked for again."""
    autoscaler = Autoscaler(replace(SETTINGS, upscale_delay_s=5))
    assert decide(autoscaler, 30, always(8)) == [(5.0, 4)]
    assert decide(autoscaler, 60, always(2, 2, 2, 2), 30) == []


@pytest.mark.parametrize(("factors", "requests", "target"), [
    ({"upscaling_factor": 0.5}, (6, 6), 4),  # 2 + 0.5 · (6 − 2)
    ({"upscaling_factor": 2.0}, (4, 4), 6),  # 2 + 2 · (4 − 2)
    ({"upscaling_factor": 0.1}, (6, 6), 3),  # 2 + 0.1 · (6 − 2) = 2.4
    ({"downscaling_factor": 0.5}, (1, 1, 1, 1), 3),  # 4 − 0.5 · (4 − 2)
    ({"downscaling_factor": 0.1}, (1, 1, 1, 1), 3),  # 3.8 would be 4 for ever
    ({"downscaling_factor": 0.1}, (2, 2, 2, 1), 4),  # 3.5 are 4
    ({"min_replicas": 3}, (0, 0, 0, 0), 3),
    ({"max_replicas": 5}, (9, 9, 9, 9), 5),
    ({"target_ongoing_requests": 0.5}, (1, 1), 4),
])  # fmt: skip
def test_factors_bounds(factors: dict[str, Any], requests: tuple[int, ...], target: int) -> None:
    autoscaler = Autoscaler(replace(HASTY, **factors), len(requests))
    assert autoscaler.decide(0, dict(enumerate(requests))) == target


TARGETS, DELAYS_S = st.sampled_from([1.0, 2.0, 3.0, 7.5]), st.sampled_from([0.0, 1.0])


@given(n=st.integers(0, 60), start=st.integers(1, 10), target=TARGETS, delay_s=DELAYS_S)
def test_constant_load_is_served(n: int, start: int, target: float, delay_s: float) -> None:
    delays: dict[str, Any] = {"upscale_delay_s": delay_s, "downscale_delay_s": delay_s}
    rule = replace(SETTINGS, metrics_interval_s=1, look_back_period_s=2, **delays)
    autoscaler = Autoscaler(replace(rule, target_ongoing_requests=target), start)
    decide(autoscaler, 15, shared(autoscaler, n))
    needed = min(10, max(1, math.ceil(n / target)))
    assert needed <= autoscaler.target <= needed + 1, "one more where a ratio is rounded up"
    assert decide(autoscaler, 25, shared(autoscaler, n), 15) == []


def test_tokens_can_be_what_counts() -> None:
    """6,000 tokens to compute, 1,500 each, are 4 replicas, however few requests they are."""
    by_tokens = replace(HASTY, target_tokens=1500)
    assert decide(Autoscaler(by_tokens), 60, always(6000)) == [(0.0, 4)]
    assert read_autoscaling(["max_replicas=8", "target_tokens=1500"]).target == 1500
