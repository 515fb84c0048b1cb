"""Asked before any route: a key, if the server has any, and that a POST is JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flask import Flask, Response, g, request

from wire import refusals
from wire.messages import REQUEST_ID, request_id

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


def guard(app: Flask, keys: Mapping[str, str | None], live: bool) -> None:
    """Have every request of `app` checked, and name it: `g.request_id`, which its answer has in a
    header, and `g.user`, the user of its key.

    keys: as `refusals.user_of` takes them. live: a browser that asks for / is shown the page.
    """

    @app.before_request
    def check() -> None:
        g.request_id = request_id(request.headers.get(REQUEST_ID, ""))
        g.user = None
        shown = live and request.endpoint == "about" and wants_page()
        if request.endpoint not in OPEN and not shown:
            g.user = refusals.user_of(keys, request.headers.get("Authorization", ""))
        if request.method == "POST" and request.routing_exception is None:
            refusals.check_post(request.headers.get("Content-Type", ""))

    @app.after_request
    def name(response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        return response
