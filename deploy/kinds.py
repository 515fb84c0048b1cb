"""Table of front ends for several servers: how each is started, and what it reports; and settings
that servers of one machine cannot share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from config import Config, from_environment

APPENDED = ("request_log", "record")  # files of one server


class Kind(NamedTuple):
    """A front end. routers: policies that choose a server for a request, the default one first."""

    module: str  # started by `python -m`; takes --router if there are several
    in_words: str
    routers: tuple[str, ...]
    merges: bool  # GET /stats is of all servers together, and names them; else they are 1 … N
    package: str | None = None  # the Python package that it needs
    install: str | None = None  # the command that installs the package


KINDS = {
    "ray": Kind(
        "deploy.serve",
        "Ray Serve's HTTP proxy and our ingress",
        ("power_of_two", "least_tokens", "prefix", "session"),
        merges=True,
        package="ray",
        install=".venv/bin/python -m pip install -r requirements-ray.txt",
    ),
    "proxy": Kind("deploy.proxy", "HAProxy", ("leastconn",), merges=False),
}


def with_shared_cores(
    config: Config, replicas: int, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the environment of servers, which share the cores unless the user set --threads."""
    if "threads" in from_environment(environ):
        return environ
    return {**environ, "EB_THREADS": str(max(1, config.threads // replicas))}
