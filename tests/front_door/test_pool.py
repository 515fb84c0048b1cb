"""The pool of HTTP threads: the last idle one goes first, and nobody is lost at its limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from front_door.pool import Pool
from tests.servers import wait_until


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
