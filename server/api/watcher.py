"""Cancellation of requests whose client disconnects while they wait, run or are streamed.

A poll of the kernel shows that a client has closed its connection, also where bytes are unread.
Writing would not show it: the first write after a close succeeds. A client that closes only its
sending direction counts as gone.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from batching import BatchingManager
from scheduling.inference import Inference
from server.api.threads import started

# POLLRDHUP is Linux's; elsewhere a poll for POLLIN reports POLLHUP
CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Watcher:
    """One thread for all connections, started with the first; polls every `interval_s` seconds."""

    def __init__(self, manager: BatchingManager, interval_s: float = 0.25):
        self._manager = manager
        self._interval_s = interval_s
        self._watched: dict[int, Sequence[Inference]] = {}  # by the connection's file descriptor
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(
        self, connection: socket.socket | None, group: Sequence[Inference]
    ) -> Iterator[None]:
        """Cancel `group` if its connection closes in this block.

        Without a connection (a test client) do nothing. Raises Overloaded.
        """
        if connection is None:
            yield
            return
        number = connection.fileno()
        with self._lock:
            self._thread = self._thread or started("watcher", self._run)
            self._watched[number] = group
        try:
            yield
        finally:
            with self._lock:
                del self._watched[number]

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            poll = select.poll()
            with self._lock:  # so that no connection is closed, and its number reused, meanwhile
                for number in self._watched:
                    poll.register(number, CLOSED | select.POLLIN)
                gone = [self._watched[number] for number, events in poll.poll(0) if events & CLOSED]
            for group in gone:
                self._manager.cancel(group)
