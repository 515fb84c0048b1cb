"""A policy that is defined here, in one class and one row, is served, compared, offered and held to
the contract.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.calls import get, post
from compare.servers import wait_until_ready
from tests.servers import ROOT, free_port, launched

POLICY = """
from dataclasses import dataclass
from typing import ClassVar

from scheduling.policies import MODES
from scheduling.policies.base import Plan, Policy, View, setting, share_budget, start, whole_groups


@dataclass(frozen=True)
class Bunches(Policy):
    request_level: ClassVar[bool] = True
    bunch_size: int = setting(2, "rows in a batch at most", ge=1)
    compact_batches: bool = setting(False, "drop rows that are done", "off")

    def max_rows(self, max_batch_size: int) -> int:
        return min(self.bunch_size, max_batch_size)

    def plan(self, view: View) -> Plan:
        if view.running:
            rows = [row for row in view.running if not (self.compact_batches and row.is_over)]
            return Plan(run=share_budget(rows, view))
        return start(whole_groups(view, self.max_rows(view.limits.max_batch_size)), view, "bunch")


MODES["bunches"] = Bunches
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In which every Python process knows the policy from its start."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(POLICY)
    known = os.pathsep.join([str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", known)
    return dict(os.environ)


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_serves_and_is_offered(environment: dict[str, str]) -> None:
    assert (
        "--bunch-size X" in (shown := run("launch.py", "--help"))
        and "bunches: rows in a batch at most" in shown
    )
    assert "static, windowed, multibin, bunches: drop rows" in " ".join(shown.split())
    elsewhere = [sys.executable, "launch.py", "dynamic", "--bunch-size", "2"]
    refused = subprocess.run(elsewhere, cwd=ROOT, capture_output=True, text=True)
    assert (
        refused.returncode == 2
        and "--bunch-size has no meaning in mode dynamic; it belongs to bunches" in refused.stderr
    )
    port = str(free_port())
    with launched(
        sys.executable, "launch.py", "bunches", "--bunch-size", "3",
        "--model", "fake", "--port", port
    ) as process:  # fmt: skip
        wait_until_ready(process, url := f"http://127.0.0.1:{port}")
        assert get(url)["config"]["bunch_size"] == 3
        asked = {"prompt": ["a", "b", "c"], "num_tokens": 4}
        assert len(post(f"{url}/inference", asked)["completion"]) == 3
        assert get(f"{url}/stats")["batches_formed"] == {"bunch": 1}


@pytest.mark.nightly
def test_it_is_compared(environment: dict[str, str], tmp_path: Path) -> None:
    run(
        "-m",
        "compare",
        "--model",
        "fake",
        "--modes",
        "bunches,dynamic",
        "--bunch-size",
        "3",
        "--numsamples",
        "100",
        "--lengths",
        "choice:2,9",
        "--arrival",
        "burst",
        "--skip-calibration",
        "--out",
        str(tmp_path / "out"),
    )
    told = json.loads((tmp_path / "out" / "bunches.json").read_text())
    assert told["largest_batch"] == 3 and told["config"]["bunch_size"] == 3
    # of 100 requests, since in a few batches lengths are alike by chance
    assert told["expected_useful_fraction"] == pytest.approx(told["useful_fraction"], abs=0.2)
    assert "| bunches | " in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.nightly
def test_it_is_held_to_the_contract(environment: dict[str, str]) -> None:
    program = (
        "from tests.virtual import every_policy; print([type(p).__name__ for p in every_policy()])"
    )
    assert run("-c", program).count("Bunches") == 2
    contract = ["tests/scheduling/test_policies.py", "-k", "any_workload or keeps_no_state"]
    assert "2 passed" in run("-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *contract)
