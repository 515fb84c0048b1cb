"""Every way to put a server behind a URL. test_conformance.py asks the same of all of them; a new
one is a line of FRONTS.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from client.calls import ServerError, get
from compare.servers import as_flag, wait_until_ready
from config import ConfigError
from deploy import haproxy
from tests.servers import PATIENCE_S, ROOT, free_port, server

Front = Callable[[str, Mapping[str, Any], str | None], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def plain(mode: str, settings: Mapping[str, Any], key: str | None = None) -> Iterator[str]:
    """One server by itself."""
    with server(mode, settings, key=key) as url:
        yield url


@contextlib.contextmanager
def proxy(mode: str, settings: Mapping[str, Any], key: str | None = None) -> Iterator[str]:
    """Two servers behind HAProxy."""
    try:
        haproxy.find()
    except ConfigError as error:
        pytest.skip(str(error))
    with started("deploy.proxy", mode, *two(settings), key=key) as url:
        yield url


@contextlib.contextmanager
def ray(mode: str, settings: Mapping[str, Any], key: str | None = None) -> Iterator[str]:
    """Two replicas on Ray Serve."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install -r requirements-ray.txt")
    with started("deploy.serve", mode, *two(settings), key=key) as url:
        yield url


def two(settings: Mapping[str, Any]) -> list[str]:
    """Two replicas with these settings, as words of a command line."""
    flags = [word for name, value in settings.items() for word in as_flag(name, value)]
    return ["--replicas", "2", *flags]


@contextlib.contextmanager
def started(module: str, *arguments: str, key: str | None = None) -> Iterator[str]:
    """A program of deploy/."""
    port = free_port()
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    environment = os.environ | {"EB_API_KEY": key or "none"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, PATIENCE_S)
            yield url
        except ServerError as error:
            output.seek(0)
            raise ServerError(f"{error}\n{output.read().decode()[-2000:]}") from None
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


FRONTS: dict[str, Front] = {"plain": plain, "proxy": proxy, "ray": ray}
EVERY_FRONT = [
    "plain",
    pytest.param("proxy", marks=pytest.mark.extra),
    pytest.param("ray", marks=pytest.mark.extra),
]


def servers_of(url: str, key: str | None = None) -> list[str]:
    """Where each server behind a URL is reached by itself, at /stats and /metrics: at
    /replicas/NAME for each name in /stats, else at /replicas/1, /replicas/2, … if there are
    several.
    """
    with contextlib.suppress(ServerError):
        if names := get(f"{url}/stats", key=key).get("replicas"):
            return [f"{url}/replicas/{name}" for name in names]
    found: list[str] = []
    with contextlib.suppress(ServerError):
        while True:
            each = f"{url}/replicas/{len(found) + 1}"
            get(f"{each}/stats", key=key)
            found.append(each)
    return found or [url]


# ---- what they are asked

JSON = {"Content-Type": "application/json"}
COMPARED = (
    "Content-Type",
    "Allow",
    "Retry-After",
    "WWW-Authenticate",
    "Cache-Control",
    "X-Accel-Buffering",
    "Location",
    "Vary",
)
OWN = re.compile(  # an answer's, or a process's
    r'("(?:arrived_at|(?:queue|ttft|decode|held|e2e|preempted|paused|itl)_s|created|pids|host|port)'
    r'":)(?:[0-9.e-]+|\[[^\]]*\]|"[^"]*")|("id":)"(?:chat)?cmpl-[0-9a-f]+"'
)


class Said(NamedTuple):
    status: int
    headers: dict[str, str | None]
    body: bytes

    @property
    def masked(self) -> Said:
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


def asked(url: str, method: str, path: str, body: Any = None, headers: Any = JSON) -> Said:
    with contextlib.closing(connected(url)) as connection:
        send(connection, method, path, body, headers)
        told = connection.getresponse()
        return Said(told.status, {name: told.getheader(name) for name in COMPARED}, told.read())
