"""Asked before any route: the server's key, and a content type that no web page can send unasked.

A page of any site may make a browser POST text or a form to a server on localhost, but not JSON:
for that the browser first asks this server whether it may, and no answer here says so (there are no
Access-Control headers).
"""

from __future__ import annotations

import hmac

from flask import Flask, request
from pydantic import SecretStr
from werkzeug.exceptions import UnsupportedMediaType

from scheduling.errors import Unauthorized

# endpoints that need no key: what watches a process has none, and the page holds no data
OPEN = ("health", "ready", "live.view")


def wants_page() -> bool:
    """The current request is a browser's, which asks for a page rather than for JSON."""
    accepted = request.accept_mimetypes
    return accepted.best_match(("application/json", "text/html")) == "text/html"


def guard(app: Flask, key: SecretStr | None, live: bool) -> None:
    """Have every request of `app` checked; without a key only its content type is. live: a browser
    that asks for / is shown the page.
    """

    @app.before_request
    def check() -> None:
        shown = live and request.endpoint == "about" and wants_page()
        if key is not None and request.endpoint not in OPEN and not shown:
            _check_key(key.get_secret_value())
        if (
            request.method == "POST"
            and request.routing_exception is None
            and request.mimetype != "application/json"
        ):
            raise UnsupportedMediaType(
                "A POST must say Content-Type: application/json; with curl, use --json instead of "
                "-d."
            )


def _check_key(key: str) -> None:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        raise Unauthorized(
            "This server has an API key; send Authorization: Bearer KEY (client.py: --api-key or "
            "EB_API_KEY)."
        )
    if not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise Unauthorized("The API key is wrong; send the one that the server was started with.")
