"""The watcher by itself: a client that is gone, and one that only sends more."""

from __future__ import annotations

import socket
import time

from batching import BatchingManager
from generate.fake import FakeGenerator
from routes.watcher import Watcher
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic
from tests.servers import PATIENCE_S
from tests.virtual import make_scheduler


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
