"""The benchmarks of HTTP and front ends: their tables, and each at a small size."""

from __future__ import annotations

import pytest

from benchmarks import fronts, http
from benchmarks.harness import Round
from tests.benchmarks.conftest import Run


def test_a_front_end_is_reported_beside_the_plain_server() -> None:
    rounds: dict[str, list[Round]] = {
        name: [dict.fromkeys(fronts.COSTS, times * x) for x in (1.0, 3.0)]
        for name, times in (("plain", 1.0), ("ray", 5.0))
    }
    table = fronts.table(rounds, fronts.COSTS, compared=True).splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["plain", "ray", "ray ÷ plain"]
    assert table[-1].count("5.00 ± 0.00") == len(fronts.COSTS)


@pytest.mark.nightly
def test_the_answers_to_one_client_and_to_many_are_counted() -> None:
    """A plain server: a stream of 100 tokens takes longer than one token."""
    measured = fronts.measure("plain", 0.5)
    assert {*measured} == {*fronts.COSTS, *fronts.LOADS}
    assert 0 < measured["request_ms"] < measured["stream_ms"] and measured["token_ms"] > 0
    assert measured["request_cpu_ms"] + measured["stream_cpu_ms"] > 0
    for clients in fronts.CLIENTS:
        assert measured[f"p99_ms_{clients}"] >= measured[f"p50_ms_{clients}"] > 0
        # so many ask again once they have an answer, and half of these took the median at most
        half = clients / (measured[f"p50_ms_{clients}"] / 1e3)
        assert 0 < measured[f"answers_per_s_{clients}"] < 2 * half
    assert measured["streamed_per_s"] > 0


@pytest.mark.nightly
def test_http_is_measured_with_plain_answers_and_streams(
    result_of: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REPEATS", 1)
    monkeypatch.setattr(http, "GONE", 1)
    result = result_of(http, "--clients 2 --tokens 4 --seconds 0.3")
    assert list(result["freed_after_s"]) == ["plain", "streaming"]
    assert len(result["rounds"]) == 4
    for name, [measured] in result["rounds"].items():
        tokens = 1 if "1 token" in name else 4
        assert measured["tokens_per_s"] == pytest.approx(tokens * measured["requests_per_s"])
        assert (measured["chunks_per_s"] > 0) == ("streaming" in name)
        assert 0 < measured["server_cores"] < 4 and measured["cpu_ms_per_request"] > 0
