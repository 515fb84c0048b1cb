"""Real servers for the tests: gunicorn on a free port, stopped whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from client.servers import server

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["ROOT", "client_command", "launched", "server"]


def client_command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "client" / "client.py"), *arguments]


@contextlib.contextmanager
def launched(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, with its output; what is left of it at the end is killed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
