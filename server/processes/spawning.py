"""Start the engine's process, and wait for its end. Loads nothing heavy: the launcher, and then
gunicorn's master, call this.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

ENGINE = (
    "EFFECTIVE_BATCHING_ENGINE"  # its process's id, and the socket by which connections reach it
)
ENDING_S = 15.0  # its files take 10 s at most


def spawn() -> None:
    """Start the engine's process, which ends once all processes with our socket have ended."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", "server.processes.engine", str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    ours.set_inheritable(True)
    os.environ[ENGINE] = f"{process.pid} {ours.detach()}"


def wait_for_end() -> None:
    """Wait for the end of the engine's process, if there is one; kill it after ENDING_S."""
    if ENGINE not in os.environ:
        return
    pid, ours = map(int, os.environ.pop(ENGINE).split())
    os.close(ours)
    end = time.monotonic() + ENDING_S
    with suppress(ChildProcessError):  # gunicorn has noticed it
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
