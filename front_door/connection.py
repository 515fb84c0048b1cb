"""One client of the worker: what it waits for, and whose turn it is among many."""

from __future__ import annotations

import enum
import socket
from typing import Any

from front_door.http_reader import Reader

AT_ONCE = 40  # connections accepted, read or given up before the others' turn


class Wait(enum.Enum):
    """What for. In the order in which connections give way to new ones."""

    LINGERING = enum.auto()
    HEAD = enum.auto()
    IDLE = enum.auto()
    BODY = enum.auto()


AWAITED = {"nothing": Wait.IDLE, "head": Wait.HEAD, "body": Wait.BODY}


class Connection:
    """One client. The socket blocks, for the threads that write to it; the loop asks it not to,
    call by call.
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


def in_turn(ready: list[Connection]) -> list[Connection]:
    """Whom to read now: of many some of the newest and some of the oldest, so that nobody waits for
    a thousand others.
    """
    if len(ready) <= AT_ONCE:
        return ready
    by_age = sorted(ready, key=lambda connection: connection.number)
    return by_age[: -AT_ONCE // 2 - 1 : -1] + by_age[: AT_ONCE // 2]
