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

from config.config import BOOT_ERROR

# its process's id, and the socket by which connections reach it
ENGINE = "EFFECTIVE_BATCHING_ENGINE"
ENDING_S = 15.0  # its files take 10 s at most


def spawn() -> None:
    """Start the engine's process, which ends once all processes with our socket have ended."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", "server.processes.engine", str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    ours.set_inheritable(True)
    os.environ[ENGINE] = f"{process.pid} {ours.detach()}"


def exit_code() -> int:
    """Wait for the end of the engine's process, if there is one, and kill it after ENDING_S. Return
    BOOT_ERROR if it had ended before, as it does where the engine failed, else 0.
    """
    if ENGINE not in os.environ:
        return 0
    pid, ours = map(int, os.environ.pop(ENGINE).split())
    try:
        ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
        os.close(ours)
        end = time.monotonic() + ENDING_S
        while not ended:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                return 0
    except ChildProcessError:  # gunicorn has noticed its end
        pass
    return BOOT_ERROR
