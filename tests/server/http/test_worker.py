"""A real server and clients as they should not be: slow, many, half; and the same server's way to
its end. (What thousands do to it is in lab/tests/faults.)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import runpy
import select
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import pytest
import yaml

from client.addresses import server_url
from client.calls import get
from client.load import replay
from compare.servers import wait_until_ready
from config.config import HANDOFF, LOADER, MAX_BODY_BYTES, SPARE_FILES, check_port
from config.settings import ConfigError
from generate.auto import build
from tests.servers import (
    PATIENCE_S,
    ROOT,
    asks,
    assert_all_answered,
    events,
    free_port,
    launched,
    read_to_end,
    server,
    started,
    wait_until,
)

# for /health beside any fault: what the system takes to repeat a packet that it dropped, and some;
# the faults took 6 s and more
SOON_S = 1.5
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect((host, int(port)))
    return connection


ASK = {"prompt": "hi", "num_tokens": 3, "seed": 1}


def post_bytes(body: dict[str, Any], version: str = "1.1") -> bytes:
    """A whole request."""
    raw = json.dumps(body)
    head = f"POST /inference HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n{raw}".encode()


POST = post_bytes(ASK)
BODY = POST.partition(b"\r\n\r\n")[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server("dynamic", {"model": "fake"}) as url:
        yield url


def received(connection: socket.socket) -> tuple[int, Any, Any]:
    """Status, headers and body of the next answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.headers, json.loads(response.read())


def answer(url: str, *pieces: bytes) -> tuple[int, dict[str, str], Any]:
    """What a server answers to a request that is sent in pieces."""
    with connect(url) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.001)
        return received(connection)


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
    with contextlib.ExitStack() as opened:
        connections = []
        for _ in range(n):
            connections.append(opened.enter_context(connect(url)))
            connections[-1].sendall(sent)
        yield connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_on_an_ipv6_address_says_a_url_that_clients_take() -> None:
    """It said http://::1:8500, which client.py refuses."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    words = ["dynamic", "--model", "fake", "--host", "::1", "--port", str(port := free_port())]
    with launched(sys.executable, "-m", "server.launch", *words) as process:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "ready: " in line)
        [url] = re.findall(r"http://[^ ,]+", ready)
        assert url == server_url(url) == f"http://[::1]:{port}"
        assert_all_answered(replay(url, asks(3, 5)))
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port} \("):
            check_port(build("dynamic", {"model": "fake", "host": "::1", "port": port}, {}))


def test_256_rows_are_filled_and_1200_requests_at_once_are_all_answered() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        assert_all_answered(replay(url, asks(256, 600)))
        assert get(f"{url}/stats")["largest_batch"] == 256
        assert_all_answered(replay(url, asks(1200, 5)))
        assert get(f"{url}/stats")["refused"] == 0


def test_a_request_may_come_in_chunks_or_be_of_http_1_0_which_has_no_chunks(url: str) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    whole = answer(url, POST)[2]["completion"]
    assert answer(url, chunked[:150], chunked[150:201], chunked[201:])[2]["completion"] == whole
    old = answer(url, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert old[1]["connection"] == "close" and old[2]["completion"] == whole
    with connect(url) as connection:
        connection.sendall(post_bytes(ASK | {"stream": True}, version="1.0"))
        head, _, raw = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"chunked" not in head
    assert "".join(chunk["text"] for chunk in events(raw)[:-1]) == whole


def test_continue_is_sent_once_and_not_for_a_body_that_is_too_large(url: str) -> None:
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: "
    with connect(url) as connection:
        connection.sendall(head + b"%d\r\n\r\n" % len(BODY))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        status, _, found = received(connection)
        assert status == 200 and found["usage"]["completion_tokens"] == 3
    assert answer(url, head + b"%d\r\n\r\n" % (MAX_BODY_BYTES + 1))[0] == 413


def test_what_no_thread_needs_to_see_is_refused_in_our_form(url: str) -> None:
    for raw, status, sentence in (
        (HEAD + b"Content-Length: 1000001\r\n\r\n", 413, "1,000,000 bytes"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400, "Content-Length"),
        (HEAD + b"X: " + b"x" * 40_000, 431, "32,768 bytes"),
        (b"nonsense\r\n\r\n", 400, "HTTP/1.1"),
    ):
        found, headers, body = answer(url, raw)
        assert (found, headers["connection"]) == (status, "close")
        assert sentence in body["error"]["message"]
        assert body["error"]["type"] == "invalid_request_error"
    with connect(url) as cut:
        cut.sendall(POST[:-1])
        cut.shutdown(socket.SHUT_WR)
        assert received(cut)[0] == 400
    rest = MAX_BODY_BYTES - len(json.dumps(ASK | {"nothing": ""}))
    status, _, body = answer(url, post_bytes(ASK | {"nothing": "x" * rest}))
    assert (status, body["error"]["param"]) == (400, "nothing"), "read, and refused by the route"


def trickled(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Send a byte now and then until an answer comes; return that."""
    while not select.select([connection], [], [], 0.05)[0]:
        connection.send(b"x")
    return received(connection)


