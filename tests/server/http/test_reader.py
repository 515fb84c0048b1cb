"""Parts of the worker by themselves: whole requests out of bytes, however they are cut; the pool of
threads that answers them; turns of connections.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from gunicorn.config import Config
from gunicorn.http.message import Request

from scheduling.errors import ServingError
from server.api.refusals import kind_of, unauthorized
from server.http.answering import Pool
from server.http.connections import Connection, in_turn
from server.http.http_reader import CHUNKS_AT_ONCE, MAX_HEAD_BYTES, Reader, rendered
from server.http.worker import Worker
from tests.servers import wait_until

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

    class Asked:
        def serve(self) -> None: ...

    pool, request = Pool(1), Asked()
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


def test_no_error_and_no_lack_of_threads_loses_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
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


POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"


def reader(max_body_bytes: int = 1000) -> Reader:
    return Reader(Config(), ("127.0.0.1", 1), max_body_bytes)


def read(raw: bytes, piece: int) -> tuple[list[tuple[str, bytes]], int | None, str]:
    """(method, body) of every request, the status of a refusal, and what is awaited in the end."""
    door, found = reader(), []
    try:
        for start in range(0, len(raw), piece):
            door.feed(raw[start : start + piece])
            while request := door.next_request():
                found.append((request.method, request.body.read()))
    except ServingError as refusal:
        return found, kind_of(refusal).status, ""
    return found, None, door.awaits


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 10**6])
@pytest.mark.parametrize(("raw", "requests", "awaits"), [
    (GET + GET, [("GET", b"")] * 2, "nothing"),
    (POST + b"Content-Length: 3\r\n\r\nabc" + GET, [("POST", b"abc"), ("GET", b"")], "nothing"),
    (POST + b"Content-Length: 3\r\n\r\nabc\r\n" + GET, [("POST", b"abc"), ("GET", b"")], "nothing"),
    (CHUNKED + b"3;a=b\r\nabc\r\n01 \r\nd\r\n0\r\n\r\n" + GET, [("POST", b"abcd"), ("GET", b"")],
     "nothing"),
    (CHUNKED + b"4\r\n0123\r\n0\r\nX: y\r\nZ: 0\r\n\r\n" + GET, [("POST", b"0123"), ("GET", b"")],
     "nothing"),
    (b"GET /b HTTP/1.0\r\n\r\n", [("GET", b"")], "nothing"),
    (b"", [], "nothing"),
    (GET[:-1], [], "head"),
    (POST + b"Content-Length: 3\r\n\r\nab", [], "body"),
    (CHUNKED + b"3\r\nabc\r\n0\r\n", [], "body"),
])  # fmt: skip
def test_requests_are_the_same_however_they_are_cut(
    raw: bytes, requests: list[tuple[str, bytes]], awaits: str, piece: int
) -> None:
    assert read(raw, piece) == (requests, None, awaits)


@pytest.mark.parametrize("piece", [1, 10**6])
@pytest.mark.parametrize(("raw", "status"), [
    (b"GET /b HTTP/1.1\nHost: x\n\n", 400),  # no CRLF will come
    (b"GET /b HTTP/1.1\r\nHost: x\n\n", 400),
    (b"GET /b HTTP/1.1\r\n\r\n", 400),
    (b"GET /b HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    (b"GET /b HTTP/x\r\nHost: x\r\n\r\n", 400),
    (b"GET /b HTTP/9.9\r\nHost: x\r\n\r\n", 505),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (POST + b"Content-Length: x\r\n\r\n", 400),
    (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
    (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (CHUNKED + b"ZZ\r\n", 400),
    (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    (CHUNKED + b"1;" + b"x" * 2000, 400),
    (CHUNKED + b"0\r\nX: " + b"x" * 2000, 400),
    (POST + b"Content-Length: 1001\r\n\r\n", 413),
    (CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n", 413),
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
    (POST + b"Expect: a cheque\r\n\r\n", 417),
    (POST + b"X: y\r\n" * 101 + b"\r\n", 431),
    (POST + b"X: " + b"y" * MAX_HEAD_BYTES, 431),
    (POST + b"Transfer-Encoding: morse\r\n\r\n", 501),
    (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
])  # fmt: skip
def test_what_is_wrong_is_refused_once_it_is_seen(raw: bytes, status: int, piece: int) -> None:
    assert read(raw, piece) == ([], status, "")


def test_whose_body_is_not_to_be_read_is_refused_before_it_is_asked_to_continue() -> None:
    def admit(request: Request) -> None:
        raise unauthorized("Send a key.")

    door = Reader(Config(), ("127.0.0.1", 1), 1000, admit)
    door.feed(GET)
    assert door.next_request(), "what has no body is the routes' to judge"
    door.feed(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    with pytest.raises(ServingError) as refused:
        door.next_request()
    assert not door.wants_continue()
    answer = rendered(refused.value)
    assert b"401" in answer and b"WWW-Authenticate: Bearer" in answer


def test_many_chunks_take_several_turns_and_tiny_ones_are_refused() -> None:
    """A read of 64 KiB in chunks of one byte took 25 ms, and 40 such clients made others wait."""
    door, turns = reader(10**6), 0
    door.feed(CHUNKED + b"10\r\n0123456789abcdef\r\n" * 2000 + b"0\r\n\r\n")
    while (request := door.next_request()) is None:
        assert door.has_more
        turns += 1
    assert turns == 2000 // CHUNKS_AT_ONCE and request.body.read() == b"0123456789abcdef" * 2000
    door.feed(CHUNKED + b"1\r\nx\r\n" * 2000)
    with pytest.raises(ServingError, match="send it with a Content-Length"):
        while door.next_request() is None:
            pass
    assert door.held_bytes > 6 * 900, "the second thousand is not read"


def test_continue_is_wanted_once_and_not_when_the_body_comes_by_itself() -> None:
    head = POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    door = reader()
    assert not door.wants_continue()
    door.feed(head)
    assert door.next_request() is None and door.wants_continue() and not door.wants_continue()
    door = reader()
    door.feed(head + b"a")
    assert door.next_request() is None and not door.wants_continue()


def test_what_is_held_is_bounded_and_given_back() -> None:
    door = reader()
    door.feed(CHUNKED)
    for _ in range(10):
        assert door.next_request() is None
        door.feed(b"64;" + b"x" * 900 + b"\r\n" + b"y" * 100 + b"\r\n")
        assert door.held_bytes < 2200, "the framing of chunks that were read is not kept"
    door.next_request()
    door.forget()
    assert door.held_bytes == 0


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
