"""A real server and clients as they should not be: slow, many, half; and the same server's way to
its end. (What thousands do to it is benchmarks/faults, whose short form runs in tests/benchmarks.)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import pytest

from client.calls import get
from compare.servers import wait_until_ready
from config import HANDOFF, MAX_BODY_BYTES, SPARE_FILES, build
from server.http.connections import Connection, in_turn
from server.http.worker import Worker
from tests.server.http.test_server import HEAD, connect, ended, posted
from tests.servers import PATIENCE_S, ROOT, free_port, launched, server, started, wait_until

# for /health beside any fault: what the system takes to repeat a packet that it dropped, and some;
# the faults took 6 s and more
SOON_S = 1.5
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = posted({"prompt": "hi", "num_tokens": 3, "seed": 1})
BODY = POST.partition(b"\r\n\r\n")[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server("dynamic", {"model": "fake"}) as url:
        yield url


def answers(connection: socket.socket, n: int = 1) -> list[tuple[int, dict[str, str], Any]]:
    """Status, headers and body of the next `n` answers."""
    found = []
    with connection.makefile("rb") as file:
        for _ in range(n):
            status = int(file.readline().split()[1])
            headers = {}
            while line := file.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            found.append((status, headers, json.loads(file.read(int(headers["content-length"])))))
    return found


def answer(url: str, *pieces: bytes) -> tuple[int, dict[str, str], Any]:
    """What a server answers to a request that is sent in pieces."""
    with connect(url) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.001)
        return answers(connection)[0]


def longest_health_s(url: str, seconds: float = 1.0) -> float:
    """Of /health, asked again and again for so long."""
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        get(f"{url}/health", timeout_s=PATIENCE_S)
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.01)
    return longest


@contextlib.contextmanager
def many(url: str, n: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open `n` connections, or as many as this process may; each sends so much and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    n = n if hard == resource.RLIM_INFINITY else min(n, hard - 200)
    host, port = url.removeprefix("http://").split(":")
    connections = []
    try:
        for _ in range(n):
            connections.append(connection := socket.socket())
            if sent:
                connection.connect((host, int(port)))
                connection.sendall(sent)
            else:
                connection.setblocking(False)
                connection.connect_ex((host, int(port)))
        yield connections
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_may_come_in_chunks_and_be_old(url: str) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    whole = answer(url, POST)[2]["completion"]
    assert answer(url, chunked[:150], chunked[150:201], chunked[201:])[2]["completion"] == whole
    old = answer(url, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert old[1]["connection"] == "close" and old[2]["completion"] == whole


def test_continue_is_sent_once_and_not_for_a_body_that_is_too_large(url: str) -> None:
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: "
    with connect(url) as connection:
        connection.sendall(head + b"%d\r\n\r\n" % len(BODY))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        status, _, found = answers(connection)[0]
        assert status == 200 and found["usage"]["completion_tokens"] == 3
    assert answer(url, head + b"%d\r\n\r\n" % (MAX_BODY_BYTES + 1))[0] == 413


def test_what_no_thread_needs_to_see_is_refused_in_our_form(url: str) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    million = b"%X\r\n" % 999_999 + b" " * 999_999 + b"\r\n"
    for pieces, status, sentence in (
        ([HEAD + b"Content-Length: 1000001\r\n\r\n"], 413, "1,000,000 bytes"),
        ([chunked, million, b"2\r\n"], 413, "1,000,000 bytes"),
        ([chunked + b"ZZ\r\n"], 400, "Content-Length"),
        ([HEAD + b"X: " + b"x" * 40_000], 431, "32,768 bytes"),
        ([b"nonsense\r\n\r\n"], 400, "HTTP/1.1"),
    ):
        found, headers, body = answer(url, *pieces)
        assert (found, headers["connection"]) == (status, "close")
        assert sentence in body["error"]["message"]
        assert body["error"]["type"] == "invalid_request_error"
    with connect(url) as cut:
        cut.sendall(POST[:-1])
        cut.shutdown(socket.SHUT_WR)
        assert answers(cut)[0][0] == 400
    ask = {"prompt": "hi", "num_tokens": 3, "nothing": ""}
    largest = ask | {"nothing": "x" * (MAX_BODY_BYTES - len(json.dumps(ask)))}
    status, _, body = answer(url, posted(largest))
    assert (status, body["error"]["param"]) == (400, "nothing"), "read, and refused by the route"


def trickled(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Send a byte now and then until an answer comes; return that."""
    while not select.select([connection], [], [], 0.05)[0]:
        connection.send(b"x")
    return answers(connection)[0]


