"""What a study has found is kept, whatever ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.compare.test_nothing_is_lost import ended, full
from tests.counts import nightly_but
from tests.programs import ran


@pytest.mark.parametrize(
    "how", nightly_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
)
def test_runs_are_kept_and_processes_end_with_the_one_that_started_them(
    how: signal.Signals, tmp_path: Path
) -> None:
    ended(f"lab.studies orders --requests 200 --out {tmp_path}", how)
    assert (tmp_path / "orders.runs.jsonl").read_text().endswith("\n")


def test_where_nothing_can_be_written_numbers_are_printed_first(tmp_path: Path) -> None:
    with full(tmp_path):
        done = ran("lab.studies", "own", "--from", "results/own", "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "| " in done.stdout
