"""Errors that a request can end with, and the HTTP status of each. docs/http.md has meanings."""

import math
from collections.abc import Mapping
from typing import Any


class ServingError(Exception):
    """Base of all these errors. `type`: OpenAI's kind of error. `code`: our name of it."""

    status = 500
    type = "server_error"
    code = "internal_error"
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON of answers and streams, in OpenAI's format."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class InvalidRequest(ServingError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class Unauthorized(ServingError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class Overloaded(ServingError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    headers: Mapping[str, str] = {"Retry-After": "1"}


class RateLimited(Overloaded):
    """A user's limit is used up. retry_after_s: until such a request would be within it."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class Draining(ServingError):
    status = 503
    type = "service_unavailable_error"
    code = "draining"


class EngineFailed(ServingError):
    status = 503
    type = "service_unavailable_error"
    code = "engine_failed"


class DeadlinePassed(ServingError):
    status = 504
    type = "timeout_error"
    code = "deadline_passed"


class Cancelled(ServingError):
    status = 499
    code = "cancelled"


class GenerationFailed(ServingError):
    status = 500
    code = "generation_failed"
