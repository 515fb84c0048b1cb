"""The watcher by itself: who is gone, and who only takes long."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from batching import BatchingManager
from generate.fake import FakeGenerator
from routes.watcher import Watcher
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic
from tests.virtual import make_scheduler

PATIENCE_S = 20


@pytest.fixture
def manager() -> Iterator[BatchingManager]:
    def slow(seconds: float) -> None:
        time.sleep(0.01)

    made = BatchingManager(make_scheduler(Dynamic(), n_blocks=10_000), lambda: FakeGenerator(slow))
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def endless(manager: BatchingManager) -> Inference:
    inference = Inference([0], 10_000)
    manager.enqueue([inference])
    return inference


def test_a_connection_that_is_closed_cancels_its_request_also_where_bytes_are_unread(
    manager: BatchingManager, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    watched, other = endless(manager), endless(manager)
    with Watcher(manager, interval_s=0.01).watching(ours, [watched]):
        theirs.sendall(b"\r\nGET /stats HTTP/1.1\r\n\r\n")
        assert not watched.done.wait(0.1), "more to read is no reason"
        theirs.close()
        assert watched.done.wait(PATIENCE_S) and watched.state is State.CANCELLED
    assert other.state is State.RUNNING
