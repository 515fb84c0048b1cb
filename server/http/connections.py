"""Connections of the worker: what each waits for, until when, and which closes for another."""

from __future__ import annotations

import enum
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from server.http.http_reader import Reader

AT_ONCE = 40  # connections accepted, read or closed in one turn of the loop


class Wait(enum.Enum):
    """Things that a connection waits for: a value of `Reader.awaits`, or the client's close.

    In the order in which connections are closed for new ones.
    """

    LINGERING = "end"
    HEAD = "head"
    IDLE = "nothing"
    BODY = "body"


class Connection:
    """A client's connection. Its socket blocks, for the threads that write to it; each call of the
    loop passes MSG_DONTWAIT.
    """

    def __init__(self, number: int, sock: socket.socket, client: Any, server: Any, reader: Reader):
        self.number = number  # by age
        self.sock = sock
        self.client = client
        self.server = server
        self.reader = reader
        self.waits: Wait | None = None  # None: in a thread, or closed
        self.held_bytes = 0
        self.lingered_bytes = 0

    @property
    def can_give_way(self) -> bool:
        """True if it may be closed for a new one. Unread bytes prevent it: on a busy machine they
        may be a whole request.
        """
        if self.waits is Wait.LINGERING:
            return True
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # nothing to read, or the client is gone
            return True

    def send(self, raw: bytes) -> None:
        """Send what the socket takes at once; a client that is gone is noticed by reading."""
        with suppress(OSError):
            self.sock.send(raw, socket.MSG_DONTWAIT)


def in_turn(ready: list[Connection]) -> list[Connection]:
    """Connections to read in this turn: of many, the newest and the oldest, so that none waits for
    a thousand others.
    """
    if len(ready) <= AT_ONCE:
        return ready
    by_age = sorted(ready, key=lambda connection: connection.number)
    return by_age[: -AT_ONCE // 2 - 1 : -1] + by_age[: AT_ONCE // 2]


class Connections:
    """All open connections, used by the loop alone.

    limits: seconds that a connection may wait for each thing. most: open connections at most.
    most_unreleased: closed ones at most whose file descriptors are not released yet.
    """

    def __init__(
        self,
        poller: selectors.BaseSelector,
        limits: Mapping[Wait, float],
        most: int,
        most_unreleased: int,
    ):
        self.limits = dict(limits)
        self.open = 0  # in threads too
        self.held_bytes = 0  # bytes of requests that are not whole, or not answered
        self._poller = poller
        self._most = most
        # when thousands come at once, closing as many would make all others wait
        self._unreleased: deque[socket.socket] = deque()
        self._most_unreleased = most_unreleased
        # deadlines by connection, the oldest first, since all of a kind have the same limit
        self._waiting: dict[Wait, dict[Connection, float]] = {wait: {} for wait in Wait}

    @property
    def has_room(self) -> bool:
        """True if a new connection can be accepted, if need be in place of another."""
        return self.open < self._most or self._least() is not None

    def add(self, connection: Connection) -> None:
        """Add a new connection; where too many are open, close another."""
        self.open += 1
        if self.open > self._most:
            self.make_room()
        self.wait(connection, Wait.HEAD)

    def make_room(self) -> bool:
        """Close the connection that matters least; return False if none can give way."""
        least = self._least()
        if least is not None:
            self.close(least)
        return least is not None

    def _least(self) -> Connection | None:
        for connections in self._waiting.values():
            for connection in islice(connections, AT_ONCE):
                if connection.can_give_way:
                    return connection
        return None

    def wait(self, connection: Connection, wait: Wait) -> None:
        """Begin to wait for something on a connection."""
        if connection.waits is None:
            self._poller.register(connection.sock, selectors.EVENT_READ, connection)
        else:
            del self._waiting[connection.waits][connection]
        connection.waits = wait
        self._waiting[wait][connection] = time.monotonic() + self.limits[wait]

    def take(self, connection: Connection) -> None:
        """Stop waiting on a connection."""
        if connection.waits is not None:
            self._poller.unregister(connection.sock)
            del self._waiting[connection.waits][connection]
            connection.waits = None

    def count_bytes(self, connection: Connection, n: int) -> None:
        """Update the count of bytes that are kept for a connection."""
        self.held_bytes += n - connection.held_bytes
        connection.held_bytes = n

    def close(self, connection: Connection) -> None:
        self.take(connection)
        self.count_bytes(connection, 0)
        self.open -= 1
        self._unreleased.append(connection.sock)
        self.release(len(self._unreleased) - self._most_unreleased)

    def release(self, n: int) -> None:
        """Release the file descriptors of n closed connections."""
        for _ in range(min(n, len(self._unreleased))):
            self._unreleased.popleft().close()

    def oldest(self, wait: Wait) -> Connection | None:
        """The connection that has waited longest for this."""
        return next(iter(self._waiting[wait]), None)

    def overdue(self) -> Iterator[tuple[Connection, Wait]]:
        """Connections past their deadline, AT_ONCE of each kind at most."""
        now = time.monotonic()
        for wait, connections in self._waiting.items():
            for connection, deadline in list(islice(connections.items(), AT_ONCE)):
                if deadline > now:
                    break
                yield connection, wait

    def shorten(self, limit_s: float) -> None:
        """Limit every wait, from now on, to this."""
        latest = time.monotonic() + limit_s
        for wait, connections in self._waiting.items():
            self.limits[wait] = min(self.limits[wait], limit_s)
            for connection, deadline in connections.items():
                connections[connection] = min(deadline, latest)

    def next_at(self) -> float:
        """Time of the next deadline; 0 while closed connections are to be released."""
        if self._unreleased:
            return 0.0
        firsts = [next(iter(each.values())) for each in self._waiting.values() if each]
        return min(firsts, default=float("inf"))
