"""Checks of an HTTP request before its route is called: its API key, which may name its user, its
Content-Type and Content-Encoding, and its Host; and the errors of HTTP itself.

A page of any site may make a browser POST text or a form to a server on localhost, but not JSON:
for that the browser sends a CORS preflight first, which this server never allows (no answer has
Access-Control headers).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from config import MAX_BODY_BYTES
from config.keys import digest
from config.left import ROUTES
from scheduling.errors import ServingError, Unauthorized
from server.api.messages import JSON
from server.api.routes import OPEN, offered


class Headers(Protocol):
    """A request's headers, by names in any case."""

    def get(self, name: str, default: str, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Guard:
    """The checks of a server: its keys (`Config.users_of_keys`), the names that a Host may have
    (`Config.hosts`), and whether the page is offered.
    """

    keys: Mapping[str, str | None]
    hosts: Collection[str] | None
    has_page: bool

    def user_of(self, method: str, route: str | None, headers: Headers) -> str | None:
        """Return the user of a request's key, if any. Raises ServingError for a refused request.

        route: its name in ROUTES, or None.
        """
        user = None
        if not (route in OPEN or self.shows_page(route, headers)):
            user = user_of(self.keys, headers.get("Authorization", ""))
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if method == "POST" and route is not None and kind != JSON:
            message = f"A POST must say Content-Type: {JSON}; with curl, use --json instead of -d."
            raise Refused("unsupported_media_type", message)
        coding = headers.get("Content-Encoding", "")
        compressed = {each.strip().lower() for each in coding.split(",")} - {"", "identity"}
        if method == "POST" and route is not None and compressed:
            message = f"This server decodes no {coding[:100]}; send the body without that encoding."
            instead = {"Accept-Encoding": "identity"}
            raise Refused("unsupported_media_type", message, None, **instead)
        if self.hosts is not None and route not in ("GET /health", "GET /ready"):
            check_host(headers.get("Host", ""), self.hosts)
        return user

    def shows_page(self, route: str | None, headers: Headers) -> bool:
        """Return whether this is GET / of a browser, which is redirected to the page."""
        accept = headers.get("Accept", "")
        return self.has_page and route == "GET /" and "text/html" in accept and JSON not in accept


# codes of refusals, and the status of each; docs/http.md shows them
STATUSES = {
    "invalid_http": 400, "adapters_are_fixed": 403, "host_not_allowed": 403, "needs_a_key": 403,
    "not_found": 404, "replica_not_found": 404, "method_not_allowed": 405, "request_timeout": 408,
    "request_entity_too_large": 413, "unsupported_media_type": 415, "headers_too_large": 431,
    "overloaded": 503,
}  # fmt: skip


class Refused(ServingError):
    """A refusal by HTTP's own rules. The message is one sentence that names the fix.

    status: of a code that another program states; else that of STATUSES.
    """

    def __init__(self, code: str, message: str, status: int | None = None, **headers: str):
        super().__init__(message)
        self.status, self.code, self.headers = status or STATUSES[code], code, headers
        self.type = "server_error" if self.status >= 500 else "invalid_request_error"


def no_such_route(method: str, path: str, has_page: bool) -> Refused:
    if instead := ROUTES.get(path):
        return Refused("not_found", f"{path} is no longer a route: {instead}.")
    routes = ", ".join(offered(has_page))
    return Refused("not_found", f"There is no {method} {path} here; routes: {routes}.")


def no_such_method(method: str, path: str, allowed: Iterable[str]) -> Refused:
    """allowed: methods that the route takes."""
    allowed = sorted(allowed)
    use = ", ".join(name for name in allowed if name not in ("HEAD", "OPTIONS"))
    message = f"{path} takes no {method}; use {use}."
    return Refused("method_not_allowed", message, Allow=", ".join(allowed))


def too_large(most: int = MAX_BODY_BYTES) -> Refused:
    message = f"The body is larger than {most:,} bytes."
    return Refused("request_entity_too_large", message)


def check_host(host: str, names: Collection[str]) -> None:
    """Raise Refused for a Host that is neither an address nor a known name.

    A site can make its own name resolve to this machine (DNS rebinding), so that a browser takes
    this server for the site's. host: "" if the request has none, which a browser always sends.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    with suppress(ValueError):
        ip_address(name)
        return
    if name and name not in names:
        message = (
            f"This server does not know the name {name[:100]!r}; start it with --allowed-hosts "
            "NAME, or with --api-key."
        )
        raise Refused("host_not_allowed", message)


def user_of(keys: Mapping[str, str | None], authorization: str) -> str | None:
    """The user that the key in an Authorization header names, if any.

    keys: `Config.users_of_keys`; without any, none is needed. Raises Unauthorized.
    """
    if not keys:
        return None
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "bearer":
        raise Unauthorized(
            "This server has an API key; send Authorization: Bearer KEY (client.py: --api-key or "
            "EB_API_KEY)."
        )
    given_key = digest(given.strip())
    # compared with all keys, so that the time it takes reveals nothing of any
    users = [user for key, user in keys.items() if hmac.compare_digest(key, given_key)]
    if not users:
        raise Unauthorized("The API key is wrong; send the one that the server was started with.")
    return users[0]
