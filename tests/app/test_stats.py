"""Definitions on numbers small enough to check by hand."""

from __future__ import annotations

import pytest

from compare.summary import summarise
from observers.server_stats import ServerStats
from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration, IterationRecord, Row, State
from stats import Answer, Times, distribution, latency_line, occupancy_over_time


def test_times_of_a_request_follow_from_its_stamps() -> None:
    made = [2.0, 2.25, 3.0]
    times = Times(
        1.0, 1.5, made[0], made[-1], answered_at=4.0, completion_tokens=3, token_times=made
    )
    assert (times.queue_s, times.ttft_s, times.decode_s, times.held_s, times.e2e_s) == (
        0.5,
        1.0,
        1.0,
        1.0,
        3.0,
    )
    assert times.itl_s.tolist() == [0.25, 0.75]
    assert times.e2e_s == times.ttft_s + times.decode_s + times.held_s


def test_a_distribution_is_described_in_milliseconds() -> None:
    described = distribution("ttft", [0.1, 0.2, 0.3, 0.4])
    assert (
        described["mean_ttft_ms"] == 250
        and described["p50_ttft_ms"] == 250
        and described["max_ttft_ms"] == 400
    )
    assert described["p90_ttft_ms"] == pytest.approx(370)  # linear between 300 and 400
    assert set(distribution("ttft", []).values()) == {None}


def test_the_latency_line_is_the_least_squares_line() -> None:
    line = latency_line([1, 2, 3], [1.5, 2.5, 3.5])
    assert line == pytest.approx({"intercept_s": 0.5, "slope_s_per_token": 1.0, "r": 1.0})
    assert latency_line([5, 5], [1.0, 2.0]) is None
    assert latency_line([1, 2], [3.0, 3.0]) == pytest.approx(
        {"intercept_s": 3.0, "slope_s_per_token": 0.0, "r": 0.0}
    )


def answer(id_: int, scheduled: float, sent: float, answered: float, tokens: int) -> Answer:
    e2e = answered - sent - 0.1  # a tenth of a second was spent outside the server
    first = answered - (e2e - 0.5)
    timings = {"queue_s": 0.0, "ttft_s": 0.5, "decode_s": 1.0, "held_s": e2e - 1.5, "e2e_s": e2e}
    return Answer(
        id_, scheduled, sent, first, first + 1.0, answered, 4, tokens, [0.5, 0.5], timings
    )


def test_a_run_is_summarised_from_the_clients_side() -> None:
    answers = [answer(0, 0.0, 0.0, 2.0, 3), answer(1, 1.0, 1.5, 5.0, 3)]
    result = summarise(
        answers, [(0.0, 0.0, 2.0), (1.0, 1.5, 5.0), (2.0, 2.0, 4.0)], goodput={"e2el": 2500.0}
    )
    assert (result["completed"], result["failed"], result["wall_clock_s"]) == (2, 1, 5.0)
    assert (result["request_throughput"], result["output_throughput"]) == (2 / 5, 6 / 5)
    assert result["total_token_throughput"] == 14 / 5
    assert (result["goodput"], result["attainment"]) == (
        1 / 5,
        1 / 3,
    )  # the second took 3.5 s, the third failed
    assert result["mean_e2el_ms"] == pytest.approx(2750) and result[
        "mean_e2el_from_schedule_ms"
    ] == pytest.approx(3000)
    # 0.5 s to the first token at the server, and 0.1 s on the way
    assert result["mean_ttft_ms"] == pytest.approx(600) and result[
        "max_ttft_from_schedule_ms"
    ] == pytest.approx(1100)
    assert result["mean_tpot_ms"] == pytest.approx(500) and result["mean_itl_ms"] == pytest.approx(
        500
    )
    assert result["mean_normalized_latency_ms"] == pytest.approx((2 / 3 + 3.5 / 3) / 2 * 1e3)
    assert result["max_schedule_lag_ms"] == pytest.approx(500) and result["client_limited"]


def test_a_run_in_which_everything_failed_has_no_latencies_and_no_nan() -> None:
    result = summarise([], [(0.0, 0.0, 3.0), (1.0, 1.0, 1.5)], goodput={})
    assert (result["completed"], result["failed"], result["output_throughput"]) == (0, 2, 0.0)
    assert (
        result["mean_e2el_ms"] is None
        and result["latency_line"] is None
        and result["goodput"] is None
    )
    assert summarise([], [(0.0, 0.0, 0.5)], goodput={"e2el": 1.0})["goodput"] == 0.0, (
        "nothing answered is no goodput, not an unknown one"
    )


def test_a_server_that_dies_early_is_rated_over_the_whole_run() -> None:
    """It answered 97 requests in 5 s and died; that every later one failed was left out of the
    run's time: 19.4 a second.
    """
    instants = [(i / 20, i / 20, i / 20 + 0.15) for i in range(1200)]
    answers = [answer(i, *instants[i], 1) for i in range(97)]
    result = summarise(answers, instants, goodput={"e2el": 1000.0})
    assert result["wall_clock_s"] == pytest.approx(60.1) and (
        result["completed"],
        result["failed"],
    ) == (97, 1103)
    assert result["goodput"] == result["request_throughput"] == pytest.approx(97 / 60.1)
    stats = ServerStats(max_batch_size=4)
    stats.answered(finished(0.0, 2, 5.0))
    failed = Inference([0], 9, arrived_at=1.0, answered_at=60.0, state=State.FAILED)
    failed.error = ServingError("the engine died")
    stats.answered(failed)
    said = stats.run().report()
    assert said["total-elapsed-time"] == 60.0 and said["request_throughput"] == 1 / 60, (
        "and so does the server itself"
    )


