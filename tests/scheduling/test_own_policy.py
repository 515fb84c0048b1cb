"""The policy that docs/policies.md shows, one class and one row of a table, is served, compared,
offered and held to the contract.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from client.calls import get, post
from tests.servers import ROOT, started

PAGE = (ROOT / "docs" / "policies.md").read_text()
[POLICY] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROW = 'from scheduling.policies import MODES\n\nMODES["bunches"] = Bunches\n'


@pytest.fixture(autouse=True)
def known_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process that is started has the policy from its start."""
    (tmp_path / "sitecustomize.py").write_text(POLICY + ROW)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)


def python(arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments.split()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_it_serves_and_is_offered() -> None:
    shown = python("launch.py --help").stdout
    assert "--bunch-size X" in shown and "bunches: rows in a batch at most" in shown
    refused = python("launch.py dynamic --bunch-size 2")
    assert refused.returncode == 2
    assert "--bunch-size has no meaning in mode dynamic; it belongs to bunches" in refused.stderr
    with started("--bunch-size", "3", mode="bunches") as (url, _):
        assert get(url)["config"]["bunch_size"] == 3
        group = {"prompt": ["a", "b", "c"], "num_tokens": 4}
        assert len(post(f"{url}/inference", group)["completion"]) == 3
        assert get(f"{url}/stats")["batches_formed"] == {"bunch": 1}


@pytest.mark.nightly
def test_it_is_compared(tmp_path: Path) -> None:
    done = python(
        "-m compare --model fake --modes bunches,dynamic --bunch-size 3 --numsamples 100 "
        f"--lengths choice:2,9 --arrival burst --skip-calibration --out {tmp_path}/out"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "bunches.json").read_text())
    assert result["largest_batch"] == 3 and result["config"]["bunch_size"] == 3
    # of 100 requests, since in a few batches lengths are alike by chance
    assert result["expected_useful_fraction"] == pytest.approx(result["useful_fraction"], abs=0.2)
    assert "| bunches | " in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.nightly
def test_it_is_held_to_the_contract() -> None:
    contract = "-m pytest -p no:cacheprovider -o addopts= tests/scheduling/test_policies.py"
    command = [*contract.split(), "-k", "any_workload or keeps_no_state"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout
