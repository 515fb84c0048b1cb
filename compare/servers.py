"""A server process for the time of a comparison."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from client.calls import ServerError, get
from config.config import free_port
from config.settings import flag, meaningful

ROOT = Path(__file__).resolve().parents[1]
STARTUP_S = 600
ALONE: Sequence[str] = ("-m", "server.launch")  # Python's arguments to start a single server
# stop all processes of a server once our end of its pipe is closed, as it is if we are killed
WITH_US = """exec 3<&0 </dev/null
(read -r _ <&3; kill -INT 0; sleep 15; kill -KILL 0) &
exec "$@" 3<&-"""


@contextlib.contextmanager
def server(
    mode: str,
    flags: Mapping[str, Any],
    key: str | None = None,
    name: str | None = None,
    start: Sequence[str] = ALONE,
) -> Iterator[str]:
    """Start a server on a free port; yield its URL once it is ready and known to be ours; stop it
    whatever happens.

    `key`: its API key, passed in the environment, since every user of this machine sees a command
    line. `name`: its name in errors, if not its mode. `start`: Python's arguments to start it, if
    it is no single server. Raises ServerError with the end of the server's own output if it does
    not come up.
    """
    words = [*start, mode]
    for setting, value in flags.items():
        if meaningful(setting, mode) and setting != "api_key":
            words += as_flag(setting, value)
    with launched(words, key) as ours:
        try:
            wait_until_ready(ours.process, ours.url)
            pids = get(ours.url, key=key)["pids"]
            if not any(started(ours.process, pid) for pid in pids):
                raise ServerError(
                    f"{ours.url} is another server (processes {pids}, ours is {ours.process.pid}); "
                    f"run the comparison again"
                )
            yield ours.url
        except ServerError as error:
            output = ours.output.strip()[-2000:]
            output = f"\nThe server said:\n{output}" if output else ""
            raise ServerError(f"{name or mode}: {error}{output}") from None


class Launched(NamedTuple):
    """A server's process, its URL, and the file of its output."""

    process: subprocess.Popen[bytes]
    url: str
    file: IO[bytes]

    @property
    def output(self) -> str:
        """Its own output so far."""
        self.file.seek(0)
        return self.file.read().decode(errors="replace")


@contextlib.contextmanager
def launched(words: Sequence[str], key: str | None = None) -> Iterator[Launched]:
    """Start Python with these arguments and a free port; stop it whatever happens."""
    port = free_port()
    command = [sys.executable, *words, "--host", "127.0.0.1", "--port", str(port)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"EB_API_KEY": key or "none", "EB_API_KEYS": "none", "PYTHONPATH": path}
    # so that a stats.py of the current folder does not come in place of ours
    environment = os.environ | ours | {"PYTHONSAFEPATH": "1"}
    environment.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another server
    with tempfile.TemporaryFile() as output:
        process = start(command, output, environment)
        try:
            yield Launched(process, f"http://127.0.0.1:{port}", output)
        finally:
            stop(process)


def start(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server that ends with this process, however that ends. It has a session of its own:
    Ctrl-C reaches us alone, and we `stop` it.
    """
    return subprocess.Popen(
        ["sh", "-c", WITH_US, "sh", *command],
        stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        env=environment,
    )  # fmt: skip


def started(process: subprocess.Popen[Any], pid: int) -> bool:
    """Return whether an id is that of this process or a descendant."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parents = psutil.Process(pid).parents()
        return process.pid in (pid, *(parent.pid for parent in parents))
    return False


def as_flag(name: str, value: Any) -> list[str]:
    """Return a setting as words of a command line."""
    switch = flag(name) if value is not False else flag(name).replace("--", "--no-", 1)
    return [switch] if isinstance(value, bool) else [switch, str(value)]


def wait_until_ready(
    process: subprocess.Popen[Any], url: str, patience_s: float = STARTUP_S
) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(
                f"the server ended with exit code {process.returncode} before it was ready"
            )
        try:
            get(f"{url}/ready", timeout_s=5)
            return
        except ServerError:
            time.sleep(0.1)
    raise ServerError(f"the server was not ready after {patience_s:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, which ends requests in flight; then kill the rest of the session."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    finally:  # after a second Ctrl-C, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
