"""Processes that share calls."""

from __future__ import annotations

import pickle

import pytest

from simulate.jobs import Jobs


def test_a_call_that_cannot_be_pickled_is_an_error() -> None:
    """Four such calls were a deadlock of the executor."""
    with Jobs(2) as jobs:
        assert [*jobs.map(len, [[1], [2, 3]])] == [1, 2]
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            jobs.map(callable, [lambda: 0] * 4)
        assert jobs.submit(divmod, 7, 4).result() == (1, 3)
