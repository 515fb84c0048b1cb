"""Numbers of a result are declared once: one that nobody measured, or declared, is an error and
not an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from client.outcomes import Outcome
from client.traces import Request
from compare import results
from compare.measure import judged
from compare.results import KEYS, Key, of_point, of_summary
from stats import Answer


def measured() -> dict[str, Any]:
    """What a run of another's server says: nothing of iterations."""
    request = Request(id=0, at=0.0, prompt="a", num_tokens=3, seed=0)
    answer = Answer(0, 0.0, 0.0, 0.1, 0.3, 0.3, 1, 3, [0.1, 0.1], None)
    return judged([request], [Outcome(request, 0.0, 0.0, 0.3, answer, "abc")], {})


@pytest.mark.parametrize("part", [of_point, of_summary])
def test_a_mistyped_number_is_an_error_and_not_a_null(
    part: Callable[[Mapping[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = part(measured())
    assert found["output_throughput"] == pytest.approx(10.0) and found["occupancy"] is None
    mistyped = KEYS | {"ouput_throughput": Key("ouput_throughput")}
    monkeypatch.setattr(results, "KEYS", mistyped)
    with pytest.raises(KeyError, match="ouput_throughput"):
        part(measured())
