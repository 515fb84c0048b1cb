"""Where the system starts no more threads: the request is refused with a sentence, and the next one
tries again.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

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


@pytest.mark.parametrize(
    ("name", "stream"), [("streamer", True), ("watcher", False), ("watcher", True)]
)
def test_a_request_without_its_thread_is_refused_and_the_next_one_is_served(
    name: str, stream: bool, client_of: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was a 500, and every later one waited for a thread that was remembered and had
    never run.
    """
    client = client_of()
    ours, theirs = socket.socketpair()
    watched = {"environ_overrides": {"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.0"}}
    with ours, theirs:
        with monkeypatch.context() as patch:
            no_thread(patch, name)
            for _ in range(2):
                assert_refused(client, ASK | {"num_tokens": 900, "stream": stream}, name, **watched)
        served = client.post("/inference", json=ASK | {"stream": stream}, **watched)
        assert served.status_code == 200 and served.data
