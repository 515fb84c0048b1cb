"""Notices clients that have gone while their request waits, runs or is streamed, and gives the request up.

A closed connection shows when its socket is peeked at: nothing to read means alive, end of file or an error
means gone. Writing would not tell: the first write after a close succeeds. A reader that stays but takes nothing
blocks the write, and with it an HTTP thread; after a while it counts as gone too, and its connection is shut.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batching import BatchingManager, Inference


@dataclass(slots=True, eq=False)
class Watched:
    connection: socket.socket | None
    group: Sequence[Inference]
    writing_since: float | None = None  # on time.monotonic's clock, while a piece of its stream is being written


class Watcher:
    """One thread for all connections, started with the first; it looks every `interval_s` seconds."""

    def __init__(self, manager: BatchingManager, interval_s: float = 0.25, stalled_after_s: float = 60.0):
        self._manager = manager
        self._interval_s = interval_s
        self._stalled_after_s = stalled_after_s
        self._watched: set[Watched] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, connection: socket.socket | None, group: Sequence[Inference]) -> Iterator[Watched]:
        """Cancel `group` if its connection closes or stalls in this block. Without a connection (a test client) do nothing."""
        watched = Watched(connection, group)
        if connection is None:
            yield watched
            return
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
                self._thread.start()
        try:
            yield watched
        finally:
            with self._lock:
                self._watched.remove(watched)

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            with self._lock:  # under it no connection is closed and its number given to another
                gone = [watched.group for watched in self._watched if self._is_gone(watched)]
            for group in gone:
                self._manager.cancel(group)

    def _is_gone(self, watched: Watched) -> bool:
        assert watched.connection is not None
        try:
            since = watched.writing_since
            if since is not None and time.monotonic() - since > self._stalled_after_s:
                watched.connection.shutdown(socket.SHUT_RDWR)  # ends the write
                return True
            return not watched.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
