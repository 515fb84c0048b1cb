"""Requests written byte by byte, and answers read as they come."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from tests.servers import PATIENCE_S

HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect((host, int(port)))
    return connection


def send(url: str, body: dict[str, Any], route: str = "/inference") -> socket.socket:
    """Send a request and leave its answer alone."""
    raw, connection = json.dumps(body).encode(), connect(url)
    head = HEAD.replace(b"/inference", route.encode())
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


def ended(connection: socket.socket) -> bytes:
    """Return all that comes until the other side ends the connection, in whatever way."""
    raw = b""
    with contextlib.suppress(ConnectionResetError), connection:
        while data := connection.recv(1_000_000):
            raw += data
    return raw
