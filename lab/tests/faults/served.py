"""A server that faults are done to, and a client beside a fault whose waits are measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from client.calls import get, post
from client.load import replay
from client.outcomes import Outcome
from client.traces import Request
from compare.servers import ALONE, Launched, as_flag, launched, wait_until_ready
from tests.servers import PATIENCE_S, children, metric, wait_until

# what a fault may make another client wait, beyond its waits at a server without the fault, on a
# machine that runs other tests
DELAY_S = 0.5
CLOSE = "Connection: close\r\n"


class Served(Launched):
    """A running server: the launcher's process, now gunicorn's master, and its workers'."""

    @property
    def workers(self) -> list[psutil.Process]:
        return children(self.process, "gunicorn")

    def address(self) -> tuple[str, int]:
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    @property
    def running(self) -> float:
        return metric(self.url, "vllm:num_requests_running")

    def send_signal(self, number: int) -> None:
        """Signal the launcher, as an orchestrator does; SIGINT the group, as a terminal does."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(fault: str = "", **settings: Any) -> Iterator[Served]:
    """A real server on the fake model. fault: one of faulty.py."""
    words = ["-m", "lab.tests.faults.faulty", fault] if fault else [*ALONE]
    words.append("dynamic")
    for name, value in ({"model": "fake"} | settings).items():
        words += as_flag(name, value)
    with launched(words) as server:
        wait_until_ready(server.process, server.url, PATIENCE_S)
        yield Served(*server)


@contextlib.contextmanager
def beside_a_client(**settings: Any) -> Iterator[Served]:
    """A server of which another client is served meanwhile, about as soon as of one without the
    fault.
    """
    over = threading.Event()
    with serving(**settings) as served, serving() as alone, ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(longest_wait_s, each.url, over) for each in (served, alone)]
        try:
            yield served
        finally:
            over.set()
        here_s, elsewhere_s = (client.result() for client in clients)
    assert here_s - elsewhere_s <= DELAY_S


def longest_wait_s(url: str, over: threading.Event) -> float:
    """Ask for /health and for five tokens in turn."""
    longest = 0.0
    for number in itertools.count():
        start = time.perf_counter()
        if number % 2:
            post(f"{url}/inference", {"prompt": "hi", "num_tokens": 5, "seed": 1}, PATIENCE_S)
        else:
            get(f"{url}/health", PATIENCE_S)
        longest = max(longest, time.perf_counter() - start)
        if over.wait(0.05):
            break
    return longest


def requests_of(n: int, num_tokens: int, a_second: float = 0.0) -> list[Request]:
    """n requests with prompts and seeds of their own: all at once, or so many per second."""
    gap_s = 1 / a_second if a_second else 0.0
    return [
        Request(id=i, at=i * gap_s, prompt=f"prompt {i}", num_tokens=num_tokens, seed=i)
        for i in range(n)
    ]


@contextlib.contextmanager
def in_flight(served: Served, n: int, tokens: int) -> Iterator[list[Outcome]]:
    """n requests that run when the block begins; after it their outcomes are in the list."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(1) as thread:
        replayed = thread.submit(replay, served.url, requests_of(n, tokens), timeout_s=PATIENCE_S)
        wait_until(lambda: served.running >= n)
        yield outcomes
    outcomes.extend(replayed.result())


def errors(outcomes: Sequence[Outcome]) -> list[str]:
    """What was said to each request that has no answer."""
    return [outcome.error for outcome in outcomes if outcome.error]


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
