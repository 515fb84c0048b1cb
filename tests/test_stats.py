"""Definitions on numbers small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stats import DEFINITIONS, MEASURES, TIMINGS, Times, distribution, times_from


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
    columns = Times(start, admitted, first, last, end, n)
    assert columns.tpot_s[0] == 0.5 and math.isnan(columns.tpot_s[1]), "no gap in one token"
    assert columns.e2e_s.tolist() == [3, 0]
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
