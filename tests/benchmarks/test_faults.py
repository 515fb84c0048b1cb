"""The fault suite in its short form: each promise is kept on a real server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import connections, processes
from benchmarks.faults.tools import Fault, Finding

USUAL = (  # what happens to every server in time, and what no other test does to one
    "half of 500 streams are cut",
    "50 requests in one packet",
    "SIGTERM under load",
    "kill -9 of the worker under load",
    "the engine fails in every 20th iteration",
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in USUAL else pytest.mark.nightly)
        for fault in (*connections.FAULTS, *processes.FAULTS)  # a fleet's are in test_ray.py
    ],
)
def test_a_promise_is_kept(fault: Fault) -> None:
    seen, kept = fault.run(True)
    assert kept, seen


def test_a_broken_promise_is_an_exit_code_and_a_bold_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(short: bool) -> Iterator[Finding]:
        yield "it began", True
        raise ConnectionResetError("peer")

    monkeypatch.setattr(faults, "FAULTS", [Fault("a | fault", "nothing breaks", fails, None)])
    monkeypatch.setattr(sys, "argv", ["faults", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == 1 and "BROKEN" in capsys.readouterr().out
    assert (
        "| a \\| fault | nothing breaks | ConnectionResetError: peer | **no** |"
        in (tmp_path / "faults.md").read_text()
    )
