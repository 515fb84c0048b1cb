"""Servers for the tests, stopped whatever happens; engines and readers of streams for them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import psutil
from flask.testing import FlaskClient

from client.calls import get_text
from client.outcomes import Outcome
from client.traces import Request
from compare.servers import server as server
from compare.servers import wait_until_ready
from config.config import free_port as free_port
from scheduling.inference import Generator, Iteration

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60
# server, and the fixture shared_server
Serve = Callable[[str, Mapping[str, Any]], contextlib.AbstractContextManager[str]]
ClientOf = Callable[..., FlaskClient]  # the fixture client_of


def asks(n: int, num_tokens: int, prompt: str = "one two three") -> list[Request]:
    return [
        Request(id=i, at=0, prompt=f"{prompt} {i}", num_tokens=num_tokens, seed=i) for i in range(n)
    ]


def assert_all_answered(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes if outcome.error] == []


def wait_until(
    what: Callable[[], Any], patience_s: float = PATIENCE_S, every_s: float = 0.002
) -> Any:
    """Return the result of `what`, once it is true."""
    end = time.monotonic() + patience_s
    while not (result := what()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(every_s)
    return result


def scrape(url: str) -> str:
    """The text of a server's /metrics."""
    return get_text(f"{url}/metrics")


def metric(url: str, name: str) -> float:
    lines = scrape(url).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def wait_until_free(url: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until no row and no block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_until(lambda: not any(metric(url, f"vllm:{name}") for name in names), patience_s, 0.05)


def processes_with(name: str, value: str) -> list[list[str]]:
    """Commands of the processes that run with this variable in their environment."""
    infos = (process.info for process in psutil.process_iter(["environ", "cmdline"]))
    return [info["cmdline"] for info in infos if (info["environ"] or {}).get(name) == value]


@contextlib.contextmanager
def launched(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, with its output; what still runs at the end is killed."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=both, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextlib.contextmanager
def started(*flags: str, mode: str = "dynamic") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of a ready server of the fake model, with its output."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = f"-m server.launch {mode} --model fake --port {port}"
    command = [sys.executable, *words.split(), *flags]
    with launched(*command) as process:
        wait_until_ready(process, url)
        yield url, process


def events(raw: bytes) -> list[Any]:
    """The JSON of every event of a whole stream, which must end with [DONE]."""
    *blocks, done, rest = raw.split(b"\n\n")
    assert done == b"data: [DONE]" and rest == b"", raw[-200:]
    assert raw.isascii(), "some clients take U+2028 for the end of a line"
    assert all(re.fullmatch(b"data: [^\r\n]+", block) for block in blocks), raw
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


class Spelling(Generator):
    """Spells the same ids for each request, again and again; while `fails`, every iteration raises.

    gated: an iteration releases `started`, and waits for a release of `go`.
    """

    def __init__(self, text: Sequence[int] = ascii_lowercase.encode(), gated: bool = False) -> None:
        self.text, self.gated = text, gated
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.fails = False

    def generate(self, iteration: Iteration) -> list[int]:
        self.started.release()
        assert not self.gated or self.go.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise RuntimeError("no luck")
        sampled = [row.inference for row in iteration.rows if row.samples]
        return [self.text[len(each.tokens) % len(self.text)] for each in sampled]


def read_to_end(connection: socket.socket) -> bytes:
    """All bytes until the other side closes, or breaks, the connection; then it is closed here."""
    received = b""
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1_000_000):
            received += data
    return received


def children(process: subprocess.Popen[Any], word: str) -> list[psutil.Process]:
    """Processes of a server that live and have this word in their command."""
    found = []
    for each in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            found += [each] if word in each.cmdline() else []
    return found
