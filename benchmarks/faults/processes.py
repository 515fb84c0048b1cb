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

from benchmarks.faults.tools import PATIENCE_S, Seen, Served, asks, fault, serving, told, until
from client.calls import ServerError, get, post
from client.load import replay
from client.outcomes import Outcome
from compare.servers import wait_until_ready

FAULTY = ("-m", "benchmarks.faulty", "dynamic")
TERM, INT = signal.SIGTERM, signal.SIGINT


@contextmanager
def in_flight(served: Served, n: int, tokens: int) -> Iterator[list[Outcome]]:
    """n requests that run while the block does; after it their outcomes are in the list."""
    outcomes: list[Outcome] = []
    requests = asks(n, tokens)
    thread = threading.Thread(
        target=lambda: outcomes.extend(replay(served.url, requests, timeout_s=PATIENCE_S))
    )
    thread.start()
    until(lambda: served.metric("vllm:num_requests_running") >= n)
    try:
        yield outcomes
    finally:
        thread.join()


def signalled(*signals: signal.Signals, answered: bool) -> Callable[[bool], Seen]:
    """Signals 0.1 s apart, as an orchestrator (SIGTERM) or a terminal (SIGINT, the group) does."""

    def run(short: bool) -> Seen:
        with serving({}) as served:
            with in_flight(served, 20, 900) as outcomes:
                start = time.monotonic()
                for i, number in enumerate(signals):
                    time.sleep(0.1 if i else 0.0)  # later it might have ended already
                    (os.killpg if number == INT else os.kill)(served.process.pid, number)
                code = served.exit_code()
                seconds = time.monotonic() - start
            quiet = "Traceback" not in served.said
        kept = code == 0 and quiet and all(bool(outcome.answer) == answered for outcome in outcomes)
        text = f"{told(outcomes)}; exit code {code} after {seconds:.1f} s"
        return Seen(text if quiet else f"{text}, with a traceback", kept)

    return run


fault("SIGTERM under load", "who is in flight is answered; exit code 0")(
    signalled(TERM, answered=True)
)
fault("SIGTERM twice under load", "the same")(signalled(TERM, TERM, answered=True))
at_once = "who is in flight gets an error at once; exit code 0, no traceback"
fault("Ctrl-C under load", at_once)(signalled(INT, answered=False))
fault("Ctrl-C twice under load", "the same")(signalled(INT, INT, answered=False))


@fault(
    "kill -9 of the worker under load",
    "its clients are told at once; it is ready again by itself; no line of the request log is torn",
)
def killed(short: bool) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        with serving({"request_log": str(path)}) as served:
            replay(served.url, asks(20, 5))
            worker = served.worker
            with in_flight(served, 20, 900) as outcomes:
                start = time.monotonic()
                worker.kill()
            told_s = time.monotonic() - start
            wait_until_ready(served.process, served.url, PATIENCE_S)
            ready_s = time.monotonic() - start
            post(f"{served.url}/inference", {"prompt": "hi", "num_tokens": 5})
            until(lambda: path.read_bytes().count(b"\n") >= 21, 5)
        lines = path.read_bytes().split(b"\n")
    whole = lines.pop() == b"" and all(map(_is_json, lines))
    text = f"{told(outcomes)}, within {told_s:.1f} s; ready again after {ready_s:.1f} s; "
    text += f"{len(lines)} lines of the request log, {'all' if whole else 'not all'} whole"
    return Seen(
        text, whole and len(lines) >= 21 and told_s < 5 and not any(o.answer for o in outcomes)
    )


@fault(
    "the engine fails in every 20th iteration",
    "those in it get 500, the others their answer; it stays ready",
)
def failing_now_and_then(short: bool) -> Seen:
    with serving({"fault": "raise:20"}, FAULTY) as served:
        outcomes = replay(served.url, asks(100 if short else 500, 4, a_second=50))
        ready, freed = get(f"{served.url}/ready")["status"], until(served.is_free)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    right = 0 < len(failed) < len(outcomes) / 2 and all(
        error.startswith("500 ") for error in failed
    )
    return Seen(
        f"{told(outcomes)}; then it is {ready}", ready == "ready" and freed is not None and right
    )


def failing_for_good(kind: str) -> Callable[[bool], Seen]:
    """The engine fails in every iteration, in this way."""

    def run(short: bool) -> Seen:
        with serving({"fault": f"{kind}:1"}, FAULTY) as served:
            outcomes = replay(served.url, asks(40, 4, a_second=20), timeout_s=PATIENCE_S)
            code = served.exit_code()
            sentences = [line for line in served.said.splitlines() if "in a row" in line]
        kept = (
            code not in (0, None)
            and bool(sentences)
            and not any(outcome.answer for outcome in outcomes)
        )
        said = sentences[-1].split("ERROR")[-1].strip()[:160] if sentences else "nothing"
        return Seen(f"{told(outcomes)}; exit code {code}; it said: {said}", kept)

    return run


