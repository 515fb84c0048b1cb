"""Signals, a killed worker, engines that fail, disks and clocks, done to real servers. In full
size: results/faults.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from client.calls import get, post
from client.load import replay
from compare.servers import wait_until_ready
from lab.tests.faults.served import connect, errors, in_flight, requests_of, serving
from lab.tests.faults.test_connections import BODY
from tests.servers import PATIENCE_S, wait_until, wait_until_free

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(("signals", "answered"), [
    ([TERM], True), pytest.param([TERM] * 2, True, marks=pytest.mark.nightly),
    ([INT], False), pytest.param([INT] * 2, False, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_signal_under_load(signals: Sequence[signal.Signals], answered: bool) -> None:
    """Requests in flight are answered after SIGTERM, and get an error at once after Ctrl-C, beside
    a client that has sent half of a request.
    """
    with serving() as served:
        with in_flight(served, 20, 900) as outcomes, connect(served, BODY):
            for i, number in enumerate(signals):
                time.sleep(0.1 if i else 0.0)  # later it might have ended already
                served.send_signal(number)
            assert served.exit_code() == 0
        assert len(errors(outcomes)) == (0 if answered else 20)
        assert "Traceback" not in served.output


def test_a_killed_worker_under_load(tmp_path: Path, http_processes: int) -> None:
    """Its clients get an error at once, and those of other HTTP processes their answers; the server
    is ready again by itself; no line of the request log is torn.
    """
    path = tmp_path / "requests.jsonl"
    with serving(request_log=str(path)) as served:
        replay(served.url, requests_of(20, 5))
        worker = served.workers[0]
        with in_flight(served, 20, 900) as outcomes:
            start = time.monotonic()
            worker.kill()
        failed = len(errors(outcomes))
        assert time.monotonic() - start < 5
        assert failed == 20 if http_processes == 1 else 0 < failed < 20
        wait_until_ready(served.process, served.url, PATIENCE_S)
        post(f"{served.url}/inference", {"prompt": "hi", "num_tokens": 5})
        wait_until(lambda: path.read_bytes().count(b"\n") >= 21, 5)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_engine_fails_in_every_20th_iteration() -> None:
    """Requests in it get 500, the others their answer; the server stays ready."""
    with serving("raise:20") as served:
        outcomes = replay(served.url, requests_of(100, 4, a_second=50))
        failed = errors(outcomes)
        assert 0 < len(failed) < 50 and all(error.startswith("500 ") for error in failed)
        assert get(f"{served.url}/ready")["status"] == "ready"
        wait_until_free(served.url)


@pytest.mark.parametrize("fault", ["raise:1", pytest.param("oom:1", marks=pytest.mark.nightly)])
def test_the_engine_fails_for_good(fault: str) -> None:
    """Every request gets an error; the server ends with a sentence, and exit code 3."""
    with serving(fault) as served:
        outcomes = replay(served.url, requests_of(40, 4, a_second=20), timeout_s=PATIENCE_S)
        assert len(errors(outcomes)) == 40
        assert served.exit_code() == 3
        assert "the server ends: 3 iterations in a row failed" in served.output


@pytest.mark.nightly
def test_an_iteration_never_ends() -> None:
    """Deadlines hold, and Ctrl-C ends the server."""
    with serving("hang:20", request_timeout_s=2) as served:
        failed = errors(replay(served.url, requests_of(10, 100), timeout_s=PATIENCE_S))
        assert len(failed) == 10 and all(error.startswith("504 ") for error in failed)
        assert get(f"{served.url}/health")["status"] == "ok"
        served.send_signal(INT)
        assert served.exit_code() == 0


@pytest.mark.nightly
def test_the_request_logs_disk_is_full() -> None:
    """Serving goes on; the loss is reported."""
    with serving(request_log="/dev/full") as served:
        assert not errors(replay(served.url, requests_of(100, 5, a_second=100)))
        served.send_signal(INT)
        assert served.exit_code() == 0
        assert "No space left" in served.output and "lines were lost" in served.output


@pytest.mark.nightly
def test_the_request_logs_reader_stands_still_then_goes_on(tmp_path: Path) -> None:
    """Serving goes on; lines of over 4,096 bytes come whole."""
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with (
        ThreadPoolExecutor(1) as thread, open(reader, "rb") as pipe,
        serving(request_log=str(path)) as served,
    ):  # fmt: skip
        assert not errors(replay(served.url, requests_of(60, 400)))  # more than a pipe holds
        os.set_blocking(reader, True)
        received = thread.submit(pipe.read)
        served.send_signal(INT)
        assert served.exit_code() == 0
        lines = received.result().splitlines()
    assert len(lines) == 60 and all(json.loads(line) for line in lines)
    assert sum(map(len, lines)) > 60 * 4096


@pytest.mark.nightly
def test_the_wall_clock_jumps_by_an_hour_and_back() -> None:
    """No latency, order or deadline changes."""
    with serving("clock:3600", request_timeout_s=30) as served:
        outcomes = replay(served.url, requests := requests_of(40, 100, a_second=8))
        slowest_s = get(f"{served.url}/stats")["max_e2el_ms"] / 1e3
    answers = [outcome for outcome in outcomes if not outcome.error]
    assert len(answers) == 40
    assert abs(max(answer.e2e_s for answer in answers) - slowest_s) < 1
    arrived = [answer.timings["arrived_at"] for answer in answers if answer.timings]
    # on a busy machine a thread may overtake another one by less than a second
    assert all(later > earlier - 1 for earlier, later in itertools.pairwise(arrived))
    assert arrived[-1] - arrived[0] < requests[-1].at + 5