def test_occupancy_over_time_spreads_iterations_over_bins_and_keeps_the_area() -> None:
    iterations = [
        (0.0, 2.0, 4, 0, 0),
        (2.0, 1.0, 2, 2, 0),
        (5.0, 1.0, 6, 0, 2),
    ]  # two seconds idle in between
    binned = occupancy_over_time(iterations, bins=6)
    assert binned["bin_s"] == 1.0
    assert binned["live"] == [4, 4, 2, 0, 0, 6]
    assert binned["idle"] == [0, 0, 2, 0, 0, 0]
    assert binned["padding"] == [0, 0, 0, 0, 0, 2]
    coarse = occupancy_over_time(iterations, bins=4)
    assert sum(coarse["live"]) * coarse["bin_s"] == pytest.approx(16, abs=1e-3)
    assert occupancy_over_time([])["live"] == occupancy_over_time([])["padding"] == []


def finished(arrived: float, tokens: int, answered: float) -> Inference:
    return Inference(
        [0, 0],
        tokens,
        arrived_at=arrived,
        admitted_at=arrived,
        answered_at=answered,
        state=State.FINISHED,
        tokens=[1] * tokens,
        token_times=[answered] * tokens,
    )


def record(started: float, live: int, idle: int, padding: int = 0) -> IterationRecord:
    rows = [Row(Inference([0], 1), 0, 1, [0], True, index >= live) for index in range(live + idle)]
    return IterationRecord(started, 1.0, Iteration(rows, live + idle, 0, 1, "idle", padding))


def test_the_original_four_numbers_are_computed_rightly() -> None:
    stats = ServerStats(max_batch_size=4)
    stats.iteration(record(0.0, 2, 0))
    stats.iteration(record(1.0, 1, 1))
    stats.answered(finished(0.0, 2, 2.0))
    stats.answered(finished(0.0, 4, 2.0))
    said = stats.run().report()
    # two requests side by side, 6 tokens in 2 s: 3 tok/s. The original divided by the sum of
    # latencies (4 s): 1.5
    assert (
        said["throughput"] == 3.0
        and said["total-elapsed-time"] == 2.0
        and said["total-tokens-handled"] == 6
    )
    assert said["latency-per-token"] == pytest.approx((2 / 2 + 2 / 4) / 2)
    assert said["latency-by-requested-tokens"] == {
        "2": {"requests": 1, "mean_latency_s": 2.0},
        "4": {"requests": 1, "mean_latency_s": 2.0},
    }
    assert (
        said["useful_fraction"] == 3 / 4
        and said["occupancy"] == (2 / 4 + 1 / 4) / 2
        and said["largest_batch"] == 2
    )
    assert said["batches_formed"] == {"idle": 2}


def test_padding_rows_are_computed_rows_that_serve_nobody() -> None:
    stats = ServerStats(max_batch_size=4)
    stats.iteration(record(0.0, 2, 1, padding=1))
    said = stats.run().report()
    assert (
        said["live_rows"],
        said["idle_rows"],
        said["padding_rows"],
        said["useful_fraction"],
    ) == (2, 1, 1, 0.5)
    assert said["occupancy"] == 0.5 and stats.iterations()["iterations"] == [(0.0, 1.0, 2, 1, 1, 0)]


def test_a_reset_leaves_out_what_arrived_before_it_and_reading_changes_nothing() -> None:
    stats = ServerStats(max_batch_size=4)
    early, late = finished(0.0, 2, 5.0), finished(3.0, 2, 5.0)
    stats.iteration(record(0.0, 2, 0))
    stats.reset(2.5)
    stats.iteration(record(4.0, 2, 0))
    stats.answered(early)
    stats.answered(late)
    assert stats.run().report() == stats.run().report()
    assert (
        stats.run().report()["completed"] == 1 and stats.run().report()["total-elapsed-time"] == 2.0
    )
    assert len(stats.iterations()["iterations"]) == 1


def test_an_empty_run_has_zeros_and_no_nan() -> None:
    said = ServerStats(max_batch_size=4).run().report()
    assert (
        said["throughput"] == said["latency-per-token"] == said["occupancy"] == 0
        and said["largest_batch"] == 0
    )


def test_failed_requests_are_counted_and_not_timed() -> None:
    stats = ServerStats(max_batch_size=4)
    failed = Inference([0], 9, arrived_at=0.0, answered_at=1.0, state=State.FAILED, error=None)
    failed.error = RuntimeError()  # type: ignore[assignment]
    stats.answered(failed)
    said = stats.run().report()
    assert (said["failed"], said["completed"], said["throughput"]) == (1, 0, 0.0)
