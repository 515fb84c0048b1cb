"""Measures of one run, against textbook numbers and closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client.analysis import (
    ENOUGH,
    always_waiting,
    batch_sizes,
    expected_useful_fraction,
    growth,
    growth_in_flight,
    occupancy_over_time,
    overload,
    overload_unknown,
    overloaded,
    slowest_row_s,
)
from client.measure import judged
from client.outcomes import Outcome, Outcomes
from client.results import Result
from client.summary import latency_line, summarise
from client.traces import Request
from client.workloads import Workload
from compare.report.tables import label
from scheduling.latency import Times
from stats import DEFINITIONS, MEASURES, TIMINGS, distribution, times_from
from tests.compare.test_sweep import CALM, calm
from tests.counts import nightly_but
from tests.virtual import simulated

ASK = Request(id=0, at=0.0, prompt="a", num_tokens=1)


def columns(outcomes: Sequence[Outcome]) -> Outcomes:
    result = Outcomes(len(outcomes))
    for i, outcome in enumerate(outcomes):
        result.add(i, outcome)
    return result


def answers(at: np.ndarray, waits: np.ndarray, late: float = 0.0) -> Outcomes:
    """Answers of a token, sent later than scheduled by a share of the time."""
    asked = zip(at.tolist(), (at * (1 + late)).tolist(), waits.tolist())
    return columns([Outcome(ASK, t, s, s + w, s + w, s + w, 1, 1) for t, s, w in asked])


def test_growth_is_the_excess_of_the_rate_and_not_the_clients_lateness() -> None:
    at = np.arange(0, 20, 0.1)
    assert growth(answers(at, 0.5 * at)) == pytest.approx(0.5)  # half again what the server can do
    late = answers(at, np.full_like(at, 0.1), late=1.0)
    assert growth(late) < 1e-9, "sent later and later, and answered at once"
    assert growth(columns([])) == growth(answers(np.zeros(9), np.arange(9.0))) == 0.0
    assert growth(answers(np.arange(9.0), 9 - np.arange(9.0))) == 0.0, "a queue that shrinks"


@pytest.mark.parametrize(("seeds", "said"), [
    ([{"growth": 0.0}, {"growth": 0.42}], "its queue grew by 0.21 s per second"),
    ([{"growth_in_flight": 0.4}, {}], "20% of what was sent stayed in flight"),
    ([{"growth": 0.01}, {"growth": 0.08}], None),
    ([{"growth_in_flight": 0.4, "completed": 99}], None),  # its rows may fill still
    ([{"growth": 0.4, "p50_schedule_lag_ms": 11.0}], None),  # the client was late
])  # fmt: skip
def test_an_overload_is_that_of_the_means_over_seeds(
    seeds: list[dict[str, float]], said: str | None
) -> None:
    words = overload([calm(**changed) for changed in seeds])
    assert words == (said and f"overloaded: {said}; its latencies are those of a run of 6.2 s")


RATED = CALM | {  # for five seconds
    "requested_rate": 20.0, "achieved_rate": 20.0, "p99_ttft_ms": 20.0, "p99_e2el_ms": 200.0,
}  # fmt: skip
NEAR = {"p99_ttft_ms": 700.0, "growth": 0.0}  # near its capacity


@pytest.mark.parametrize(("seeds", "verdict"), [
    ([NEAR], None),  # and it was "not overloaded" in a third of such runs at 1.1 of the capacity
    ([NEAR | {"growth": 0.15}], None),  # and "overloaded" in one of six at 0.9
    ([NEAR | {"growth": 0.3}], True),
    ([NEAR | {"growth": 4.0, "completed": 20}], True),  # five times what it can do
    ([NEAR | {"completed": ENOUGH, "growth": 0.06}], True),
    ([NEAR | {"completed": ENOUGH, "growth": 0.04}], False),
    ([NEAR | {"growth": 0.01}] * 5, False),  # seeds agree
    ([NEAR | {"growth": 0.04}] * 5, None),
    ([NEAR | {"growth": 0.06}] * 30, True),
    ([{}], False),  # hardly a request waits
    ([{"p99_ttft_ms": 200.0, "p99_e2el_ms": 400.0}], False),  # all are short, as in batches
    ([{"p99_ttft_ms": 200.0, "p99_e2el_ms": 900.0}], None),
    ([NEAR | {"requested_rate": None}], False),  # at no rate
    ([NEAR | {"completed": 0, "failed": 100, "p99_ttft_ms": None}], False),  # that is said apart
])  # fmt: skip
def test_few_answers_near_the_capacity_do_not_say_whether_a_server_overloads(
    seeds: list[dict[str, float]], verdict: bool | None
) -> None:
    results = [Result.of(RATED | changed) for changed in seeds]
    assert overloaded(*results) is verdict
    assert bool(overload(results)) == bool(verdict)
    words = overload_unknown({"a": results, "calm": [Result.of(RATED)]})
    assert bool(words) == (verdict is None)
    assert label("a", results) == ("a (overloaded)" if verdict else "a")
    if words:
        assert words.startswith("It cannot be known from so few answers whether a overloaded: ")
        assert "that takes 3,000" in words


@pytest.mark.parametrize(("load", "wrong", "said"), [
    (0.3, True, {False}), (0.9, True, {False, None}),
    (1.1, False, {True, None}), (5.0, False, {True}),
])  # fmt: skip
@pytest.mark.parametrize(
    ("mode", "capacity"), nightly_but([("static", 51.5)], [("nobatch", 8.6), ("static", 51.5)])
)
def test_a_hundred_requests_are_hardly_ever_judged_wrongly(
    mode: str, capacity: float, load: float, wrong: bool, said: set[bool | None]
) -> None:
    """In virtual time. By the limit for any number three of these at 1.1 were "not overloaded"."""
    traces = (Workload(seed=k).requests(100, f"poisson:{load * capacity}") for k in range(6))
    results = [judged(each, simulated(mode).replay(each), {}) for each in traces]
    verdicts = [overloaded(result) for result in results]
    assert verdicts.count(wrong) <= 1 and overloaded(*results) in said
    if len(said) == 1:  # far from the capacity a few requests do say it
        assert {*verdicts} == said


@pytest.mark.parametrize("users", [None, 9])
def test_a_burst_and_a_closed_loop_overload_no_server(users: int | None) -> None:
    """Of bursts that a client sent in 10 ms, a vLLM's queue grew by 30 s per second."""
    trace = [Request(id=i, at=0.0, users=users, prompt="a", num_tokens=1) for i in range(99)]
    outcomes = [
        replace(answer, request=request, scheduled_at=0.0)
        for request, answer in zip(trace, answers(1e-3 * np.arange(99), 0.1 * np.arange(99)))
    ]
    result = judged(trace, outcomes, {})
    assert result.growth == result.growth_in_flight == 0.0


