"""HTTP in processes of its own: the same answers, one truth, and what happens when one ends."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from queue import SimpleQueue
from subprocess import Popen
from typing import Any

import psutil
import pytest

from client.calls import ServerError, get, post
from config.open_files import allow_open_files
from generate.auto import build
from generate.fake import FakeGenerator
from scheduling.policies import MODES
from server.engine import LocalEngine
from server.processes import engine as engines
from server.processes.twin import GONE, Twin
from server.request import Request
from tests.counts import nightly, nightly_but
from tests.server.fronts import fetch
from tests.servers import (
    PATIENCE_S,
    children,
    events,
    metric,
    server,
    started,
    wait_until,
    wait_until_free,
)

SLOW = ("--loop-interval-ms", "20", "--http-processes", "3")
LONG = {"prompt": "hi", "num_tokens": 900}


def of_http(process: Popen[str]) -> list[psutil.Process]:
    return children(process, "gunicorn")


def of_engine(process: Popen[str]) -> psutil.Process:
    [engine] = children(process, "server.processes.engine")
    return engine


def stats_of(url: str) -> dict[str, Any]:
    """Its /stats, asked again if a process that ended takes the connection along."""
    for _ in range(9):
        with contextlib.suppress(ServerError):
            return get(f"{url}/stats")
    raise AssertionError("no process answers")


# ---- the same answers

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/inference", {"prompt": "If the file", "num_tokens": 20}),
    ("/inference", {"prompt": ["a", "bc"], "num_tokens": 9, "n": 2, "temperature": 0.8}),
    ("/inference", {"prompt": "If", "num_tokens": 12, "temperature": 1.0, "top_k": 9}),
    ("/v1/completions", {"prompt": "def", "max_tokens": 40, "stop": ["e", "\n"], "temperature": 1}),
    ("/v1/completions", {"prompt": "If the", "max_tokens": 6, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "If the", "max_tokens": 6, "logprobs": 0, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
                              "logprobs": True, "top_logprobs": 3, "temperature": 0.9}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5, "model": "nobody"}),
]  # fmt: skip
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def burst(url: str) -> list[Any]:
    """Answers to all of them at once, twice, whole and streamed, without ids and times."""
    asked = []
    for seed in range(2):
        for path, body in ASKED:
            asked.append((path, body | {"seed": seed}))
            more = {} if path == "/inference" else {"stream_options": OPTIONS}
            asked.append((path, body | {"seed": seed, "stream": True} | more))

    def answer(each: tuple[str, dict[str, Any]]) -> Any:
        response = fetch(url, "POST", *each).masked
        if not each[1].get("stream") or response.status != 200:
            return response.status, response.headers, json.loads(response.body)
        return response.status, response.headers, joined(events(response.body))

    with ThreadPoolExecutor(len(asked)) as threads:
        return [*threads.map(answer, asked)]


def joined(pieces: Sequence[Any]) -> Any:
    """The events of a stream, however many tokens are in each: its texts, by completion, its
    log-probabilities, and the last event.
    """
    logprobs: list[Any] = []
    whole: dict[int, str] = {}
    for piece in pieces:
        for each in piece.get("choices", [piece] if "text" in piece else []):
            text = each["text"] if "text" in each else each["delta"]["content"]
            whole[each["index"]] = whole.get(each["index"], "") + text
            if each.get("logprobs"):
                lists = each["logprobs"].get("content") or each["logprobs"]["token_logprobs"]
                logprobs += [(each["index"], one) for one in lists]
    return whole, sorted(logprobs, key=lambda one: one[0]), pieces[-1]


def alike(a: Any, b: Any) -> bool:
    """Return whether two values are equal, log-probabilities almost: sums depend on the batch."""
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, abs=1e-4)
    if isinstance(a, dict) and isinstance(b, dict):
        return [*a] == [*b] and all(alike(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("mode", nightly_but(["dynamic"], MODES))
def test_three_processes_answer_a_burst_as_one_does(mode: str) -> None:
    settings = {"model": "demo", "max_batch_size": 8}
    with server(mode, settings) as one, server(mode, settings | {"http_processes": 3}) as three:
        for asked, theirs in zip(burst(three), burst(one)):
            assert alike(asked, theirs), (asked, theirs)


# ---- one truth


def test_every_process_says_the_same_and_refusals_are_counted_wherever_they_are() -> None:
    limits = {"max_batch_size": 1, "max_waiting": 0, "loop_interval_ms": 20, "http_processes": 3}
    with server("dynamic", {"model": "fake"} | limits, key="secret") as url:
        key = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        body = {"prompt": "a", "num_tokens": 200}
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(fetch, url, "POST", "/inference", body, key)
            wait_until(lambda: metric_of(url, "vllm:num_requests_running"))
            for _ in range(4):  # each a connection of its own
                assert fetch(url, "POST", "/inference", body, key).status == 429
                assert fetch(url, "POST", "/inference", {"prompt": ""}, key).status == 400
                assert fetch(url, "POST", "/inference", body).status == 401
                assert fetch(url, "POST", "/inference", b"x" * 2_000_000, key).status == 413
            assert running.result().status == 200
        told = [get(f"{url}/stats", key="secret") for _ in range(6)]
        wanted = {"completed": 1, "refused": 4, "invalid": 12}
        wait_until(lambda: counts(get(f"{url}/stats", key="secret"), wanted) == wanted)
        assert all(each["completed"] == 1 and each["refused"] == 4 for each in told)
        last = [get(f"{url}/stats", key="secret") for _ in range(6)]
        assert all(each == last[0] for each in last)


def counts(stats: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: stats[name] for name in names}


def metric_of(url: str, name: str) -> float:
    raw = fetch(url, "GET", "/metrics", None, {"Authorization": "Bearer secret"}).body.decode()
    return next(float(line.split()[-1]) for line in raw.splitlines() if line.startswith(name))


def test_connections_are_spread_evenly() -> None:
    with server("dynamic", {"model": "fake", "http_processes": 4}) as url:
        taken = Counter(get(url)["pids"][0] for _ in range(400))
    assert len(taken) == 4 and max(taken.values()) <= 2 * min(taken.values()), taken


# ---- what ends


@contextlib.contextmanager
def asking(url: str, n: int, **body: Any) -> Iterator[list[Any]]:
    """n requests that run when the block begins; their statuses and last bytes after it."""
    ended: list[Any] = []

    def ask() -> None:
        try:
            response = fetch(url, "POST", "/inference", LONG | body)
            ended.append((response.status, response.body[-400:]))
        except (OSError, HTTPException):
            ended.append((0, b""))

    threads = [threading.Thread(target=ask) for _ in range(n)]
    before = metric(url, "vllm:num_requests_running")
    for thread in threads:
        thread.start()
    wait_until(lambda: metric(url, "vllm:num_requests_running") >= before + n)
    yield ended
    for thread in threads:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_process_that_is_killed_takes_its_own_requests_along(stream: bool) -> None:
    with started(*SLOW) as (url, process):
        # so many that the kernel gives each process one
        with asking(url, 24, num_tokens=200, stream=stream) as ended:
            first = of_http(process)
            victim = first[0]
            victim.kill()
            # the rows of the killed one end while the others go on
            wait_until(lambda: stats_of(url)["cancelled"])
            wait_until(lambda: len([each for each in of_http(process) if each != victim]) == 3)
        lost = [each for each in ended if each[0] == 0 or (stream and b"[DONE]" not in each[1])]
        stats = get(f"{url}/stats")
        assert stats["cancelled"] == len(lost) and stats["completed"] == 24 - len(lost)
        assert 0 < len(lost) < 24
        wait_until_free(url)
        assert post(f"{url}/inference", LONG | {"num_tokens": 1})["completion"]


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_an_engine_that_is_killed_get_an_end_and_the_server_ends(stream: bool) -> None:
    with started(*SLOW) as (url, process):
        with asking(url, 12, stream=stream) as ended:
            of_engine(process).kill()
        for status, last in ended:
            assert GONE.encode() in last and status in ({200, 503} if stream else {503})
        assert process.wait(PATIENCE_S) == 3
        assert "Traceback" not in (process.stdout.read() if process.stdout else "")


def test_a_reload_loses_no_request_and_keeps_the_engine() -> None:
    with started(*SLOW) as (url, process):
        engine, before = of_engine(process), {each.pid for each in of_http(process)}
        with asking(url, 9, num_tokens=100) as ended:
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: {each.pid for each in of_http(process)}.isdisjoint(before))
            assert get(f"{url}/ready")["status"] == "ready"
        assert [status for status, _ in ended] == [200] * 9
        assert of_engine(process) == engine and get(f"{url}/stats")["completed"] == 9


@pytest.mark.parametrize(("processes", "n"), [("3", 300), nightly("1", 2000), nightly("3", 2000)])
def test_clients_that_leave_at_once_free_rows_and_blocks(processes: str, n: int) -> None:
    rows = ("--max-batch-size", "64", "--max-waiting", "2000")
    allow_open_files(n + 200)
    with started(*rows, "--loop-interval-ms", "20", "--http-processes", processes) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        raw = json.dumps(LONG | {"stream": True})
        head = f"POST /inference HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode()
        clients = [socket.create_connection((host, int(port))) for _ in range(n)]
        for client in clients:
            client.sendall(request)
        wait_until(lambda: metric(url, "vllm:num_requests_waiting") == n - 64)
        for client in clients:
            client.close()
        wait_until_free(url)
        assert get(f"{url}/stats")["cancelled"] == n


# ---- an engine and its twins in this process


@contextlib.contextmanager
def beside(engine: LocalEngine, n: int = 1) -> Iterator[list[tuple[engines.Peer, Twin]]]:
    """Peers of an engine, and their twins."""
    commands: SimpleQueue[engines.Command] = SimpleQueue()
    threading.Thread(target=engines._obey, args=[commands], daemon=True).start()
    pairs = []
    with ThreadPoolExecutor(4) as asks:
        for _ in range(n):
            ours, theirs = socket.socketpair()
            peer = engines.Peer(engine, ours, commands, asks)
            pairs.append((peer, Twin(engine.config, theirs)))
        yield pairs
        for peer, _ in pairs:
            peer.close()
    for peer, _ in pairs:
        assert peer.ended.wait(PATIENCE_S)


def test_a_process_that_reads_nothing_holds_no_other_up_and_its_requests_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the engine keeps no more than one note of each of its requests."""
    engine = LocalEngine(build("dynamic", {"model": "fake"}, {}), lambda *_: FakeGenerator())
    with beside(engine, 2) as ((peer, still), (_, other)):
        stops = threading.Event()
        monkeypatch.setattr(still, "_take", lambda news: stops.wait(PATIENCE_S))
        peer._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        peer._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000)
        )
        request = Request([[1, 2]], 900, stream=True)
        groups = [still.group(request) for _ in range(20)]
        for group in groups:
            group[0].streamed = True
            still.queue(request, group)
        wait_until(lambda: engine.manager.snapshot().running == 20)
        short = Request([[3]], 5)
        other.queue(short, group := other.group(short))
        assert group[0].done.wait(PATIENCE_S) and len(group[0].tokens) == 5
        assert len(peer._newest) <= 20
        wait_until(lambda: engine.manager.snapshot().running == 0)
        engine.behind.flush()
        assert engine.stats.run().counts["cancelled"] == 20
        stops.set()
    engine.close()
