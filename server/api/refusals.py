"""HTTP's view of errors: the status, OpenAI's type and the headers of each, and its answer; and the
refusals of HTTP itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from config.config import MAX_BODY_BYTES
from scheduling import errors
from scheduling.errors import InvalidRequest, Overloaded, ServingError
from server.api.messages import Answer, answer
from server.api.routes import offered


class Kind(NamedTuple):
    """The status of a kind of errors, and OpenAI's word for it."""

    status: int
    type: str


# by class; any other error has the row of its base class
KINDS: dict[type, Kind] = {
    ServingError: Kind(500, "server_error"),
    InvalidRequest: Kind(400, "invalid_request_error"),
    errors.ModelNotFound: Kind(404, "invalid_request_error"),
    Overloaded: Kind(429, "rate_limit_error"),
    errors.Cancelled: Kind(499, "server_error"),
    errors.Draining: Kind(503, "service_unavailable_error"),
    errors.EngineFailed: Kind(503, "service_unavailable_error"),
    errors.DeadlinePassed: Kind(504, "timeout_error"),
}
# codes of refusals by HTTP's own rules, and the status of each; docs/http.md shows them
STATUSES = {
    "invalid_http": 400,
    "invalid_api_key": 401,
    "adapters_are_fixed": 403,
    "host_not_allowed": 403,
    "needs_a_key": 403,
    "not_found": 404,
    "replica_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_entity_too_large": 413,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
    "overloaded": 503,
}


class Refused(ServingError):
    """A refusal by HTTP's own rules. The message is one sentence that names the fix.

    status: for a code that another program states; by default the one in STATUSES.
    """

    def __init__(self, code: str, message: str, status: int | None = None, **headers: str):
        super().__init__(message)
        self.code, self.status, self.headers = code, status or STATUSES[code], headers


def kind_of(error: ServingError) -> Kind:
    """Return the status and the type of an error."""
    if isinstance(error, Refused):
        base = ServingError if error.status >= 500 else InvalidRequest
        return Kind(error.status, KINDS[base].type)
    return next(KINDS[each] for each in type(error).__mro__ if each in KINDS)


def body_of(error: ServingError) -> dict[str, Any]:
    """Return an error as JSON, for answers and streams, in OpenAI's format."""
    of = {"type": kind_of(error).type, "param": error.param, "code": error.code}
    return {"error": {"message": str(error)} | of}


def failure(error: Exception) -> Answer:
    """Return the answer to an error; an unexpected one shows no more than its class."""
    if not isinstance(error, ServingError):
        error = errors.GenerationFailed(f"Unexpected error: {type(error).__name__}")
    headers = error.headers if isinstance(error, Refused) else {}
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return answer(body_of(error), kind_of(error).status, headers)


def unauthorized(message: str) -> Refused:
    return Refused("invalid_api_key", message, None, **{"WWW-Authenticate": "Bearer"})


def no_such_route(method: str, path: str, has_page: bool) -> Refused:
    routes = ", ".join(route.name for route in offered(has_page))
    return Refused("not_found", f"There is no {method} {path} here; routes: {routes}.")


def no_such_method(method: str, path: str, taken: Iterable[str], allowed: str) -> Refused:
    """taken: methods of the path's routes. allowed: the header of all that it takes."""
    message = f"{path} takes no {method}; use {', '.join(sorted(taken))}."
    return Refused("method_not_allowed", message, Allow=allowed)


def too_slow(setting: str, limit_s: float) -> Refused:
    message = (
        f"The request came too slowly; send it within the server's {setting} of {limit_s:g} s."
    )
    return Refused("request_timeout", message)


def too_large(most: int = MAX_BODY_BYTES) -> Refused:
    return Refused("request_entity_too_large", f"The body is larger than {most:,} bytes.")
