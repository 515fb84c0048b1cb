"""A real gunicorn and real HTTP: many at once, and an old client; the pool of HTTP threads."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from client.calls import get, post
from client.load import replay
from front_door.pool import Pool
from tests.front_door.sockets import HEAD, connect, ended
from tests.servers import Serve, asks, assert_all_answered, server, wait_until
from tests.sse import events


def test_256_rows_are_filled_and_1200_requests_at_once_are_all_answered() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        assert_all_answered(replay(url, asks(256, 600)))
        assert get(f"{url}/stats")["largest_batch"] == 256
        assert_all_answered(replay(url, asks(1200, 5)))
        assert get(f"{url}/stats")["refused"] == 0


def test_a_client_of_http_1_0_gets_its_stream_without_chunks(shared_server: Serve) -> None:
    body = json.dumps({"prompt": "hi", "num_tokens": 30, "seed": 1, "stream": True}).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    with shared_server("dynamic", {"model": "fake"}) as url, connect(url) as connection:
        connection.sendall(head + body)
        head, _, raw = ended(connection).partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"chunked" not in head
        *chunks, _ = events(raw)
        plain = post(f"{url}/inference", {"prompt": "hi", "num_tokens": 30, "seed": 1})
        assert "".join(chunk["text"] for chunk in chunks) == plain["completion"]


# ---- the pool of HTTP threads: the last idle one goes first, and no request is lost at its limit


def idle(pool: Pool, n: int) -> None:
    wait_until(lambda: len(pool._idle) == n)


def waiting_for(go: threading.Event) -> Callable[[], None]:
    def call() -> None:
        go.wait(60)

    return call


def test_after_a_peak_one_thread_does_what_comes_one_by_one() -> None:
    """Idle threads that take turns grow a server for half an hour: each touches its memory."""
    pool, go = Pool(50), threading.Event()
    for _ in range(20):
        pool.submit(waiting_for(go))
    go.set()
    idle(pool, 20)
    found: set[int] = set()
    for _ in range(100):
        pool.submit(lambda: found.add(threading.get_ident()))
        idle(pool, 20)
    assert len(found) == 1


def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    """It kept all of the request: with 200 clients and bodies of 1 MB a server grew by 480 MB."""

    class Request:
        def serve(self) -> None: ...

    pool, request = Pool(1), Request()
    gone = weakref.ref(request)
    pool.submit(request.serve)
    del request
    idle(pool, 1)
    wait_until(lambda: gone() is None)


def test_beyond_its_limit_calls_wait_and_all_are_made_in_their_order() -> None:
    pool, made = Pool(2), SimpleQueue[int]()
    busy, held = threading.Event(), threading.Event()
    pool.submit(waiting_for(busy))
    pool.submit(waiting_for(held))
    for i in range(50):
        pool.submit(lambda i=i: made.put(i))  # type: ignore[misc]
    assert made.empty()
    busy.set()  # one thread makes them all: two take them in order, and may finish in another
    assert [made.get(timeout=60) for _ in range(50)] == list(range(50))
    held.set()
    idle(pool, 2)


def test_a_call_that_raises_leaves_its_thread_and_one_that_cannot_be_started_loses_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, made = Pool(5), SimpleQueue[int]()
    pool.submit(lambda: 1 / 0)  # type: ignore[arg-type]
    idle(pool, 1)
    go = threading.Event()
    pool.submit(waiting_for(go))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.submit(lambda: made.put(1))
    go.set()
    assert made.get(timeout=60) == 1
