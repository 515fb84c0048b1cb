"""Whole reports are, word for word, those that are kept: a number or sentence that changes shows.

If the change is meant, renew them: python -m compare.report results/demo, and GOLDEN by the command
in the test's message.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from compare import runs
from compare.report import report
from compare.servers import ROOT
from tests.programs import ran

GOLDEN = Path(__file__).parent / "report.md"
WORDS = (
    "--modes static,dynamic --replicas 2 --slow 1:2 --fail 0:0.4 --start-s 0.1 --repeats 2 "
    "--users ann,90,uniform:1:20 bob,30,uniform:5:60 --priorities 0.3:1 0.7:2 --numsamples 90 "
    "--goodput ttft:20 e2el:200 --max-batch-size 4 --max-waiting 3"
)


def test_the_committed_report_is_what_its_data_say() -> None:
    folder = ROOT / "results" / "demo"
    assert report.contents(runs.load(folder)) == (folder / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_users_levels_and_replicas_is_what_it_was(tmp_path: Path) -> None:
    """In virtual time, so that its numbers are the same everywhere."""
    done = ran("simulate", *WORDS.split(), "--out", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr  # some requests are refused
    made = (tmp_path / "report.md").read_text().split("## How it was made")[0]
    assert made == GOLDEN.read_text(), f"./simulate.sh {WORDS} --out FOLDER, up to How it was made"
