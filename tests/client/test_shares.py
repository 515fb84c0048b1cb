"""Shares as they are shown: never the whole, and never nothing, unless they are that."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from client.results import KEYS, Point, Result, share
from compare.report import sentences
from compare.report.tables import cell_of, present
from tests.compare.test_sweep import AT_RATE, CALM
from tests.servers import ROOT

SHOWN = [
    (399 / 400, 0, "99.8"),
    (0.99996, 1, "99.996"),
    (1 / 300, 0, "0.3"),
    (1e-6, 0, "0.0001"),
    (0.0, 0, "0"),
    (1.0, 1, "100.0"),
    (1 - 1e-15, 0, "100"),  # an error of floating point
    (0.4449, 0, "44"),
    (0.4449, 1, "44.5"),
]


@pytest.mark.parametrize(("part", "digits", "shown"), SHOWN)
def test_a_share_that_is_not_all_is_not_shown_as_all(part: float, digits: int, shown: str) -> None:
    assert share(100 * part, digits) == shown


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_pages_show_the_same() -> None:
    text = (ROOT / "server" / "live" / "text.js").read_text()
    calls = ", ".join(f"percent({part!r}, {digits})" for part, digits, _ in SHOWN)
    script = f"{text}\nconsole.log([{calls}].join(' '));"
    node = subprocess.run(
        ["node", "--input-type=module"], input=script, capture_output=True, text=True, check=True
    )
    assert node.stdout.split() == [f"{shown}%" for *_, shown in SHOWN]


def test_tables_and_lines_show_399_of_400_as_less_than_all() -> None:
    of_400, all_of_it = Result(attainment=399 / 400), Result(attainment=1.0)
    assert cell_of(KEYS["attainment"], [of_400]) == "99.8"
    assert cell_of(KEYS["attainment"], [of_400, all_of_it]) == "99.9 ± 2"
    assert cell_of(KEYS["attainment"], [all_of_it, all_of_it]) == "100 ± 0"
    assert present([KEYS["cached_fraction"]], [([""], [Result(cached_fraction=0.001)])])
    numbers = {"output_throughput": 1.0, "p50_normalized_latency_ms": 1.0}
    line = sentences.point_line("a", Point.of(CALM | AT_RATE | numbers | {"attainment": 399 / 400}))
    assert "99.8% within limits" in line
