"""Parts of a sweep's capacity: scaled traces, stretches in which requests always wait, and
the truth in virtual time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client.workloads import Workload
from compare.analysis import always_waiting, difference, estimate, growth, growth_in_flight
from compare.groups import describe
from compare.report import tables
from stats import Answer


@pytest.mark.parametrize("lengths", ["normal", "choice:1,25,100", "lognormal:50:1:1000", "fixed:7"])
def test_a_scaled_trace_asks_for_what_its_names_say(lengths: str) -> None:
    data = Workload(lengths, seed=5)
    for arrival in ("poisson:5", "gamma:5:2", "constant:5", "wait:0.4"):
        load = describe(data.requests(200, arrival, scaled=True))
        assert load["requested_rate"] == pytest.approx(5, rel=1e-4)
        assert load["mean_num_tokens"] == pytest.approx(data.mean_num_tokens, rel=0.01)
    scaled, drawn = ([r.num_tokens for r in data.requests(200, scaled=s)] for s in (True, False))
    if lengths not in ("normal", "lognormal:50:1:1000"):
        assert set(scaled) <= set(drawn), "no length that is not the distribution's"
    assert sum(a == b for a, b in zip(scaled, drawn)) > 120, "most are as drawn"
    same, other = (Workload(lengths, seed=s).requests(200, "poisson:5", True) for s in (5, 6))
    assert same == data.requests(200, "poisson:5", scaled=True) != other


def answer(arrived: float, admitted: float, tokens: int, each_s: float) -> Answer:
    """A request that gets a token every `each_s` after it was admitted."""
    times = [admitted + each_s * (i + 1) for i in range(tokens)]
    timings: dict[str, Any] = {"arrived_at": arrived, "queue_s": admitted - arrived}
    timings |= {"ttft_s": times[0] - arrived, "itl_s": [each_s] * (tokens - 1)}
    return Answer(0, arrived, arrived, times[0], times[-1], times[-1], 1, tokens, [], timings)


def test_tokens_count_while_requests_always_wait() -> None:
    """One at a time, 4 tokens of 1 s each: they come at 0, 1, 2, 3; the last is admitted at 12."""
    queue = [answer(i, 4.0 * i, 4, 1.0) for i in range(4)]
    assert always_waiting(queue) == (8, 8.0), "from the second admission to the last"
    later = [*queue, answer(30.0, 30.0, 4, 1.0)]
    assert always_waiting(later) == (8, 8.0), "what came to an idle server waited for nothing"
    assert always_waiting(queue[:1]) == always_waiting([]) == (0, 0.0)


def test_another_server_is_seen_from_its_first_tokens() -> None:
    queue = [replace(answer(0.1 * i, 4.0 * i, 4, 1.0), timings=None) for i in range(6)]
    found = always_waiting(queue)
    assert found.tokens / found.seconds == pytest.approx(1.0) and found.seconds >= 12


def test_what_stays_in_flight_grows_although_nothing_waits() -> None:
    """A server with more rows than requests: the first token comes at once, and each row makes the
    others slower.
    """
    sent = np.arange(0, 20, 0.1)
    ended = 10 * np.cumsum(np.full(200, 0.1)) / 7  # seven a second
    answers = [
        Answer(i, s, s, s + 0.01, e, e, 1, 9, [], None)
        for i, (s, e) in enumerate(zip(sent.tolist(), ended.tolist()))
    ]
    assert growth(answers) < 0.01
    assert growth_in_flight(sent, ended, 1.0) == pytest.approx(0.3, abs=0.03)
    steady = sent + 4  # it fills for four seconds, and no longer
    assert growth_in_flight(sent, steady, 4.0) == 0.0 < growth_in_flight(sent, steady, 0.0)
    assert growth_in_flight([], [], 0.0) == growth_in_flight([1.0] * 9, [2.0] * 9, 0.0) == 0.0


def test_a_difference_within_a_step_of_the_lattice_is_not_shown() -> None:
    """Five seeds that agree on two neighbouring rates say that the border lies between them, and
    not by how much it moved.
    """
    one, two = [8.0] * 5, [8.724] * 5
    assert difference(one, two).shown and not difference(one, two, 0.0905).shown
    assert difference(one, [16.0] * 5, 0.0905).shown
    assert estimate(one, 0.0905).half == pytest.approx(0.724)

    def results(values: list[float]) -> list[dict[str, float]]:
        return [{"goodput_rate": value, "output_throughput": value} for value in values]

    text = tables.differences_table({"a": results(one), "b": results(two)}, "a")
    assert "no difference shown (+0.724 ± 0.79)" in text
    assert text.count("no difference shown") == 1, "throughput has no lattice"
    whole = [{"a": [{"goodput_rate": v, "partial": 0} for v in run]} for run in (one, two)]
    text = tables.runs_table(dict(zip(("then", "now"), whole)), paired=True)
    assert "8 ± 0.724" in text and "(× 1.09, no difference shown)" in text


def test_a_difference_of_which_seeds_are_missing_has_no_interval() -> None:
    one = [{"capacity": value} for value in (10.0, 10.1, 10.2, 10.0, 10.1)]
    two = [{"capacity": value} for value in (20.0, 20.1, None, 20.2, 20.1)]
    [entry] = tables.differences({"a": one, "b": two}, "a")
    assert entry["capacity"].half is None and not entry["capacity"].shown
    text = tables.differences_table({"a": one, "b": two}, "a")
    assert "no difference shown (+10.1, not of all seeds)" in text
    whole = [{**result, "partial": False} for result in two]
    assert "20.1 (4 of 5 seeds)" in tables.runs_table({"x": {"b": whole}}, paired=True)
