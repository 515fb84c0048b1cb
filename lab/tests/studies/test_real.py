"""The study of real servers: its factor is the one that costs are made with; its rows are read."""

from __future__ import annotations

import numpy as np
import pytest

from client.traces import Request
from lab.studies import real
from simulate.costs import load
from simulate.kernels import SLOWER


def test_the_factor_is_that_of_the_fitted_run() -> None:
    """Costs are made with the median, so that iterations of that run take 1.0 of their costs."""
    parts = real.factors()
    assert len(parts) == 19 and np.median(parts) == pytest.approx(SLOWER, abs=5e-4)


def test_each_case_has_costs_and_rows() -> None:
    names = [case["costs"] for case in real.cases(0)]
    assert len(names) == 9 and {row["costs"] for row in real.silicon()} < {*names}
    for name in names:
        assert load(name).source["served"]


def test_errors_are_those_of_foreseen_means() -> None:
    """A run that took what is foreseen has no error, and one that took half has 100%."""
    costs = load(real.FITTED)
    requests = [Request(id=i, at=0.1 * i, prompt_ids=[0] * 50, num_tokens=20) for i in range(9)]
    foreseen = real.served(costs, requests, **real.OF_ENGINES)
    rows = [
        {
            "prompt_tokens": 50.0,
            "completion_tokens": 20.0,
            "queued_s": 0.1 * i,
            "first_token_s": 0.1 * i + foreseen["ttft"][i] / 2,
            "last_token_s": 0.1 * i + foreseen["latency"][i] / 2,
        }
        for i in range(9)
    ]
    errors = real._of_requests(costs, rows)
    for measure in ("latency", "ttft", "tpot", "latency_p99"):
        assert errors[measure] == pytest.approx(100), measure
    assert -50 < errors["throughput"] < 0