def test_senders_that_trickle_are_dropped_after_a_total_time_and_others_are_not() -> None:
    settings = {"model": "fake", "header_timeout_s": 0.5, "body_timeout_s": 1}
    with server("dynamic", settings) as url, contextlib.ExitStack() as opened:
        kept, silent, head, body = (opened.enter_context(connect(url)) for _ in range(4))
        kept.sendall(GET)
        assert answers(kept)[0][0] == 200
        head.sendall(b"GET /")
        body.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        for late, setting in ((head, "--header-timeout-s"), (body, "--body-timeout-s")):
            status, _, answer = trickled(late)
            assert (status, answer["error"]["code"]) == (408, "request_timeout")
            assert setting in answer["error"]["message"]
        assert ended(silent) == b""
        kept.sendall(GET)  # between two requests there is more time
        assert answers(kept)[0][0] == 200


def test_with_few_files_connections_are_bounded_with_a_warning_and_all_are_served() -> None:
    url, limit = f"http://127.0.0.1:{(port := free_port())}", SPARE_FILES + 32
    argv = f"-m server.launch dynamic --model fake --max-waiting 0 --port {port}"
    command = (sys.executable, *argv.split())
    with launched("bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *command) as process:
        wait_until_ready(process, url)
        pids = get(url)["pids"]
        with many(url, 300):
            assert longest_health_s(url) < SOON_S
        # more came, with whole requests, while it had no processor
        os.kill(pids[0], signal.SIGSTOP)
        with many(url, 100, sent=GET) as connections:
            os.kill(pids[0], signal.SIGCONT)
            assert [answers(each)[0][0] for each in connections] == [200] * 100
        # files that others took: even then it only closes connections that wait
        _, hard = resource.prlimit(pids[0], resource.RLIMIT_NOFILE)
        few = len(os.listdir(f"/proc/{pids[0]}/fd")) + 5
        resource.prlimit(pids[0], resource.RLIMIT_NOFILE, (few, hard))
        with many(url, 300):
            assert longest_health_s(url) < SOON_S
        assert get(url)["pids"] == pids
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert "allows 160 open files, so at most 32 connections are open at once" in output
    assert "`ulimit -n`" in output
    assert f"ready: dynamic mode on {url}" in output and "--host 0.0.0.0" in output
    assert "Traceback" not in output


@contextlib.contextmanager
def changed(**constants: float) -> Iterator[tuple[str, Popen[str]]]:
    """A server whose worker has other constants, which are no settings."""
    port = free_port()
    change = "; ".join(f"worker.{name} = {value}" for name, value in constants.items())
    run = (
        f"from server.http import worker; {change}; from gunicorn.app import wsgiapp; wsgiapp.run()"
    )
    config = build("dynamic", {"model": "fake", "port": port}, {})
    given = f"{HANDOFF}={config.model_dump_json()}", sys.executable, "-c", run
    with launched("env", *given, "--config", "server/gunicorn_conf.py", "app:serve()") as process:
        wait_until_ready(process, url := f"http://127.0.0.1:{port}")
        yield url, process


def test_a_still_reader_and_bodies_that_fill_the_memory_lose_their_connections() -> None:
    with changed(STILL_S=1, MAX_UNFINISHED_BYTES=5_000_000) as (url, process):
        with connect(url, receive_buffer=65_536) as still:
            one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            still.sendall(one)
            n = 8_000_000 // len(str(answers(still)))  # more than the sockets between us hold
            still.sendall(one * n)
            with many(url, 20) as bodies:
                for connection in bodies:
                    connection.settimeout(PATIENCE_S)
                    connection.sendall(HEAD + b"Content-Length: 900000\r\n\r\n" + b"x" * 800_000)
                refused = sum(b" 503 " in ended(connection) for connection in bodies[:14])
                assert refused == 14, "six of 0.8 MB fit, and those that came last have a place"
                assert longest_health_s(url, 0.2) < SOON_S
            output = process.stdout or ()
            listening = threading.Thread(
                target=lambda: any("of its answer for 1 s" in line for line in output), daemon=True
            )
            listening.start()
            listening.join(PATIENCE_S)
            assert not listening.is_alive(), "nobody noticed"
            assert ended(still).count(b"HTTP/1.1 200 OK") < n
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.communicate(timeout=PATIENCE_S)[0]


def asked(url: str, **body: Any) -> socket.socket:
    """A request that is sent, and runs."""
    before = get(f"{url}/stats")["largest_batch"]
    (connection := connect(url)).sendall(posted({"prompt": "hi", "num_tokens": 1000} | body))
    wait_until(lambda: get(f"{url}/stats")["largest_batch"] > before)
    return connection


def refuses_connections(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_sigterm_waits_for_a_request_with_more_time_and_not_for_clients_that_wait() -> None:
    with started("--loop-interval-ms", "20", "--request-timeout-s", "0.5") as (url, process):
        with connect(url) as kept, connect(url) as half, connect(url) as silent:
            kept.sendall(GET)
            assert answers(kept)[0][0] == 200
            half.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            with asked(url, num_tokens=150, timeout_s=PATIENCE_S) as long:  # more than 3 s
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: refuses_connections(url))
                process.send_signal(signal.SIGTERM)  # changes nothing
                kept.sendall(POST)
                [(status, headers, body)] = answers(kept)
                assert (status, headers["connection"]) == (503, "close")
                assert body["error"]["code"] == "draining"
                assert b" 503 " in ended(half) and ended(silent) == b""
                assert process.poll() is None
                status, _, body = answers(long)[0]
                assert status == 200 and body["usage"]["completion_tokens"] == 150
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("request_timeout_s", "1", 3600), ("drain_timeout_s", "7200.5", 7200.5)],
)
def test_gunicorn_leaves_the_worker_time_for_the_longest_drain(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, least: float
) -> None:
    config = build("dynamic", {"model": "fake", name: value}, {})
    monkeypatch.setenv(HANDOFF, config.model_dump_json())
    settings = runpy.run_path(str(ROOT / "server/gunicorn_conf.py"))
    assert least < settings["graceful_timeout"] < least + 10


