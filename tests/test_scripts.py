"""The shell scripts, with programs that do nothing and stay."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.servers import ROOT, processes_with, wait_until

SCRIPTS = ["compare.sh", "simulate.sh", "server.sh dynamic", "docs.sh", "playground.sh"]
SCRIPTS += ["server.sh dynamic --replicas 2", "lab/benchmarks/gpu.sh"]
SCRIPTS += ["test.sh", "test.sh course", "test.sh --policy mine.py"]
STAYS = """#!/usr/bin/env bash
case "$*" in
    *ruff*) ;;
    *) exec sleep 100 ;;
esac
"""
HAS_NO_PIP = """#!/bin/sh
case "$*" in
    "-m pip --version") exit 1 ;;
    "-m venv"*) echo "$*" >made ;;
esac
"""


@pytest.mark.parametrize("command", SCRIPTS)
def test_to_end_a_script_ends_what_it_started(command: str, tmp_path: Path) -> None:
    """./playground.sh left its server, and ./test.sh pytest: only the shell ended."""
    (tmp_path / "stays").write_text(STAYS)
    (tmp_path / "stays").chmod(0o700)
    name, *words = command.split()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "setup.sh").write_text('PYTHON="$ROOT/stays"')
    n = 2 if command == "test.sh" else 1  # mypy and pytest

    def stay() -> int:
        return processes_with("OF_TEST", str(tmp_path)).count(["sleep", "100"])

    with subprocess.Popen(
        [tmp_path / name, *words],
        cwd=tmp_path.anchor,  # from any folder
        env=os.environ | {"OF_TEST": str(tmp_path)},
        start_new_session=True,
    ) as process:
        try:
            wait_until(lambda: stay() == n, every_s=0.05)
            process.terminate()
            process.wait()
            wait_until(lambda: stay() == 0, every_s=0.05, patience_s=10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_an_environment_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    """Ctrl-C left a .venv without pip, and each later command ended with "No module named pip"."""
    for name in ("setup.sh", "requirements.txt", "client/requirements.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for python in (tmp_path / ".venv" / "bin" / "python", tmp_path / "python3"):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(HAS_NO_PIP)
        python.chmod(0o700)
    script = "ROOT=. && . ./setup.sh client/requirements.txt"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "made").read_text() == "-m venv ./.venv\n"