def test_the_useful_fraction_of_request_level_batches() -> None:
    assert expected_useful_fraction([7, 7, 7], [3, 5]) == 1.0
    # the longest of two: 1, 3, 3 or 3
    assert expected_useful_fraction([1, 3], [2]) == pytest.approx(2 / 2.5)
    assert expected_useful_fraction([1, 1, 1, 3], [2]) == pytest.approx(1.5 / (9 / 16 + 3 * 7 / 16))
    assert expected_useful_fraction([1, 3], [2, 1, 1]) == pytest.approx(8 / (2 * 2.5 + 2 + 2))
    assert expected_useful_fraction([1, 3], []) is None
    # the longest first: batches of equals are no draws
    assert expected_useful_fraction([9, 5, 5, 1], [3]) is None


def test_batches_are_the_requests_admitted_together() -> None:
    def admitted(instant: float, waited: float) -> Outcome:
        timings = {"arrived_at": instant - waited, "queue_s": waited}
        return Outcome(ASK, 0, 0, 1, 1, 1, 1, 1, timings=timings)

    instants = [(5.0, 1.0), (1.7e9, 0.3), (5.0, 4.0), (1.7e9 + 0.002, 0.1)]
    assert batch_sizes(columns([admitted(*each) for each in instants])) == [2, 1, 1]
    assert batch_sizes(columns([])) == []


def test_the_latency_line_is_the_least_squares_line() -> None:
    line = latency_line([1, 2, 3], [1.5, 2.5, 3.5])
    assert line == pytest.approx({"intercept_s": 0.5, "slope_s_per_token": 1.0, "r": 1.0})
    assert latency_line([5, 5], [1.0, 2.0]) is None
    flat = latency_line([1, 2], [3.0, 3.0])
    assert flat == pytest.approx({"intercept_s": 3.0, "slope_s_per_token": 0.0, "r": 0.0})


def answer(scheduled: float, sent: float, answered: float, tokens: int) -> Outcome:
    e2e = answered - sent - 0.1  # a tenth of a second was spent outside the server
    first = answered - (e2e - 0.5)
    timings = {"queue_s": 0.0, "ttft_s": 0.5, "decode_s": 1.0, "held_s": e2e - 1.5, "e2e_s": e2e}
    times = scheduled, sent, answered, first, first + 1.0
    return Outcome(ASK, *times, 4, tokens, [0.5, 0.5], timings)


def test_a_run_is_summarised_from_the_clients_side() -> None:
    answers = columns([answer(0.0, 0.0, 2.0, 3), answer(1.0, 1.5, 5.0, 3)])
    sends = [(0.0, 0.0, 2.0), (1.0, 1.5, 5.0), (2.0, 2.0, 4.0)]
    result = summarise(answers, sends, goodput={"e2el": 2500.0})
    expected = {
        "completed": 2, "failed": 1, "wall_clock_s": 5, "client_limited": True,
        "request_throughput": 2 / 5, "output_throughput": 6 / 5, "total_token_throughput": 14 / 5,
        # the second took 3.5 s, the third failed
        "goodput": 1 / 5, "attainment": 1 / 3,
        "mean_e2el_ms": 2750, "mean_e2el_from_schedule_ms": 3000,
        # 0.5 s to the first token at the server, and 0.1 s on the way
        "mean_ttft_ms": 600, "max_ttft_from_schedule_ms": 1100,
        "mean_tpot_ms": 500, "mean_itl_ms": 500, "mean_queue_time_ms": 0, "max_held_time_ms": 1900,
        "mean_normalized_latency_ms": (2 / 3 + 3.5 / 3) / 2 * 1e3, "max_schedule_lag_ms": 500,
    }  # fmt: skip
    assert result.json(expected) == pytest.approx(expected, rel=1e-6)
    with_tpot = summarise(answers, sends, goodput={"tpot": 499.0})
    assert with_tpot.goodput == 0


def test_a_run_in_which_everything_failed_has_no_latencies_and_no_nan() -> None:
    result = summarise(columns([]), [(0.0, 0.0, 3.0), (1.0, 1.0, 1.5)], goodput={})
    assert (result.completed, result.failed, result.output_throughput) == (0, 2, 0.0)
    assert (result.e2el.mean, result.latency_line, result.goodput) == (None, None, None)
    assert summarise(columns([]), [(0.0, 0.0, 0.5)], goodput={"e2el": 1.0}).goodput == 0.0, (
        "and known"
    )


def test_a_server_that_dies_early_is_rated_over_the_whole_run() -> None:
    """Of 97 answers in 5 s it once had 19.4 a second: the time of later failures did not count."""
    instants = [(i / 20, i / 20, i / 20 + 0.15) for i in range(1200)]
    answers = columns([answer(*instants[i], 1) for i in range(97)])
    result = summarise(answers, instants, goodput={"e2el": 1000.0})
    assert (result.completed, result.failed) == (97, 1103)
    assert result.wall_clock_s == pytest.approx(60.1)
    assert result.goodput == result.request_throughput == pytest.approx(97 / 60.1)


def test_occupancy_over_time_spreads_iterations_over_bins_and_keeps_the_area() -> None:
    # two seconds idle before the last
    iterations = [(0.0, 2.0, 4, 0, 0), (2.0, 1.0, 2, 2, 0), (5.0, 1.0, 6, 0, 2)]
    binned = occupancy_over_time(iterations, bins=6)
    assert (binned["bin_s"], binned["live"]) == (1.0, [4, 4, 2, 0, 0, 6])
    assert (binned["idle"], binned["padding"]) == ([0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 2])
    coarse = occupancy_over_time(iterations, bins=4)
    assert sum(coarse["live"]) * coarse["bin_s"] == pytest.approx(16, abs=1e-3)
    assert occupancy_over_time([])["live"] == occupancy_over_time([])["padding"] == []


