"""Notices clients that have gone while their request waits or runs, and gives the request up.

A closed connection shows when its socket is peeked at: nothing to read means alive, end of file or an error
means gone. Writing would not tell: the first write after a close succeeds.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from batching import BatchingManager, Inference


class Watcher:
    """One thread for all connections, started with the first; it looks every `interval_s` seconds."""

    def __init__(self, manager: BatchingManager, interval_s: float = 0.25):
        self._manager = manager
        self._interval_s = interval_s
        self._watched: dict[int, tuple[socket.socket, Sequence[Inference]]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, connection: socket.socket | None, group: Sequence[Inference]) -> Iterator[None]:
        """Cancel `group` if its connection closes in this block. Without a connection (a test client) do nothing."""
        if connection is None:
            yield
            return
        with self._lock:
            self._watched[id(group)] = (connection, group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._watched[id(group)]

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            with self._lock:
                gone = [group for connection, group in self._watched.values() if _is_gone(connection)]
            for group in gone:
                self._manager.cancel(group)


def _is_gone(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
