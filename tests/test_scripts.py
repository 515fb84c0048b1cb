"""The shell scripts, with programs that do nothing and stay."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT, processes_with, wait_until

SCRIPTS = ["compare.sh", "simulate.sh", "server.sh dynamic", "docs.sh", "playground.sh"]
SCRIPTS += ["server.sh dynamic --replicas 2", "lab/benchmarks/gpu.sh"]
SCRIPTS += ["test.sh", "lab/test.sh", "test.sh course", "test.sh --policy mine.py"]
OF_ROOT = ("test.sh", "lab/test.sh", "test.sh course")  # which run in its folder
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
    "-m pip install"*) env >environment ;;
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


@pytest.mark.parametrize("command", [each for each in SCRIPTS if each not in OF_ROOT])
def test_a_script_runs_ours_whatever_a_user_has(command: str, tmp_path: Path) -> None:
    """A simulate.py in the current folder ran in place of ours, and a config.py or stats.py there,
    or in PYTHONPATH, ended each script. So did CDPATH, and a link to a script.
    """
    name, *words = command.split()
    ours, here = tmp_path / "ours", tmp_path / "here"
    for path in (ours / name, here / "bin" / "linked", tmp_path / "other" / "bin" / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, ours / name)
    (here / "bin" / "linked").symlink_to(ours / name)
    (ours / "setup.sh").write_text(f'PYTHON="{sys.executable}"')
    (ours / "stats.py").write_text("WHOSE = 'ours'")
    (here / "stats.py").write_text("raise SystemExit('theirs')")
    module = re.findall(r"-m ([a-z.]+)", (ours / name).read_text())[0].split(".")
    for depth in range(1, len(module) + 1):
        package = ours.joinpath(*module[:depth])
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("import stats; print(stats.WHOSE)")
    (here / f"{module[0]}.py").write_text("raise SystemExit('theirs')")
    environ = os.environ | {"CDPATH": str(tmp_path / "other"), "PYTHONPATH": str(here)}
    ran = subprocess.run(["bin/linked", *words], cwd=here, env=environ, capture_output=True)
    assert (ran.stdout, ran.stderr) == (b"ours\n", b"")


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
    environ |= {"PIP_USER": "yes", "PIP_TARGET": "elsewhere", "PIP_INDEX_URL": "http://mirror"}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "made").read_text() == "-m venv ./.venv\n"
    given = (tmp_path / "environment").read_text().splitlines()
    assert "PIP_USER=no" in given and "PIP_INDEX_URL=http://mirror" in given
    assert not any(line.startswith("PIP_TARGET") for line in given), "pip installs into .venv"
