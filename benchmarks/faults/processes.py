"""Signals, a killed worker, engines that fail, disks, clocks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.tools import (
    PATIENCE_S,
    Fault,
    Seen,
    Served,
    all_answered,
    replaying,
    requests_of,
    serving,
    summary,
    until,
)
from client.calls import ServerError, get, post
from client.load import replay
from client.outcomes import Outcome
from compare.servers import wait_until_ready

FAULTY = ("-m", "benchmarks.faulty", "dynamic")
TERM, INT = signal.SIGTERM, signal.SIGINT


@contextmanager
def in_flight(served: Served, n: int, tokens: int) -> Iterator[list[Outcome]]:
    """n requests that run when the block begins; after it their outcomes are in the list."""
    with replaying(served, requests_of(n, tokens)) as outcomes:
        until(lambda: served.running >= n)
        yield outcomes


def signalled(*signals: signal.Signals, answered: bool) -> Callable[[Served, bool], Seen]:
    """Signals 0.1 s apart, as an orchestrator (SIGTERM) or a terminal (SIGINT, the group) does."""

    def do(served: Served, short: bool) -> Seen:
        with in_flight(served, 20, 900) as outcomes:
            start = time.monotonic()
            for i, number in enumerate(signals):
                time.sleep(0.1 if i else 0.0)  # later it might have ended already
                served.send_signal(number)
            code = served.exit_code()
            seconds = time.monotonic() - start
        quiet = "Traceback" not in served.output
        text = f"{summary(outcomes)}; exit code {code} after {seconds:.1f} s"
        text += "" if quiet else ", with a traceback"
        expected = all(bool(outcome.answer) == answered for outcome in outcomes)
        return Seen(text, code == 0 and quiet and expected)

    return do


def killed(short: bool) -> Seen:
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
        lines = path.read_bytes().split(b"\n")
    whole = lines.pop() == b"" and all(map(_is_json, lines))
    text = f"{summary(outcomes)}, within {ended_s:.1f} s; ready again after {ready_s:.1f} s; "
    text += f"{len(lines)} lines of the request log, {'all' if whole else 'not all'} whole"
    none_answered = not any(outcome.answer for outcome in outcomes)
    return Seen(text, whole and len(lines) >= 21 and ended_s < 5 and none_answered)


def failing_now_and_then(served: Served, short: bool) -> Seen:
    outcomes = replay(served.url, requests_of(100 if short else 500, 4, a_second=50))
    ready, freed = get(f"{served.url}/ready")["status"], until(served.is_free)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    right = 0 < len(failed) < len(outcomes) / 2 and all(e.startswith("500 ") for e in failed)
    kept = ready == "ready" and freed is not None and right
    return Seen(f"{summary(outcomes)}; then it is {ready}", kept)


def failing_for_good(served: Served, short: bool) -> Seen:
    outcomes = replay(served.url, requests_of(40, 4, a_second=20), timeout_s=PATIENCE_S)
    code = served.exit_code()
    sentences = [line for line in served.output.splitlines() if "in a row" in line]
    sentence = sentences[-1].split("ERROR")[-1].strip()[:160] if sentences else "nothing"
    text = f"{summary(outcomes)}; exit code {code}; it said: {sentence}"
    none_answered = not any(outcome.answer for outcome in outcomes)
    return Seen(text, code not in (0, None) and bool(sentences) and none_answered)


def hanging(served: Served, short: bool) -> Seen:
    start = time.monotonic()
    outcomes = replay(served.url, requests_of(10, 100), timeout_s=PATIENCE_S)
    health = get(f"{served.url}/health")["status"]
    text = f"{summary(outcomes)} (2 s); /health {health}"
    noticed = short or until(lambda: not _is_ready(served), 70) is not None
    if not short:
        end = f"503 after {time.monotonic() - start:.0f} s" if noticed else "stays 200"
        text += f"; /ready {end}"
    served.send_signal(INT)
    code = served.exit_code()
    late = sum(outcome.error.startswith("504 ") for outcome in outcomes)
    return Seen(f"{text}; Ctrl-C: exit code {code}", late == 10 and code == 0 and noticed)


def _is_ready(served: Served) -> bool:
    try:
        get(f"{served.url}/ready")
    except ServerError:
        return False
    return True


def full_disk(served: Served, short: bool) -> Seen:
    outcomes = replay(served.url, requests_of(100, 5, a_second=100))
    served.send_signal(INT)
    code, output = served.exit_code(), served.output
    warned = "No space left" in output and "lines were lost" in output
    text = (
        f"{summary(outcomes)}; the server {'says' if warned else 'does not say'} "
        f"that lines are lost; exit code {code}"
    )
    return Seen(text, warned and code == 0 and all_answered(outcomes))


def slow_reader_of_the_log(short: bool) -> Seen:
    received = bytearray()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with serving({"request_log": str(path)}) as served:
            outcomes = replay(served.url, requests_of(60, 400))  # more bytes than a pipe holds
            os.set_blocking(reader, True)
            reading = threading.Thread(target=lambda: received.extend(_read(reader)))
            reading.start()
            served.send_signal(INT)
            code = served.exit_code()
        reading.join()
        os.close(reader)
    lines = bytes(received).splitlines()
    torn = sum(not _is_json(line) for line in lines)
    text = (
        f"{summary(outcomes)}; {len(lines)} lines of some "
        f"{len(received) // max(1, len(lines)):,} bytes, {torn} torn; exit code {code}"
    )
    return Seen(text, len(lines) == 60 and not torn and code == 0 and all_answered(outcomes))


def _read(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 1_000_000), b""))


def _is_json(line: bytes) -> bool:
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


def jumping_clock(served: Served, short: bool) -> Seen:
    requests = requests_of(40 if short else 200, 100, a_second=8)
    outcomes = replay(served.url, requests)
    slowest_s = get(f"{served.url}/stats")["max_e2el_ms"] / 1e3
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    arrived = [answer.timings["arrived_at"] for answer in answers if answer.timings]
    # on a busy machine a thread may overtake another one by less than a second
    in_order = all(later > earlier - 1 for earlier, later in itertools.pairwise(arrived))
    in_order &= arrived[-1] - arrived[0] < requests[-1].at + 5
    here_s = max(answer.e2e_s for answer in answers)
    text = f"{summary(outcomes)}; slowest {here_s:.2f} s here, {slowest_s:.2f} s there; "
    text += f"arrivals {'in' if in_order else 'out of'} order"
    return Seen(text, all_answered(outcomes) and in_order and abs(here_s - slowest_s) < 1)


ANSWERED = "requests in flight are answered; exit code 0"
INTERRUPTED = "requests in flight get an error at once; exit code 0, no traceback"
ENDS = "every request gets an error; it ends with a sentence and an exit code other than 0"
FAULTS = [
    Fault("SIGTERM under load", ANSWERED, signalled(TERM, answered=True)),
    Fault("SIGTERM twice under load", "the same", signalled(TERM, TERM, answered=True)),
    Fault("Ctrl-C under load", INTERRUPTED, signalled(INT, answered=False)),
    Fault("Ctrl-C twice under load", "the same", signalled(INT, INT, answered=False)),
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
