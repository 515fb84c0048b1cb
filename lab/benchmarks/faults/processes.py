"""Signals, a killed worker, engines that fail, disks, clocks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from client.calls import ServerError, get, post
from client.load import replay
from client.outcomes import Outcome
from compare.servers import wait_until_ready
from lab.benchmarks.faults.connections import BODY
from lab.benchmarks.faults.tools import (
    PATIENCE_S,
    Fault,
    Finding,
    Served,
    after,
    all_answered,
    connect,
    replaying,
    requests_of,
    serving,
    summary,
    until,
)

FAULTY = ("-m", "lab.benchmarks.faulty", "dynamic")
TERM, INT = signal.SIGTERM, signal.SIGINT


@contextmanager
def in_flight(served: Served, n: int, tokens: int) -> Iterator[list[Outcome]]:
    """n requests that run when the block begins; after it their outcomes are in the list."""
    with replaying(served, requests_of(n, tokens)) as outcomes:
        until(lambda: served.running >= n)
        yield outcomes


def signalled(
    signals: Sequence[signal.Signals], answered: bool, served: Served, short: bool
) -> Iterator[Finding]:
    """Signals 0.1 s apart, as an orchestrator (SIGTERM) or a terminal (SIGINT, the group) does,
    beside a client that has sent half of a request.
    """
    with in_flight(served, 20, 900) as outcomes, connect(served, BODY):
        start = time.monotonic()
        for i, number in enumerate(signals):
            time.sleep(0.1 if i else 0.0)  # later it might have ended already
            served.send_signal(number)
        code = served.exit_code()
        seconds = time.monotonic() - start
    yield summary(outcomes), all(bool(outcome.answer) == answered for outcome in outcomes)
    yield f"exit code {code} after {seconds:.1f} s", code == 0
    if "Traceback" in served.output:
        yield "a traceback", False


def killed(short: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        with serving({"request_log": str(path)}) as served:
            replay(served.url, requests_of(20, 5))
            worker = served.worker
            with in_flight(served, 20, 900) as outcomes:
                start = time.monotonic()
                worker.kill()
            ended_s = time.monotonic() - start
            wait_until_ready(served.process, served.url, PATIENCE_S)
            ready_s = time.monotonic() - start
            post(f"{served.url}/inference", {"prompt": "hi", "num_tokens": 5})
            until(lambda: path.read_bytes().count(b"\n") >= 21, 5)
        *lines, rest = path.read_bytes().split(b"\n")
    lost = not any(outcome.answer for outcome in outcomes)
    yield f"{summary(outcomes)}, within {ended_s:.1f} s", ended_s < 5 and lost
    yield f"ready again after {ready_s:.1f} s", True
    torn = sum(not _is_json(line) for line in lines) + bool(rest)
    yield f"{len(lines)} lines of the request log, {torn} torn", len(lines) >= 21 and not torn


def failing_now_and_then(served: Served, short: bool) -> Iterator[Finding]:
    outcomes = replay(served.url, requests_of(100 if short else 500, 4, a_second=50))
    failed = [outcome.error for outcome in outcomes if outcome.error]
    few = 0 < len(failed) < len(outcomes) / 2
    yield summary(outcomes), few and all(error.startswith("500 ") for error in failed)
    ready = get(f"{served.url}/ready")["status"]
    yield f"then it is {ready}", ready == "ready" and until(served.is_free) is not None


def failing_for_good(served: Served, short: bool) -> Iterator[Finding]:
    outcomes = replay(served.url, requests_of(40, 4, a_second=20), timeout_s=PATIENCE_S)
    yield summary(outcomes), not any(outcome.answer for outcome in outcomes)
    code = served.exit_code()
    yield f"exit code {code}", code == 3
    sentences = [line for line in served.output.splitlines() if "in a row" in line] or ["nothing"]
    text = sentences[-1].split("ERROR")[-1].strip()[:160]
    yield f"its last words: {text}", "in a row" in text


def hanging(served: Served, short: bool) -> Iterator[Finding]:
    outcomes = replay(served.url, requests_of(10, 100), timeout_s=PATIENCE_S)
    late = sum(outcome.error.startswith("504 ") for outcome in outcomes)
    health = get(f"{served.url}/health")["status"]
    yield f"{summary(outcomes)} (2 s); /health {health}", late == 10
    if not short:
        noticed = until(lambda: not _is_ready(served), 70)
        yield f"/ready 503 {after(noticed)}", noticed is not None
    served.send_signal(INT)
    code = served.exit_code()
    yield f"Ctrl-C: exit code {code}", code == 0


def _is_ready(served: Served) -> bool:
    try:
        get(f"{served.url}/ready")
    except ServerError:
        return False
    return True


def full_disk(served: Served, short: bool) -> Iterator[Finding]:
    outcomes = replay(served.url, requests_of(100, 5, a_second=100))
    yield summary(outcomes), all_answered(outcomes)
    served.send_signal(INT)
    code, output = served.exit_code(), served.output
    warned = "No space left" in output and "lines were lost" in output
    yield f"the server {'says' if warned else 'does not say'} that lines are lost", warned
    yield f"exit code {code}", code == 0


def slow_reader_of_the_log(short: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder) / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with serving({"request_log": str(path)}) as served, open(reader, "rb") as pipe:
            outcomes = replay(served.url, requests_of(60, 400))  # more bytes than a pipe holds
            os.set_blocking(reader, True)
            received = thread.submit(pipe.read)
            served.send_signal(INT)
            code = served.exit_code()
            lines = received.result().splitlines()
    torn, mean = sum(not _is_json(line) for line in lines), sum(map(len, lines)) // len(lines)
    yield summary(outcomes), all_answered(outcomes)
    yield f"{len(lines)} lines of {mean:,} bytes, {torn} torn", len(lines) == 60 and not torn
    yield f"exit code {code}", code == 0


def _is_json(line: bytes) -> bool:
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


def jumping_clock(served: Served, short: bool) -> Iterator[Finding]:
    requests = requests_of(40 if short else 200, 100, a_second=8)
    outcomes = replay(served.url, requests)
    yield summary(outcomes), all_answered(outcomes)
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    slowest_s = get(f"{served.url}/stats")["max_e2el_ms"] / 1e3
    here_s = max(answer.e2e_s for answer in answers)
    text = f"slowest {here_s:.2f} s here, {slowest_s:.2f} s there"
    yield text, abs(here_s - slowest_s) < 1
    arrived = [answer.timings["arrived_at"] for answer in answers if answer.timings]
    # on a busy machine a thread may overtake another one by less than a second
    in_order = all(later > earlier - 1 for earlier, later in itertools.pairwise(arrived))
    in_order &= arrived[-1] - arrived[0] < requests[-1].at + 5
    yield f"arrivals {'in' if in_order else 'out of'} order", in_order


ANSWERED = "requests in flight are answered; exit code 0"
INTERRUPTED = "requests in flight get an error at once; exit code 0, no traceback"
ENDS = "every request gets an error; it ends with a sentence and an exit code other than 0"
FAULTS = [
    Fault("SIGTERM under load", ANSWERED, partial(signalled, [TERM], True)),
    Fault("SIGTERM twice under load", "the same", partial(signalled, [TERM] * 2, True)),
    Fault("Ctrl-C under load", INTERRUPTED, partial(signalled, [INT], False)),
    Fault("Ctrl-C twice under load", "the same", partial(signalled, [INT] * 2, False)),
    Fault("kill -9 of the worker under load",
          "its clients get an error at once; it is ready again by itself; no line of the request "
          "log is torn",
          killed, None),
    Fault("the engine fails in every 20th iteration",
          "requests in it get 500, the others their answer; it stays ready",
          failing_now_and_then, {"fault": "raise:20"}, FAULTY),
    Fault("the engine fails in every iteration", ENDS,
          failing_for_good, {"fault": "raise:1"}, FAULTY),
    Fault("the engine runs out of memory for good", "the same",
          failing_for_good, {"fault": "oom:1"}, FAULTY),
    Fault("an iteration never ends",
          "deadlines hold; /ready says so within 70 s; Ctrl-C ends it",
          hanging, {"fault": "hang:20", "request_timeout_s": 2}, FAULTY),
    Fault("the request log's disk is full", "serving goes on; the loss is reported",
          full_disk, {"request_log": "/dev/full"}),
    Fault("the request log's reader stands still, then goes on",
          "serving goes on; lines of over 4,096 bytes come whole",
          slow_reader_of_the_log, None),
    Fault("the wall clock jumps by an hour and back", "no latency, order or deadline changes",
          jumping_clock, {"fault": "clock:3600", "request_timeout_s": 30}, FAULTY),
]  # fmt: skip