def test_senders_that_trickle_are_dropped_after_a_total_time_and_others_are_not() -> None:
    settings = {"model": "fake", "header_timeout_s": 0.5, "body_timeout_s": 1}
    with server("dynamic", settings) as url, contextlib.ExitStack() as opened:
        kept, silent, head, body = (opened.enter_context(connect(url)) for _ in range(4))
        kept.sendall(GET)
        assert received(kept)[0] == 200
        head.sendall(b"GET /")
        body.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        for late, setting in ((head, "--header-timeout-s"), (body, "--body-timeout-s")):
            status, _, answer = trickled(late)
            assert (status, answer["error"]["code"]) == (408, "request_timeout")
            assert setting in answer["error"]["message"]
        assert read_to_end(silent) == b""
        kept.sendall(GET)  # between two requests there is more time
        assert received(kept)[0] == 200


def test_with_few_files_connections_are_bounded_with_a_warning_and_all_are_served() -> None:
    url, limit = f"http://127.0.0.1:{(port := free_port())}", SPARE_FILES + 32
    python = shlex.quote(sys.executable)
    serve = f"{python} -m server.launch dynamic --model fake --max-waiting 0 --port {port}"
    with launched("bash", "-c", f"ulimit -n {limit} && exec {serve}") as process:
        wait_until_ready(process, url)
        pids = get(url)["pids"]
        with many(url, 300):
            assert longest_health_s(url) < SOON_S
        # more came, with whole requests, while it had no processor
        os.kill(pids[0], signal.SIGSTOP)
        with many(url, 100, sent=GET) as connections:
            os.kill(pids[0], signal.SIGCONT)
            assert [received(each)[0] for each in connections] == [200] * 100
        # files that others took: even then it only closes connections that wait
        _, hard = resource.prlimit(pids[0], resource.RLIMIT_NOFILE)
        few = len(os.listdir(f"/proc/{pids[0]}/fd")) + 5
        resource.prlimit(pids[0], resource.RLIMIT_NOFILE, (few, hard))
        with many(url, 300):
            assert longest_health_s(url) < SOON_S
        assert get(url)["pids"] == pids
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    bounded = "allows 160 open files, so at most 32 connections are open at once"
    for said in (bounded, "`ulimit -n`", f"ready: dynamic mode on {url}", "--host 0.0.0.0"):
        assert said in output
    assert "Traceback" not in output


@contextlib.contextmanager
def changed(**constants: float) -> Iterator[tuple[str, Popen[str]]]:
    """A server whose worker has other constants, which are no settings."""
    port = free_port()
    change = "; ".join(f"worker.{name} = {value}" for name, value in constants.items())
    run = f"from server.http import worker; {change}; "
    run += "from gunicorn.app import wsgiapp; wsgiapp.run()"
    config = build("dynamic", {"model": "fake", "port": port}, {})
    handed_on = f"{HANDOFF}={config.model_dump_json()}", f"{LOADER}=generate.loading:load_generator"
    given = *handed_on, sys.executable, "-c", run
    with launched("env", *given, "--config", "server/gunicorn_conf.py", "app:serve()") as process:
        wait_until_ready(process, url := f"http://127.0.0.1:{port}")
        yield url, process


def test_a_key_is_asked_for_by_the_path_as_it_is_decoded() -> None:
    """With a body these came in without a key, as another path and another header need none."""
    with server("dynamic", {"model": "fake"}, key="secret") as url:
        rest = b"Host: a\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"
        for start in (
            b"GET /live/%65vents HTTP/1.1\r\n",
            b"GET / HTTP/1.1\r\nAccept: text/html\r\nAccept: application/json\r\n",
        ):
            connection = connect(url)
            connection.sendall(start + rest)
            assert b" 401 " in read_to_end(connection).split(b"\r\n")[0]


