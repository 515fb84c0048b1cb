"""Intervals, growth and closed forms, against textbook numbers and against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from compare.analysis import batch_sizes, difference, estimate, expected_useful_fraction, growth
from stats import Answer


def test_the_interval_is_students() -> None:
    found = estimate([1, 2, 3, 4, 5])  # t(0.975, 4) = 2.776, s = 1.581
    assert found.mean == 3 and found.half == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert estimate([7.0]).half is None and not estimate([7.0]).shown, "one seed has no interval"


def test_a_paired_difference_is_shown_where_seeds_differ_more_than_modes() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.normal(100, 30, 6)  # what the traces do to both
    first, second = ((seeds + more + rng.normal(0, 1, 6)).tolist() for more in (0, 5))
    apart = difference(first, second)
    assert apart.shown and apart.mean == pytest.approx(5, abs=1.5)
    assert (estimate(first).half or 0) > 10, "unpaired, it would drown"
    assert not difference(first, first[::-1]).shown
    assert not difference([1.0, 2.0], [2.0, 1.0]).shown
    assert difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).shown
    assert not difference([1.0], [9.0]).shown, "one seed shows no difference"


def answers(at: np.ndarray, waits: np.ndarray, late: float = 0.0) -> list[Answer]:
    """Answers of a token, sent later than scheduled by a share of the time."""
    asked = enumerate(zip(at.tolist(), (at * (1 + late)).tolist(), waits.tolist()))
    return [Answer(i, t, s, s + w, s + w, s + w, 1, 1, [], None) for i, (t, s, w) in asked]


def test_growth_is_the_excess_of_the_rate_and_not_the_clients_lateness() -> None:
    at = np.arange(0, 20, 0.1)
    assert growth(answers(at, 0.5 * at)) == pytest.approx(0.5)  # half again what the server can do
    late = answers(at, np.full_like(at, 0.1), late=1.0)
    assert growth(late) < 1e-9, "sent later and later, and answered at once"
    assert growth([]) == growth(answers(np.zeros(9), np.arange(9.0))) == 0.0
    assert growth(answers(np.arange(9.0), 9 - np.arange(9.0))) == 0.0, "a queue that shrinks"


def test_the_useful_fraction_of_request_level_batches() -> None:
    assert expected_useful_fraction([7, 7, 7], [3, 5]) == 1.0
    # the longest of two: 1, 3, 3 or 3
    assert expected_useful_fraction([1, 3], [2]) == pytest.approx(2 / 2.5)
    assert expected_useful_fraction([1, 1, 1, 3], [2]) == pytest.approx(1.5 / (9 / 16 + 3 * 7 / 16))
    assert expected_useful_fraction([1, 3], [2, 1, 1]) == pytest.approx(8 / (2 * 2.5 + 2 + 2))
    assert expected_useful_fraction([1, 3], []) is None
    # the longest first: batches of equals are no draws
    assert expected_useful_fraction([9, 5, 1], [3]) is None


def test_batches_are_the_requests_admitted_together() -> None:
    def admitted(instant: float, waited: float) -> Answer:
        timings = {"arrived_at": instant - waited, "queue_s": waited}
        return Answer(0, 0, 0, 1, 1, 1, 1, 1, [], timings)

    instants = [(5.0, 1.0), (1.7e9, 0.3), (5.0, 4.0), (1.7e9 + 0.002, 0.1)]
    assert batch_sizes([admitted(*each) for each in instants]) == [2, 1, 1]
    assert batch_sizes([]) == []
