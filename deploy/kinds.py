"""Front ends of several servers, in a table: what starts one, and what it tells. Imports none."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """module: which `python -m` runs. routers: what chooses a server for a request; the first does
    unless another one is named, which the module takes as --router where it knows several.
    """

    module: str
    in_words: str
    routers: tuple[str, ...]
    merges: bool  # GET /stats is of all servers together, and names them; else they are 1 … N
    package: str | None = None  # of Python, without which it does not start
    install: str | None = None  # what installs that one


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
