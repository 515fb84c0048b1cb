"""Real servers for the tests: gunicorn on a free port, stopped whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from client.compare import server

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["ROOT", "children_of", "client_command", "server"]


def client_command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "client" / "client.py"), *arguments]


def children_of(pid: int) -> list[int]:
    """Processes of a session that are still alive."""
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of ours in a session of its own, with its output; what is left of it at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
