"""The door that every request passes before its route is called: its API key, which may name its
user, its Content-Type and Content-Encoding, its Host, and whether there is such a route.

A page of any site may make a browser POST text or a form to a server on localhost, but not JSON:
for that the browser sends a CORS preflight first, which this server never allows (no answer has
Access-Control headers).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

from config.reading import digest
from server.api import refusals
from server.api.messages import HTML, JSON, Answer
from server.api.refusals import Refused, unauthorized
from server.api.routes import DESCRIPTION, OPEN, PAGE, PROBES, Call, Route, offered

if TYPE_CHECKING:
    from config.config import Config

NAME = "{name}"  # the end of some paths


class Headers(Protocol):
    """A request's headers, by names in any case."""

    def get(self, name: str, default: str, /) -> str: ...


class Door:
    """The checks of a server of this Config."""

    def __init__(self, config: Config):
        self._keys, self._hosts = config.users_of_keys, config.hosts
        self._has_page = config.live != "off"
        self._routes: dict[str, dict[str, Route]] = {}  # by path and method
        for route in offered(self._has_page):
            self._routes.setdefault(route.path, {})[route.method] = route
        self._prefixes = [path.removesuffix(NAME) for path in self._routes if NAME in path]

    def user(self, method: str, path: str, headers: Headers) -> str | None:
        """Check the key of a request, if it needs one; return the user that it names, if any.
        Raises Refused.
        """
        if not self._keys:
            return None
        route, _, _ = self._find(method, path)
        if route in OPEN or self._shows_page(route, headers):
            return None
        return user_of(self._keys, headers.get("Authorization", ""))

    def admit(
        self, method: str, path: str, headers: Headers, id: str, prefix: str = ""
    ) -> Call | Answer:
        """Check a request; return its call, but for query and body, or the answer where no handler
        is needed. Raises Refused.

        The key is checked here also if it was before the body was read: the path was not decoded
        then. prefix: before the path, as a replica has.
        """
        user = self.user(method, path, headers)
        route, taken, name = self._find(method, path)
        if method == "POST" and route is not None:
            check_body(headers)
        if self._hosts is not None and route not in PROBES:
            check_host(headers.get("Host", ""), self._hosts)
        allowed = ", ".join(sorted({*taken, "OPTIONS", *(["HEAD"] if "GET" in taken else [])}))
        if not taken:
            raise refusals.no_such_route(method, path, self._has_page)
        if route is None:
            raise refusals.no_such_method(method, path, taken, allowed)
        if self._shows_page(route, headers):
            return to_page(prefix)
        if method == "OPTIONS":
            return Answer(b"", headers={"Allow": allowed}, content_type=HTML)
        return Call(route, name, user, id)

    def _find(self, method: str, path: str) -> tuple[Route | None, Mapping[str, Route], str]:
        """Return the route that takes a request (of OPTIONS, any one of the path), all routes of
        the path by their methods, and the name at its end, if these have one.
        """
        place, name = path, ""
        for prefix in self._prefixes:
            if path not in self._routes and path.startswith(prefix) and path != prefix:
                place, name = prefix + NAME, path.removeprefix(prefix)
        taken = self._routes.get(place, {})
        route = taken.get("GET" if method == "HEAD" else method)
        if method == "OPTIONS":
            route = next(iter(taken.values()), None)
        return route, taken, name

    def _shows_page(self, route: Route | None, headers: Headers) -> bool:
        """Return whether this is GET / of a browser, which is redirected to the page."""
        if not self._has_page or route is not DESCRIPTION:
            return False
        accept = headers.get("Accept", "")
        return "text/html" in accept and JSON not in accept


def to_page(prefix: str = "") -> Answer:
    """Redirect a browser to the page."""
    return Answer(b"", 302, {"Location": f"{prefix}{PAGE.path}", "Vary": "Accept"})


def check_body(headers: Headers) -> None:
    """Raise Refused for a body that is not JSON, or compressed."""
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        message = f"A POST must say Content-Type: {JSON}; with curl, use --json instead of -d."
        raise Refused("unsupported_media_type", message)
    coding = headers.get("Content-Encoding", "")
    if {each.strip().lower() for each in coding.split(",")} - {"", "identity"}:
        message = f"This server decodes no {coding[:100]}; send the body without that encoding."
        instead = {"Accept-Encoding": "identity"}
        raise Refused("unsupported_media_type", message, None, **instead)


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
    """Return the user that the key in an Authorization header names, if any. Raises Refused.

    keys: `Config.users_of_keys`.
    """
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "bearer":
        raise unauthorized(
            "This server has an API key; send Authorization: Bearer KEY (client.py: --api-key or "
            "EB_API_KEY)."
        )
    given_key = digest(given.strip())
    # compared with all keys, so that the time it takes reveals nothing of any
    users = [user for key, user in keys.items() if hmac.compare_digest(key, given_key)]
    if not users:
        raise unauthorized("The API key is wrong; send the one that the server was started with.")
    return users[0]
