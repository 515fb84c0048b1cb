"""A run summarised from the client's side, in numbers small enough to check by hand."""

from __future__ import annotations

import pytest

from compare.analysis import occupancy_over_time
from compare.summary import latency_line, summarise
from stats import Answer


def test_the_latency_line_is_the_least_squares_line() -> None:
    line = latency_line([1, 2, 3], [1.5, 2.5, 3.5])
    assert line == pytest.approx({"intercept_s": 0.5, "slope_s_per_token": 1.0, "r": 1.0})
    assert latency_line([5, 5], [1.0, 2.0]) is None
    flat = latency_line([1, 2], [3.0, 3.0])
    assert flat == pytest.approx({"intercept_s": 3.0, "slope_s_per_token": 0.0, "r": 0.0})


def answer(id_: int, scheduled: float, sent: float, answered: float, tokens: int) -> Answer:
    e2e = answered - sent - 0.1  # a tenth of a second was spent outside the server
    first = answered - (e2e - 0.5)
    timings = {"queue_s": 0.0, "ttft_s": 0.5, "decode_s": 1.0, "held_s": e2e - 1.5, "e2e_s": e2e}
    return Answer(
        id_, scheduled, sent, first, first + 1.0, answered, 4, tokens, [0.5, 0.5], timings
    )


def test_a_run_is_summarised_from_the_clients_side() -> None:
    answers = [answer(0, 0.0, 0.0, 2.0, 3), answer(1, 1.0, 1.5, 5.0, 3)]
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
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    with_tpot = summarise(answers, sends, goodput={"tpot": 499.0})
    assert with_tpot["goodput"] == 0


def test_a_run_in_which_everything_failed_has_no_latencies_and_no_nan() -> None:
    result = summarise([], [(0.0, 0.0, 3.0), (1.0, 1.0, 1.5)], goodput={})
    assert (result["completed"], result["failed"], result["output_throughput"]) == (0, 2, 0.0)
    assert result["mean_e2el_ms"] is result["latency_line"] is result["goodput"] is None
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
    assert (result["completed"], result["failed"]) == (97, 1103)
    assert result["wall_clock_s"] == pytest.approx(60.1)
    assert result["goodput"] == result["request_throughput"] == pytest.approx(97 / 60.1)


def test_occupancy_over_time_spreads_iterations_over_bins_and_keeps_the_area() -> None:
    # two seconds idle before the last
    iterations = [(0.0, 2.0, 4, 0, 0), (2.0, 1.0, 2, 2, 0), (5.0, 1.0, 6, 0, 2)]
    binned = occupancy_over_time(iterations, bins=6)
    assert (binned["bin_s"], binned["live"]) == (1.0, [4, 4, 2, 0, 0, 6])
    assert (binned["idle"], binned["padding"]) == ([0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 2])
    coarse = occupancy_over_time(iterations, bins=4)
    assert sum(coarse["live"]) * coarse["bin_s"] == pytest.approx(16, abs=1e-3)
    assert occupancy_over_time([])["live"] == occupancy_over_time([])["padding"] == []
