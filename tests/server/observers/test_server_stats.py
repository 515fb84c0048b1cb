"""A server's statistics: exact counts, bounded rings, pages of iterations, sums of runs."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from client import measure
from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration, Row, State
from scheduling.records import IterationRecord
from server.observers import server_stats
from server.observers.run import added
from server.observers.server_stats import ServerStats
from server.observers.tallies import Ring
from tests.servers import ClientOf


def finished(arrived: float, tokens: int, answered: float) -> Inference:
    return Inference(
        [0, 0], tokens, arrived_at=arrived, admitted_at=arrived, answered_at=answered,
        state=State.FINISHED, tokens=[1] * tokens, token_times=[answered] * tokens,
    )  # fmt: skip


def failed(arrived: float, answered: float) -> Inference:
    inference = Inference([0], 9, arrived_at=arrived, answered_at=answered, state=State.FAILED)
    inference.error = ServingError("the engine died")
    return inference


def record(started: float, live: int, idle: int, padding: int = 0, drafts: Any = ()) -> Any:
    """drafts: of further rows, that are live: their number, and computed tokens after the row."""
    rows = [Row(Inference([0], 1), 0, 1, [0], True, index >= live) for index in range(live + idle)]
    for n, computed in drafts:
        inference = Inference([0], 9, computed=computed)
        rows.append(Row(inference, 5, 1 + n, [0], True, False, 0, [7] * n))
    return IterationRecord(started, 1.0, Iteration(rows, len(rows), 0, 1, "idle", padding))


def test_the_original_four_numbers_are_computed_rightly() -> None:
    stats = ServerStats(max_batch_size=4)
    stats.iteration(record(0.0, 2, 0))
    stats.iteration(record(1.0, 1, 1, padding=1))
    stats.answered(finished(0.0, 2, 2.0))
    stats.answered(finished(0.0, 4, 2.0))
    result = stats.run().report()
    expected = {
        # two requests side by side, 6 tokens in 2 s: 3 tok/s. The original divided by the sum of
        # latencies (4 s): 1.5
        "throughput": 3.0, "total-elapsed-time": 2.0, "total-tokens-handled": 6,
        "latency-per-token": (2 / 2 + 2 / 4) / 2,
        "latency-by-requested-tokens": {
            tokens: {"requests": 1, "mean_latency_s": 2.0} for tokens in ("2", "4")
        },
        "useful_fraction": 3 / 5, "padding_rows": 1, "occupancy": (2 / 4 + 1 / 4) / 2,
        "largest_batch": 2, "batches_formed": {"idle": 2},
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert stats.iterations()["iterations"] == [
        (0.0, 1.0, 2, 0, 0, 0, 0), (1.0, 1.0, 1, 1, 1, 0, 0),
    ]  # fmt: skip


def test_a_row_costs_its_draft_tokens_and_is_one_row_of_the_occupancy() -> None:
    """One keeps two of three, one all, one was cancelled in the middle, and one has none."""
    stats = ServerStats(max_batch_size=4)
    stats.iteration(record(0.0, 1, 0, drafts=((3, 8), (2, 8), (2, 5))))
    run = stats.run()
    result = run.report()
    assert stats.iterations()["iterations"] == [(0.0, 1.0, 8, 0, 0, 0, 3)]
    assert (result["occupancy"], result["largest_batch"]) == (1.0, 4)
    assert result["useful_fraction"] == 8 / 11
    assert (result["draft_tokens"], result["accepted_tokens"]) == (7, 4)
    assert run.counts["drafts"] == 3 and added([run, run]).accepted_at == {0: 4, 1: 4}


def test_a_run_is_of_what_arrived_since_its_reset_and_failures_are_not_timed() -> None:
    stats = ServerStats(max_batch_size=4)
    empty = stats.run().report()
    assert empty["throughput"] == empty["latency-per-token"] == empty["occupancy"] == 0
    stats.iteration(record(0.0, 2, 0))
    stats.reset(2.5)
    stats.iteration(record(4.0, 2, 0))
    for arrived in (0.0, 3.0):
        stats.answered(finished(arrived, 2, 5.0))
    result = stats.run().report()
    assert result == stats.run().report(), "reading changes nothing"
    assert (result["completed"], result["total-elapsed-time"]) == (1, 2.0)
    assert len(stats.iterations()["iterations"]) == 1
    stats.answered(failed(4.0, 63.0))
    result = stats.run().report()
    assert (result["failed"], result["completed"]) == (1, 1)
    assert (result["total-elapsed-time"], result["request_throughput"]) == (60.0, 1 / 60)


def test_a_ring_keeps_the_last_values_by_their_numbers() -> None:
    for sizes in ([1] * 12, [5, 7], [3, 3, 3, 3], [12], [4, 0, 8]):
        ring, n = Ring(5, np.dtype(int)), 0
        for size in sizes:
            if size == 1:
                ring.append(n)
            else:
                ring.extend(list(range(n, n + size)))
            n += size
        assert (ring.seen, ring.lost) == (12, 7)
        assert ring.between(0, 12).tolist() == [7, 8, 9, 10, 11]
        assert ring.between(9, 11).tolist() == [9, 10]
        assert ring.between(12, 20).tolist() == ring.between(0, 7).tolist() == []
        ring.clear()
        assert (ring.seen, ring.lost) == (0, 0) and ring.between(0, 20).tolist() == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ServerStats:
    """Pages of 20 iterations, of which the last 100 are kept."""
    monkeypatch.setattr(server_stats, "PAGE", 20)
    return ServerStats(max_batch_size=4, window=25)


def test_iterations_come_a_page_at_a_time_and_what_was_lost_is_said(small: ServerStats) -> None:
    for i in range(130):
        small.iteration(record(float(i), 1, 0))
    page = small.iterations()
    assert (page["iterations_lost"], page["next_iteration"]) == (30, 50)
    assert [started for started, *_ in page["iterations"]] == list(range(30, 50))
    page = small.iterations(115)
    assert (page["iterations_lost"], page["next_iteration"]) == (0, None)
    assert len(page["iterations"]) == 15
    empty = {"iterations": [], "iterations_lost": 0, "next_iteration": None}
    assert small.iterations(10**17) == empty
    small.reset(200.0)
    assert small.iterations() == empty


def test_statistics_take_their_memory_at_the_start_and_no_more(small: ServerStats) -> None:
    """However many requests, and users, they see."""

    def serve(first: int, end: int) -> None:
        for i in range(first, end):
            small.iteration(record(float(i), 2, 0))
            inference = finished(float(i), 3 + i % 10, i + 1.0)
            inference.user, inference.priority = f"user {i}", i
            small.answered(inference)
            small.refused(inference)

    serve(0, 100)
    assert small.run().report()["completed"] == 100
    tracemalloc.start()
    try:
        serve(100, 3000)
        grown, _ = tracemalloc.get_traced_memory()
        kept = ServerStats(max_batch_size=4)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 20_000
    assert 15e6 < taken - grown < 21e6, "100,000 values of seven measures, 400,000 iterations"
    assert kept.iterations()["iterations"] == []


def test_the_client_reads_every_page(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stats, "PAGE", 7)
    client = client_of()
    client.post("/inference", json={"prompt": "hi", "num_tokens": 30})
    urls = []

    def get(url: str, *_: object, key: str | None = None) -> dict[str, object]:
        urls.append(url)
        return dict(client.get(url.removeprefix("http://x")).get_json())

    monkeypatch.setattr(measure, "get", get)
    engine, iterations = measure.stats_of("http://x")
    assert len(urls) == 5 and len(iterations) == 30
    assert engine["iterations_lost"] == 0 and "next_iteration" not in engine


def test_runs_of_several_servers_add_up_to_that_of_one_that_served_it_all() -> None:
    """Each has a clock of its own."""
    one, parts = ServerStats(4), [ServerStats(4) for _ in range(7)]
    for i in range(200):
        for stats, ahead in ((one, 0), (parts[k := i * i % 7], 10 * k)):
            stats.iteration(record(i - ahead, 1 + i % 3, i % 2, drafts=((3, 6 + i % 4),)))
            stats.answered(finished(i - ahead, 3 + i % 10, i - ahead + 1.0 + i * 0.05))
    for stats in (one, parts[-1]):
        stats.invalid()
    runs = [part.run().later(10 * k) for k, part in enumerate(parts)]
    result, expected = added(runs).report(), one.run().report()
    assert result["completed"] == 200 and result["invalid"] == 1

    def rounded(report: Any) -> Any:
        return json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 6))

    assert rounded(result) == rounded(expected)
