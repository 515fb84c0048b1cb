"""Real servers for the tests: gunicorn on a free port, stopped whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient

from client.calls import get_text
from client.outcomes import Outcome
from client.traces import Request
from compare.servers import server, wait_until_ready
from config.ports import free_ports
from generate.fake import token

ROOT = Path(__file__).resolve().parents[1]

__all__ = [
    "PATIENCE_S", "ROOT", "ClientOf", "Serve", "asks", "assert_all_answered", "fake_text",
    "free_port", "has_traceback", "launched", "metric", "scrape", "server", "started",
    "wait_until", "wait_until_free",
]  # fmt: skip

PATIENCE_S = 60
# server, and the fixture shared_server
Serve = Callable[[str, Mapping[str, Any]], contextlib.AbstractContextManager[str]]
ClientOf = Callable[..., FlaskClient]  # the fixture client_of


def asks(n: int, num_tokens: int, prompt: str = "one two three") -> list[Request]:
    return [
        Request(id=i, at=0, prompt=f"{prompt} {i}", num_tokens=num_tokens, seed=i) for i in range(n)
    ]


def fake_text(request: Request) -> str:
    """Return the fake model's completion."""
    ids, seed = request.prompt_ids or list(str(request.prompt).encode()), request.seed or 0
    return bytes(token(ids, seed, i) for i in range(request.num_tokens)).decode()


def assert_all_answered(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes if outcome.error] == []


def scrape(url: str) -> str:
    """The text of a server's /metrics."""
    return get_text(f"{url}/metrics")


def wait_until(
    true: Callable[[], bool], patience_s: float = PATIENCE_S, every_s: float = 0.002
) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(every_s)


def metric(url: str, name: str) -> float:
    return next(
        float(line.split()[-1]) for line in scrape(url).splitlines() if line.startswith(name)
    )


def wait_until_free(url: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until no row and no block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_until(lambda: not any(metric(url, f"vllm:{name}") for name in names), patience_s, 0.05)


@contextlib.contextmanager
def launched(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, with its output; what still runs at the end is killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def free_port() -> int:
    return free_ports(1)[0]


@contextlib.contextmanager
def started(*flags: str, mode: str = "dynamic") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of a ready server of the fake model, with its output."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "launch.py", mode, "--model", "fake", "--port", str(port), *flags]
    with launched(*command) as process:
        wait_until_ready(process, url)
        yield url, process


def has_traceback(process: subprocess.Popen[str]) -> bool:
    """Return whether the rest of its output has one."""
    return "Traceback" in (process.stdout.read() if process.stdout else "")
