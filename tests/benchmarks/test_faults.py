"""The fault suite in its short form: each promise is kept on a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import connections, processes, soak
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


@pytest.mark.nightly
def test_a_soak_ends_flat_and_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"faults --only closes --short --soak 0.3 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", words.split())
    faults.main()
    found = json.loads((tmp_path / "faults.json").read_text())
    assert [entry["kept"] for entry in found["faults"]] == [True, True] and found["commit"]
    assert found["soak"]["counts"]["invalid 400"] > 0 and found["soak"]["counts"]["cut 200"] > 0
    page = (tmp_path / "faults.md").read_text()
    assert page.startswith("# Faults, done to real servers\n\n2 of 2 promises kept, on ")
    assert found["command"] in page and found["faults"][1]["seen"] in page


def sampled(memory: list[float], **last: float) -> list[dict[str, float]]:
    flat = {"threads": 40.0, "descriptors": 20.0, "connections": 10.0, "ended": 0.0}
    samples = [flat | {"seconds": 60.0 * i, "rss_mb": held} for i, held in enumerate(memory)]
    samples[-1] |= last
    return samples


@pytest.mark.parametrize(
    ("samples", "counts", "kept"),
    [
        (sampled([200, 300, 301, 300, 301, 300, 301, 300, 301, 300]), {"plain 200": 9}, True),
        (sampled([200 + 10 * i for i in range(10)]), {"plain 200": 9}, False),  # memory grows
        (sampled([300] * 10, threads=41), {"plain 200": 9}, False),
        (sampled([300] * 10, descriptors=40), {"plain 200": 9}, False),
        (sampled([300] * 10, descriptors=40, connections=30), {"plain 200": 9}, True),
        (sampled([300] * 10), {"plain 200": 8}, False),  # /stats counted one more
        (sampled([300] * 10), {"plain 200": 8, "plain 500": 1}, False),
    ],
)
def test_a_soak_is_judged_by_what_grows_what_is_left_and_what_was_counted(
    samples: list[dict[str, float]], counts: dict[str, int], kept: bool
) -> None:
    stats = {"completed": 9, "cancelled": 0, "invalid": 0}
    assert all(right for _, right in soak.findings(samples, counts, stats)) == kept


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
