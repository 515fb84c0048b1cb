"""A server under test, what is done to it, and a client beside a fault whose waits are measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil

from client.calls import ServerError, get, get_text, post
from client.load import replay
from client.outcomes import Outcome
from client.traces import Request
from compare.servers import ALONE, Launched, as_flag, launched, wait_until_ready

PATIENCE_S = 60.0
# what a fault may make another client wait, beyond its waits at a server without the fault
DELAY_S = 0.1
SLACK = 5  # times as long in the short form, which runs beside other tests
CLOSE = "Connection: close\r\n"
SERVER = (*ALONE, "dynamic")
Settings = Mapping[str, Any]
NO_SETTINGS: Settings = {}
Finding = tuple[str, bool]  # a sentence for the report, and whether the promise was kept


class Fault(NamedTuple):
    """Something done to a server of its own. short: in a few seconds, for the tests.

    `do(served, short)` yields its findings, on a server with these settings; without settings it
    starts its own, as `do(short)`. background: another client is served meanwhile.
    """

    name: str
    promise: str
    do: Callable[..., Iterator[Finding]]
    settings: Settings | None = NO_SETTINGS
    program: Sequence[str] = SERVER
    background: bool = False

    def run(self, short: bool) -> Finding:
        """Inject the fault; return all findings as one."""
        if self.settings is None:
            return joined(self.do(short))
        with serving(self.settings, self.program) as served:
            findings = self.do(served, short)
            return joined(beside_a_client(findings, served, short) if self.background else findings)


def joined(findings: Iterator[Finding]) -> Finding:
    texts, kept = zip(*findings)
    return "; ".join(texts), all(kept)


def beside_a_client(findings: Iterator[Finding], served: Served, short: bool) -> Iterator[Finding]:
    """Findings, with the waits of another client beside those at a server without the fault."""
    over = threading.Event()
    with serving({}) as alone, ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(poll, server.url, over) for server in (served, alone)]
        try:
            yield from findings
        finally:
            over.set()
        (here_s, errors), (elsewhere_s, _) = (client.result() for client in clients)
    text = (
        f"another client waited {1e3 * here_s:.0f} ms at most, and {1e3 * elsewhere_s:.0f} ms at a "
        "server without the fault"
    )
    yield text, here_s - elsewhere_s <= DELAY_S * (SLACK if short else 1)
    if errors:
        yield f"{len(errors)} × {errors[0]}", False


def poll(url: str, over: threading.Event) -> tuple[float, list[str]]:
    """Ask for /health and for five tokens in turn; return the longest wait, and errors."""
    longest_s, errors = 0.0, []
    for number in itertools.count():
        start = time.perf_counter()
        try:
            if number % 2:
                body = {"prompt": "hi", "num_tokens": 5, "seed": 1}
                post(f"{url}/inference", body, PATIENCE_S)
            else:
                get(f"{url}/health", PATIENCE_S)
        except ServerError as error:
            errors.append(str(error))
        longest_s = max(longest_s, time.perf_counter() - start)
        if over.wait(0.05):
            break
    return longest_s, errors


class Served(Launched):
    """A running server: the launcher's process, now gunicorn's master, and the worker's."""

    @property
    def worker(self) -> psutil.Process:
        return psutil.Process(get(self.url)["pids"][0])

    def address(self) -> tuple[str, int]:
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def metric(self, name: str) -> float:
        lines = get_text(f"{self.url}/metrics", PATIENCE_S).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    @property
    def running(self) -> float:
        return self.metric("vllm:num_requests_running")

    def is_free(self) -> bool:
        """No request is waiting or running, and no KV block is taken."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in names)

    def send_signal(self, number: int) -> None:
        """Signal the launcher, as an orchestrator does; SIGINT the group, as a terminal does."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def exit_code(self) -> int | None:
        """Return the launcher's exit code, once it has ended; None if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(PATIENCE_S)
        return None


@contextlib.contextmanager
def serving(settings: Settings, program: Sequence[str] = SERVER) -> Iterator[Served]:
    """A real server, on the fake model by default."""
    words = [*program]
    for name, value in ({"model": "fake"} | dict(settings)).items():
        words += as_flag(name, value)
    with launched(words) as server:
        wait_until_ready(server.process, server.url, PATIENCE_S)
        yield Served(*server)


def requests_of(n: int, num_tokens: int, a_second: float = 0.0) -> list[Request]:
    """n requests with prompts and seeds of their own: all at once, or so many per second."""
    gap_s = 1 / a_second if a_second else 0.0
    return [
        Request(id=i, at=i * gap_s, prompt=f"prompt {i}", num_tokens=num_tokens, seed=i)
        for i in range(n)
    ]


@contextlib.contextmanager
def replaying(
    served: Served, requests: Sequence[Request], timeout_s: float = PATIENCE_S
) -> Iterator[list[Outcome]]:
    """Replay requests beside the block; after it their outcomes are in the list."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(1) as thread:
        replayed = thread.submit(replay, served.url, requests, timeout_s=timeout_s)
        yield outcomes
    outcomes.extend(replayed.result())


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many were answered, and the errors of the others, in words."""
    errors = Counter(outcome.error.split(":")[0] for outcome in outcomes if outcome.error)
    text = f"{sum(outcome.answer is not None for outcome in outcomes)} of {len(outcomes)} answered"
    return text + "".join(f", {n} × {error.rstrip('.')}" for error, n in errors.items())


def all_answered(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.answer for outcome in outcomes)


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


def connect(served: Served, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(served.address(), timeout=PATIENCE_S)
    connection.sendall(data)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """All bytes until the other side closes, or breaks, the connection; then it is closed here."""
    received = b""
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1_000_000):
            received += data
    return received


def until(true: Callable[[], bool], patience_s: float = PATIENCE_S) -> float | None:
    """Seconds until it is true; None if it is not by then."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > patience_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - start


def after(seconds: float | None) -> str:
    """The result of `until` in words."""
    return "never" if seconds is None else f"after {seconds:.2f} s"
