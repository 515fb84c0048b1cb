"""Table of front ends for several servers: how each is started, and what it reports; and settings
that servers of one machine cannot share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from config.resolve import resolve

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
        "deploy.serve", "Ray Serve's HTTP proxy and our ingress",
        ("power_of_two", "least_tokens", "prefix", "session"), merges=True, package="ray",
        install=".venv/bin/python -m pip install -r requirements-ray.txt",
    ),
    "proxy": Kind("deploy.proxy", "HAProxy", ("leastconn",), merges=False),
}  # fmt: skip


def sharing_cores(servers: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return `resolve` for servers that share a machine's cores, unless --threads is set."""

    def fill_in(settings: Mapping[str, Any]) -> dict[str, Any]:
        resolved = resolve(settings)
        if settings.get("threads") in (None, "", "auto"):
            resolved["threads"] = max(1, resolved["threads"] // servers)
        return resolved

    return fill_in