def test_a_still_reader_and_bodies_that_fill_the_memory_lose_their_connections() -> None:
    with changed(STILL_S=1, MAX_UNFINISHED_BYTES=5_000_000) as (url, process):
        with connect(url, receive_buffer=65_536) as still:
            one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            still.sendall(one)
            n = 8_000_000 // len(str(received(still)))  # more than the sockets between us hold
            still.sendall(one * n)
            body = HEAD + b"Content-Length: 900000\r\n\r\n" + b"x" * 800_000
            with many(url, 20, body) as bodies:
                refused = sum(b" 503 " in read_to_end(connection) for connection in bodies[:14])
                assert refused == 14, "six of 0.8 MB fit, and those that came last have a place"
                assert longest_health_s(url, 0.2) < SOON_S
            assert any("of its answer for 1 s" in line for line in process.stdout or ())
            assert read_to_end(still).count(b"HTTP/1.1 200 OK") < n
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.communicate(timeout=PATIENCE_S)[0]


def asked(url: str, **body: Any) -> socket.socket:
    """A request that is sent, and runs."""
    before = get(f"{url}/stats")["largest_batch"]
    (connection := connect(url)).sendall(post_bytes({"prompt": "hi", "num_tokens": 1000} | body))
    wait_until(lambda: get(f"{url}/stats")["largest_batch"] > before)
    return connection


of_processes = pytest.mark.parametrize("n", ["1", "3"])


def refuses_connections(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


@of_processes
def test_sigterm_waits_for_a_request_with_more_time_and_not_for_clients_that_wait(n: str) -> None:
    slow = ("--loop-interval-ms", "20", "--request-timeout-s", "0.5", "--http-processes", n)
    with started(*slow) as (url, process):
        with connect(url) as kept, connect(url) as half, connect(url) as silent:
            kept.sendall(GET)
            assert received(kept)[0] == 200
            half.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            with asked(url, num_tokens=150, timeout_s=PATIENCE_S) as long:  # more than 3 s
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: refuses_connections(url))
                process.send_signal(signal.SIGTERM)  # changes nothing
                kept.sendall(POST)
                status, headers, body = received(kept)
                assert (status, headers["connection"]) == (503, "close")
                assert body["error"]["code"] == "draining"
                assert b" 503 " in read_to_end(half) and read_to_end(silent) == b""
                assert process.poll() is None
                status, _, body = received(long)
                assert status == 200 and body["usage"]["completion_tokens"] == 150
        assert process.wait(PATIENCE_S) == 0


def test_gunicorn_and_docker_wait_for_the_longest_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_s(**settings: Any) -> Any:
        handoff = build("dynamic", {"model": "fake"} | settings, {}).handoff()
        monkeypatch.setenv(HANDOFF, handoff)
        return runpy.run_path(str(ROOT / "server/gunicorn_conf.py"))["graceful_timeout"]

    assert 3600 < waits_s(request_timeout_s="1") < 3610
    assert 7200.5 < waits_s(drain_timeout_s="7200.5") < 7210
    boxes = yaml.safe_load((ROOT / "docs" / "deploy" / "compose.yaml").read_text())["services"]
    limit = boxes["server"]["environment"]["EB_DRAIN_TIMEOUT_S"]
    grace_s = int(boxes["server"]["stop_grace_period"].removesuffix("s"))
    assert waits_s(drain_timeout_s=limit) < grace_s


@of_processes
def test_at_the_end_of_draining_those_in_flight_get_an_error_and_the_server_exits_0(n: str) -> None:
    slow = ("--loop-interval-ms", "20", "--drain-timeout-s", "1", "--http-processes", n)
    with started(*slow) as (url, process), asked(url) as plain, asked(url, stream=True) as stream:
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        status, _, body = received(plain)
        assert (status, body["error"]["code"]) == (503, "draining")
        assert body["error"]["type"] == "service_unavailable_error"
        assert time.monotonic() - start > 0.8
        *_, last, done = read_to_end(stream).split(b"data: ")
        assert b'"code":"draining"' in last and done.startswith(b"[DONE]")
        assert process.wait(PATIENCE_S / 4) == 0, "left alone it would take 20 s"


@of_processes
def test_a_failed_load_ends_the_server_with_a_sentence_about_it(n: str) -> None:
    argv = f"-m server.launch dynamic --lora x=/nowhere --port {free_port()} --http-processes {n}"
    with launched(sys.executable, *argv.split()) as process:
        *_, last = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert process.returncode == 3
    assert "the server ends: loading failed: /nowhere has no adapter that can be read" in last


@of_processes
def test_ctrl_c_ends_a_drain_at_once(n: str) -> None:
    slow = ("--loop-interval-ms", "20", "--http-processes", n)
    with started(*slow) as (url, process), asked(url) as plain:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(url))
        process.send_signal(signal.SIGINT)
        assert received(plain)[0] == 503
        output, _ = process.communicate(timeout=PATIENCE_S / 4)
        assert process.returncode == 0 and "Traceback" not in output
