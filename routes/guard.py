"""Asked before any route: the server's key, and that a POST is JSON."""

from __future__ import annotations

from collections.abc import Collection

from flask import Flask, request
from pydantic import SecretStr

from wire import refusals

# endpoints that need no key: what watches a process has none, and the page holds no data
OPEN = ("health", "ready", "live.view")


def wants_page() -> bool:
    """The current request is a browser's, which asks for a page rather than for JSON."""
    return refusals.wants_page(request.headers.get("Accept", ""))


def guard_hosts(app: Flask, names: Collection[str] | None) -> None:
    """Have the Host of every request checked, by `Config.hosts`."""

    @app.before_request
    def check() -> None:
        if names is not None and request.endpoint not in ("health", "ready"):
            refusals.check_host(request.headers.get("Host", ""), names)


def guard(app: Flask, key: SecretStr | None, live: bool) -> None:
    """Have every request of `app` checked; without a key only its content type is. live: a browser
    that asks for / is shown the page.
    """

    @app.before_request
    def check() -> None:
        shown = live and request.endpoint == "about" and wants_page()
        if key is not None and request.endpoint not in OPEN and not shown:
            refusals.check_key(key.get_secret_value(), request.headers.get("Authorization", ""))
        if request.method == "POST" and request.routing_exception is None:
            refusals.check_post(request.headers.get("Content-Type", ""))