def test_at_the_end_of_draining_those_in_flight_get_an_error_and_the_server_exits_0() -> None:
    slow = ("--loop-interval-ms", "20", "--drain-timeout-s", "1")
    with started(*slow) as (url, process), asked(url) as plain, asked(url, stream=True) as stream:
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        status, _, body = answers(plain)[0]
        assert (status, body["error"]["code"]) == (503, "draining")
        assert body["error"]["type"] == "service_unavailable_error"
        assert time.monotonic() - start > 0.8
        *_, last, done = ended(stream).split(b"data: ")
        assert b'"code":"draining"' in last and done.startswith(b"[DONE]")
        assert process.wait(PATIENCE_S / 4) == 0, "left alone it would take 20 s"


def test_a_failed_load_ends_the_server_with_a_sentence_about_it() -> None:
    argv = f"-m server.launch dynamic --lora x=/nowhere --port {free_port()}"
    with launched(sys.executable, *argv.split()) as process:
        *_, last = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert process.returncode == 3
    assert "the server ends: loading failed: /nowhere has no adapter that can be read" in last


def test_ctrl_c_ends_a_drain_at_once() -> None:
    with started("--loop-interval-ms", "20") as (url, process), asked(url) as plain:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(url))
        process.send_signal(signal.SIGINT)
        assert answers(plain)[0][0] == 503
        output, _ = process.communicate(timeout=PATIENCE_S / 4)
        assert process.returncode == 0 and "Traceback" not in output


def test_a_client_that_connects_in_the_turn_that_began_to_drain_does_not_end_the_loop() -> None:
    """The loop called accept() of the listener that it had closed, and lost all in flight."""
    worker = object.__new__(Worker)
    worker.alive = False
    worker._accept(listener=None, server=None)


def test_of_a_thousand_that_can_be_read_the_newest_and_the_oldest_have_their_turn() -> None:
    """A client that came behind 1,100 clients was read behind them all, 120 ms late."""
    connections = [Connection(number, *[None] * 4) for number in range(1000)]  # type: ignore[arg-type]
    random.Random(0).shuffle(connections)
    found = [connection.number for connection in in_turn(connections)]
    assert found == [*range(999, 979, -1), *range(20)]
    assert in_turn(connections[:40]) == connections[:40]
