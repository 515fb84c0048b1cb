"""A free port, and a check of the address before anything is started."""

from __future__ import annotations

import socket

from config.config import Config
from config.settings import ConfigError


def check_port(config: Config) -> None:
    """Raise ConfigError if a server could not listen on its host and port."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.address} ({error.strerror}); choose another "
                "--port or --host"
            ) from None


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