def test_measures_of_a_request_follow_from_its_stamps_one_by_one_or_in_columns() -> None:
    made = [2.0, 2.25, 3.0]
    one = Times(1.0, 1.5, made[0], made[-1], 4.0, 3, made, 0.25, 0.125)
    expected = {
        "queue_s": 0.5, "ttft_s": 1, "prefill_s": 0.5, "decode_s": 1, "tpot_s": 0.5, "held_s": 1,
        "e2e_s": 3, "normalized_s": 1, "preempted_s": 0.25, "paused_s": 0.125,
    }  # fmt: skip
    singles = [measure for measure in MEASURES.values() if not measure.pooled]
    assert {measure.field: measure.of(one) for measure in singles} == expected
    assert MEASURES["itl"].of(one).tolist() == [0.25, 0.75]
    start, admitted, first, last, end, n = np.array([(1.0, 1.5, 2.0, 3.0, 4.0, 3), [1.0] * 6]).T
    of_many = Times(start, admitted, first, last, end, n)
    tpot_s = MEASURES["tpot"].of(of_many)
    assert tpot_s[0] == 0.5 and math.isnan(tpot_s[1]), "no gap in one token"
    assert MEASURES["e2el"].of(of_many).tolist() == [3, 0]
    timings = {measure.field: measure.of(one) for measure in TIMINGS}
    for again in (times_from(timings, 1.0), times_from(timings).ending_at(4.0)):
        assert (again.started_at, again.admitted_at) == (1.0, 1.5)
        assert (again.first_token_at, again.last_token_at, again.answered_at) == (2.0, 3.0, 4.0)
    assert all(measure.key in DEFINITIONS for measure in TIMINGS)


def test_a_distribution_is_described_in_milliseconds() -> None:
    described = distribution("ttft", [0.1, 0.2, 0.3, math.nan, 0.4])
    found = [described[f"{each}_ttft_ms"] for each in ("mean", "p50", "p90", "min", "max")]
    assert found == pytest.approx([250, 250, 370, 100, 400]), "linear between 300 and 400"
    assert set(distribution("ttft", []).values()) == {None}


def queued(arrived: float, admitted: float, tokens: int, each_s: float) -> Outcome:
    """A request that gets a token every `each_s` after it was admitted."""
    times = [admitted + each_s * (i + 1) for i in range(tokens)]
    timings: dict[str, Any] = {"arrived_at": arrived, "queue_s": admitted - arrived}
    timings |= {"ttft_s": times[0] - arrived, "itl_s": [each_s] * (tokens - 1)}
    stamps = arrived, arrived, times[-1], times[0], times[-1]
    return Outcome(ASK, *stamps, 1, tokens, timings=timings)


def test_tokens_count_while_requests_always_wait() -> None:
    """One at a time, 4 tokens of 1 s each: they come at 0, 1, 2, 3; the last is admitted at 12."""
    queue = [queued(i, 4.0 * i, 4, 1.0) for i in range(4)]
    assert always_waiting(columns(queue)) == (8, 8.0), "from the second admission to the last"
    later = [*queue, queued(30.0, 30.0, 4, 1.0)]
    assert always_waiting(columns(later)) == (8, 8.0), (
        "what came to an idle server waited for nothing"
    )
    assert always_waiting(columns(queue[:1])) == always_waiting(columns([])) == (0, 0.0)


def test_another_server_is_seen_from_its_first_tokens() -> None:
    queue = [replace(queued(0.1 * i, 4.0 * i, 4, 1.0), timings=None) for i in range(6)]
    tokens, seconds = always_waiting(columns(queue))
    assert tokens / seconds == pytest.approx(1.0) and seconds >= 12
    unseen = [replace(queue[-1], first_token_at=math.nan, last_token_at=math.nan)]
    assert always_waiting(columns(queue[:-1] + unseen)) == (0, 0.0), "it may wait, or not"
    assert slowest_row_s(columns(unseen)) == unseen[0].e2e_s
    assert growth(columns(queue + unseen)) == growth(columns(queue)) > 0


def test_what_stays_in_flight_grows_although_nothing_waits() -> None:
    """More rows than requests: first tokens come at once, and each row slows the others."""
    sent = np.arange(0, 20, 0.1)
    ended = 10 * np.cumsum(np.full(200, 0.1)) / 7  # seven per second
    times = zip(sent.tolist(), ended.tolist())
    answers = [Outcome(ASK, s, s, e, s + 0.01, e, 1, 9) for s, e in times]
    assert growth(columns(answers)) < 0.01
    assert growth_in_flight(sent, ended, 1.0) == pytest.approx(0.3, abs=0.03)
    steady = sent + 4  # it fills for four seconds, and no longer
    assert growth_in_flight(sent, steady, 4.0) == 0.0 < growth_in_flight(sent, steady, 0.0)
    assert growth_in_flight([], [], 0.0) == growth_in_flight([1.0] * 9, [2.0] * 9, 0.0) == 0.0
