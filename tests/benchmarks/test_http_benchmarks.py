"""The benchmark of HTTP and front ends: its table, and all of it at a small size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import http


def test_a_front_end_is_reported_beside_the_plain_server() -> None:
    rounds = {
        front: {"1 × answers of 1": [dict.fromkeys(http.COLUMNS, times * x) for x in (1.0, 3.0)]}
        for front, times in (("plain", 1.0), ("ray", 5.0))
    }
    table = http.table(rounds).splitlines()
    assert [row.split("|")[2].strip() for row in table[2:]] == ["plain", "ray", "ray ÷ plain"]
    assert table[-1].count("5.00 ± 0.00") == len(http.COMPARED)


@pytest.mark.nightly
def test_plain_answers_and_streams_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"http --clients 2 --tokens 4 --seconds 0.3 --rounds 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", words.split())
    http.main()
    result = json.loads((tmp_path / "http.json").read_text())
    assert len(result["rounds"]["plain"]) == 7 and result["commit"]
    for name, [measured] in result["rounds"]["plain"].items():
        tokens = 1 if "of 1" in name else 4
        assert measured["tokens_per_s"] == pytest.approx(tokens * measured["requests_per_s"])
        assert (measured["chunks_per_s"] > 0) == ("streams" in name)
        assert (measured["cpu_us_per_chunk"] > 0) == ("streams" in name)
        assert measured["p99_ms"] >= measured["p50_ms"] > 0 < measured["cpu_ms_per_request"]
        clients = int(name.split()[0])
        # each asks again once it has an answer, and half of the answers took the median at most
        assert measured["requests_per_s"] < 2 * clients / (measured["p50_ms"] / 1e3)
