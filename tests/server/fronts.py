"""Every way to put a server behind a URL, all of which test_conformance.py asks the same."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from client.calls import get
from compare.servers import ALONE
from tests.servers import PATIENCE_S, server

Front = Callable[[str, Mapping[str, Any], str | None], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def on_ray(mode: str, settings: Mapping[str, Any], key: str | None = None) -> Iterator[str]:
    """Start two servers on Ray Serve, and yield their URL."""
    pytest.importorskip("ray", reason="Ray is not installed: requirements-ray.txt")
    with server(mode, settings, key=key, start=(*ALONE, "--replicas", "2")) as url:
        yield url


def of_processes(
    mode: str, settings: Mapping[str, Any], key: str | None = None
) -> contextlib.AbstractContextManager[str]:
    """Start a server whose HTTP is three processes beside the engine's."""
    return server(mode, {**settings, "http_processes": 3}, key=key)


FRONTS: dict[str, Front] = {"plain": server, "processes": of_processes, "ray": on_ray}
EVERY_FRONT = ["plain", "processes", pytest.param("ray", marks=pytest.mark.extra)]


def servers_of(url: str, key: str | None = None) -> list[str]:
    """Where each server behind a URL is reached by itself: at /replicas/NAME for each name in
    /stats, if there are several.
    """
    names = get(f"{url}/stats", key=key).get("replicas", ())
    return [f"{url}/replicas/{name}" for name in names] or [url]


JSON = {"Content-Type": "application/json"}
STANDARD = ("Content-Type", "Allow", "Retry-After", "WWW-Authenticate", "Cache-Control")
COMPARED = (*STANDARD, "X-Accel-Buffering", "Location", "Vary", "Accept-Encoding")
OWN = re.compile(  # an answer's, or a process's
    r'("(?:arrived_at|(?:queue|ttft|decode|held|e2e|preempted|paused|itl)_s|parts|created|pids|'
    r'host|port|http_processes)":)(?:[0-9.e-]+|\{[^}]*\}|\[[^\]]*\]|"[^"]*")|("id":)"(?:chat)?cmpl-[0-9a-f]+"'
)


class Response(NamedTuple):
    status: int
    headers: dict[str, str | None]
    body: bytes

    @property
    def masked(self) -> Response:
        """Without what is this answer's alone."""
        return self._replace(body=OWN.sub(r"\1\g<2>0", self.body.decode()).encode())


def connected(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)


def send(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Any = JSON
) -> None:
    """body: JSON, or bytes as they are."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    # if it was refused before all of it was sent, the answer is there
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, path, raw, headers)


def fetch(url: str, method: str, path: str, body: Any = None, headers: Any = JSON) -> Response:
    with contextlib.closing(connected(url)) as connection:
        send(connection, method, path, body, headers)
        response = connection.getresponse()
        headers = {name: response.getheader(name) for name in COMPARED}
        return Response(response.status, headers, response.read())
