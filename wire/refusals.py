"""What an HTTP request is refused for before anybody looks at what it asks, and the key that it
must bring, which may name its user.

A page of any site may make a browser POST text or a form to a server on localhost, but not JSON:
for that the browser first asks this server whether it may, and no answer here says so (there are no
Access-Control headers).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address

from config import MAX_BODY_BYTES
from config.keys import digest
from scheduling.errors import ServingError, Unauthorized
from wire.messages import JSON


class Refused(ServingError):
    """By HTTP's own rules."""

    type = "invalid_request_error"

    def __init__(self, status: int, code: str, message: str, **headers: str):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def no_such_route(method: str, path: str, routes: Iterable[str]) -> Refused:
    named = ", ".join(routes)
    return Refused(404, "not_found", f"There is no {method} {path} here; routes: {named}.")


def no_such_method(method: str, path: str, allowed: Iterable[str]) -> Refused:
    """allowed: methods that the route takes."""
    allowed = sorted(allowed)
    use = ", ".join(name for name in allowed if name not in ("HEAD", "OPTIONS"))
    message = f"{path} takes no {method}; use {use}."
    return Refused(405, "method_not_allowed", message, Allow=", ".join(allowed))


def too_large() -> Refused:
    message = f"The body is larger than {MAX_BODY_BYTES:,} bytes."
    return Refused(413, "request_entity_too_large", message)


def check_host(host: str, names: Collection[str]) -> None:
    """A site can have its own name lead a browser to this machine (DNS rebinding), which then takes
    this server for that site's: without a key, only addresses and known names are answered. `host`:
    the request's, "" if it has none, as no browser's. Raises Refused.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    with suppress(ValueError):
        ip_address(name)
        return
    if name and name not in names:
        raise Refused(
            403,
            "host_not_allowed",
            f"This server does not know the name {name[:100]!r}; start it with --allowed-hosts "
            "NAME, or with --api-key.",
        )


def check_post(content_type: str) -> None:
    """Raises Refused."""
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise Refused(
            415,
            "unsupported_media_type",
            f"A POST must say Content-Type: {JSON}; with curl, use --json instead of -d.",
        )


def user_of(keys: Mapping[str, str | None], authorization: str) -> str | None:
    """Whom the key in a request's Authorization header names, if it names somebody.

    keys: `Config.users_of_keys`; without any, none is asked for. Raises Unauthorized.
    """
    if not keys:
        return None
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "bearer":
        raise Unauthorized(
            "This server has an API key; send Authorization: Bearer KEY (client.py: --api-key or "
            "EB_API_KEY)."
        )
    found = digest(given.strip())
    # compared with all of them, so that the time it takes tells nothing of any
    users = [user for key, user in keys.items() if hmac.compare_digest(key, found)]
    if not users:
        raise Unauthorized("The API key is wrong; send the one that the server was started with.")
    return users[0]


def wants_page(accept: str) -> bool:
    """By its Accept header it is a browser's request, which asks for a page and not for JSON."""
    return "text/html" in accept and JSON not in accept
