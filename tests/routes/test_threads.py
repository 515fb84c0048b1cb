"""Where the system starts no more threads: the request is refused with a sentence, and the next one
tries again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from batching import BatchingManager
from generate.fake import FakeGenerator
from routes.watcher import Watcher
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic
from tests.servers import PATIENCE_S
from tests.sse import events
from tests.virtual import make_scheduler

ASK: dict[str, Any] = {"prompt": "hi", "num_tokens": 3, "timeout_s": 10}


def no_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def assert_refused(client: FlaskClient, body: dict[str, Any], name: str, **how: Any) -> None:
    refused = client.post("/inference", json=body, **how)
    assert refused.status_code == 429 and refused.headers["Retry-After"]
    message = refused.get_json()["error"]["message"]
    assert (
        f"could not start its {name} thread (can't start new thread)" in message
        and "ulimit -u" in message
    )
    after = client.application.extensions["server"].manager.snapshot()
    assert (after.waiting, after.running, after.blocks_used) == (0, 0, 0)


def test_a_stream_without_a_thread_is_refused_and_the_next_one_is_served(
    client_of: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was a 500, and every later one waited for a thread that was remembered and had
    never run.
    """
    client = client_of()
    with monkeypatch.context() as patch:
        no_thread(patch, "streamer")
        for _ in range(2):
            assert_refused(client, ASK | {"stream": True}, "streamer")
        assert client.post("/inference", json=ASK).status_code == 200, "plain answers need none"
    *chunks, last = events(client.post("/inference", json=ASK | {"stream": True}).data)
    assert chunks and last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_nobody_can_watch_is_refused_and_not_computed(
    stream: bool, client_of: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of()
    ours, theirs = socket.socketpair()
    watched = {"environ_overrides": {"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.0"}}
    with ours, theirs:
        with monkeypatch.context() as patch:
            no_thread(patch, "watcher")
            for _ in range(2):
                assert_refused(
                    client, ASK | {"num_tokens": 900, "stream": stream}, "watcher", **watched
                )
        served = client.post("/inference", json=ASK | {"stream": stream}, **watched)
        assert served.status_code == 200 and served.data
    assert client.get("/stats").get_json()["cancelled"] == 2


# ---- a client that is gone, and one that only sends more


def test_a_connection_that_is_closed_cancels_its_request_also_where_bytes_are_unread() -> None:
    engine = FakeGenerator(lambda seconds: time.sleep(0.01))
    manager = BatchingManager(make_scheduler(Dynamic(), n_blocks=10_000), lambda: engine)
    watched, other = endless = [Inference([0], 10_000), Inference([0], 10_000)]
    manager.enqueue(endless)
    ours, theirs = socket.socketpair()
    with ours, theirs, Watcher(manager, interval_s=0.01).watching(ours, [watched]):
        theirs.sendall(b"\r\nGET /stats HTTP/1.1\r\n\r\n")
        assert not watched.done.wait(0.1), "more to read is no reason"
        theirs.close()
        assert watched.done.wait(PATIENCE_S) and watched.state is State.CANCELLED
        assert other.state is State.RUNNING
    manager.close()
