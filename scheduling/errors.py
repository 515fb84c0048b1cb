"""Errors that a request can end with, each with a sentence and a code: the error's name in logs,
recordings and answers. server/api/refusals.py has the HTTP status of each.
"""


class ServingError(Exception):
    """Base of all these errors. param: the field of the request that is wrong."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class InvalidRequest(ServingError):
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class Overloaded(ServingError):
    """retry_after_s: until the request may be sent again."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A user's limit is used up. retry_after_s: until such a request would be within it."""

    code = "rate_limit_exceeded"


class Draining(ServingError):
    code = "draining"


class EngineFailed(ServingError):
    code = "engine_failed"


class DeadlinePassed(ServingError):
    code = "deadline_passed"


class Cancelled(ServingError):
    code = "cancelled"


class GenerationFailed(ServingError):
    code = "generation_failed"