ends = "everybody gets an error; it ends with a sentence and an exit code other than 0"
fault("the engine fails in every iteration", ends)(failing_for_good("raise"))
fault("the engine runs out of memory for good", "the same")(failing_for_good("oom"))


@fault("an iteration never ends", "deadlines hold; /ready says so within 70 s; Ctrl-C ends it")
def hanging(short: bool) -> Seen:
    with serving({"fault": "hang:20", "request_timeout_s": 2}, FAULTY) as served:
        start = time.monotonic()
        outcomes = replay(served.url, asks(10, 100), timeout_s=PATIENCE_S)
        health = get(f"{served.url}/health")["status"]
        text = f"{told(outcomes)} (2 s); /health {health}"
        stalled = short or until(lambda: not _is_ready(served), 70)
        if not short:
            end = f"503 after {time.monotonic() - start:.0f} s" if stalled else "stays 200"
            text += f"; /ready {end}"
        os.killpg(served.process.pid, INT)
        code = served.exit_code()
    late = sum(outcome.error.startswith("504 ") for outcome in outcomes)
    return Seen(f"{text}; Ctrl-C: exit code {code}", bool(late == 10 and code == 0 and stalled))


def _is_ready(served: Served) -> bool:
    try:
        get(f"{served.url}/ready")
    except ServerError:
        return False
    return True


@fault("the request log's disk is full", "serving goes on; the loss is said")
def full_disk(short: bool) -> Seen:
    with serving({"request_log": "/dev/full"}) as served:
        outcomes = replay(served.url, asks(100, 5, a_second=100))
        os.killpg(served.process.pid, INT)
        code, said = served.exit_code(), served.said
    warned = "No space left" in said and "lines were lost" in said
    text = (
        f"{told(outcomes)}; the server {'says' if warned else 'does not say'} "
        f"that lines are lost; exit code {code}"
    )
    return Seen(text, warned and code == 0 and all(outcome.answer for outcome in outcomes))


@fault(
    "the request log's reader stands still, then goes on",
    "serving goes on; lines of over 4,096 bytes come whole",
)
def slow_reader_of_the_log(short: bool) -> Seen:
    found = bytearray()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with serving({"request_log": str(path)}) as served:
            outcomes = replay(served.url, asks(60, 400))  # more bytes than a pipe holds
            os.set_blocking(reader, True)
            reading = threading.Thread(target=lambda: found.extend(_read(reader)))
            reading.start()
            os.killpg(served.process.pid, INT)
            code = served.exit_code()
        reading.join()
        os.close(reader)
    lines = bytes(found).splitlines()
    torn = sum(not _is_json(line) for line in lines)
    length = len(found) // max(1, len(lines))
    text = (
        f"{told(outcomes)}; {len(lines)} lines of some {length:,} bytes, {torn} torn; "
        f"exit code {code}"
    )
    return Seen(
        text, len(lines) == 60 and not torn and code == 0 and all(o.answer for o in outcomes)
    )


def _read(descriptor: int) -> bytes:
    found = b""
    while data := os.read(descriptor, 1_000_000):
        found += data
    return found


def _is_json(line: bytes) -> bool:
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


@fault("the wall clock jumps by an hour and back", "no latency, order or deadline changes")
def jumping_clock(short: bool) -> Seen:
    with serving({"fault": "clock:3600", "request_timeout_s": 30}, FAULTY) as served:
        requests = asks(40 if short else 200, 100, a_second=8)
        outcomes = replay(served.url, requests)
        slowest_s = get(f"{served.url}/stats")["max_e2el_ms"] / 1e3
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    arrived = [answer.timings["arrived_at"] for answer in answers if answer.timings]
    # on a busy machine a thread may overtake another one by less than a second
    in_order = all(later > earlier - 1 for earlier, later in itertools.pairwise(arrived))
    in_order &= arrived[-1] - arrived[0] < requests[-1].at + 5
    here_s = max(answer.e2e_s for answer in answers)
    text = f"{told(outcomes)}; slowest {here_s:.2f} s here, {slowest_s:.2f} s there; "
    text += f"arrivals {'in' if in_order else 'out of'} order"
    return Seen(text, len(answers) == len(outcomes) and in_order and abs(here_s - slowest_s) < 1)
