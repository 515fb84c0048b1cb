"""A server under test, clients that misbehave, and who is asked meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from client.calls import get, get_text
from client.outcomes import Outcome
from client.traces import Request
from compare.servers import ROOT, as_flag, free_port, wait_until_ready

PATIENCE_S = 60.0
REFUSED_S = 1.0  # what a refusal may take
# what a fault may make an honest client wait, beyond what it waits at a server that the fault
# leaves alone
DELAY_S = 0.1
SLACK = 5  # times as long in the short form, which runs beside other tests
CLOSE = "Connection: close\r\n"


class Seen(NamedTuple):
    """What a fault did: a sentence for the report, and whether the promise was kept."""

    text: str
    kept: bool


class Fault(NamedTuple):
    """`run(short)` does it to a server of its own; short: a few seconds, for the tests."""

    name: str
    promise: str
    run: Callable[[bool], Seen]


FAULTS: list[Fault] = []


def fault(name: str, promise: str) -> Callable[[Callable[[bool], Seen]], None]:
    """Decorates what does a fault: it joins FAULTS under this name."""
    return lambda run: FAULTS.append(Fault(name, promise, run))


class Served:
    """A running server: the launcher's process, now gunicorn's master, and the worker's."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, output: Any):
        self.process, self.url, self._output = process, url, output

    @property
    def worker(self) -> psutil.Process:
        return psutil.Process(get(self.url)["pids"][0])

    @property
    def said(self) -> str:
        """Its own output so far."""
        self._output.seek(0)
        return str(self._output.read(), "utf-8", "replace")

    def address(self) -> tuple[str, int]:
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def metric(self, name: str) -> float:
        lines = get_text(f"{self.url}/metrics", PATIENCE_S).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def is_free(self) -> bool:
        """No request is waiting or running, and no KV block is taken."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in names)

    def exit_code(self, patience_s: float = PATIENCE_S) -> int | None:
        """Of the launcher, once it has ended; None if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(patience_s)
        return None


@contextlib.contextmanager
def serving(
    settings: Mapping[str, Any], program: tuple[str, ...] = ("launch.py", "dynamic")
) -> Iterator[Served]:
    """A real server in a session of its own, on the fake model by default; killed at the end."""
    port = free_port()
    command = [sys.executable, *program, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in ({"model": "fake"} | dict(settings)).items():
        command += as_flag(name, value)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        served = Served(process, f"http://127.0.0.1:{port}", output)
        try:
            wait_until_ready(process, served.url, PATIENCE_S)
            yield served
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def post_bytes(
    body: Mapping[str, Any], route: str = "/inference", version: str = "1.1", more: str = ""
) -> bytes:
    """A whole HTTP request."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\n{more}Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def asks(n: int, num_tokens: int, a_second: float = 0.0) -> list[Request]:
    """n requests with prompts and seeds of their own: all at once, or so many a second."""
    gap_s = 1 / a_second if a_second else 0.0
    return [
        Request(id=i, at=i * gap_s, prompt=f"prompt {i}", num_tokens=num_tokens, seed=i)
        for i in range(n)
    ]


def told(outcomes: Sequence[Outcome]) -> str:
    """How many were answered, and what the others got."""
    errors = Counter(outcome.error.split(":")[0] for outcome in outcomes if outcome.error)
    answered = (
        f"{sum(outcome.answer is not None for outcome in outcomes)} of {len(outcomes)} answered"
    )
    return answered + "".join(f", {n} × {error.rstrip('.')}" for error, n in errors.items())


def connect(served: Served, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(served.address(), timeout=PATIENCE_S)
    connection.sendall(data)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes, or breaks, it; then it is closed here, too."""
    found = b""
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1_000_000):
            found += data
    return found


def until(true: Callable[[], bool], patience_s: float = PATIENCE_S) -> float | None:
    """Seconds until it is true; None if it is not by then."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > patience_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - start


def allow_open_files(n: int) -> int:
    """Let this process and its servers open n files, or as many as they may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = n if hard == resource.RLIM_INFINITY else min(n, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Honest:
    """A thread that asks /health and for five tokens in turn, each on a connection of its own."""

    def __init__(self, served: Served, every_s: float = 0.05):
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._served, self._every_s = served, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        body = json.dumps({"prompt": "hi", "num_tokens": 5, "seed": 1})
        turn = 0
        while not self._over.wait(self._every_s):
            turn += 1
            start = time.perf_counter()
            connection = http.client.HTTPConnection(*self._served.address(), timeout=PATIENCE_S)
            try:
                if turn % 2:
                    connection.request("GET", "/health")
                else:
                    connection.request(
                        "POST", "/inference", body, {"Content-Type": "application/json"}
                    )
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.failures.append(str(response.status))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(type(error).__name__)
            finally:
                connection.close()
            self.seconds.append(time.perf_counter() - start)


class Neighbour:
    """An honest client beside a fault, and one without it, whose waits are the machine's doing."""

    def __init__(self, served: Served):
        self._served = served
        self._beside = contextlib.ExitStack()

    def __enter__(self) -> Neighbour:
        with contextlib.ExitStack() as beside:
            alone = beside.enter_context(serving({}))
            self.here, self.elsewhere = (
                beside.enter_context(Honest(served)) for served in (self._served, alone)
            )
            self._beside = beside.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.close()

    @property
    def said(self) -> str:
        """How it fared."""
        if not (self.here.seconds and self.elsewhere.seconds):
            return "its neighbour never had an answer"
        here, elsewhere = (1e3 * max(honest.seconds) for honest in (self.here, self.elsewhere))
        text = (
            f"its neighbour waited {here:.0f} ms at most, "
            f"and {elsewhere:.0f} ms at a server without the fault"
        )
        failures = self.here.failures
        return text + (f"; {len(failures)} × {failures[0]}" if failures else "")

    def fared_well(self, short: bool) -> bool:
        if not (self.here.seconds and self.elsewhere.seconds) or self.here.failures:
            return False
        return max(self.here.seconds) - max(self.elsewhere.seconds) <= DELAY_S * (
            SLACK if short else 1
        )
