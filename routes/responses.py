"""Conversions between Flask's requests and responses and those of `wire`."""

from __future__ import annotations

from flask import Response, request
from werkzeug.exceptions import HTTPException

from scheduling.errors import InvalidRequest
from wire.messages import Answer


def body() -> bytes:
    """Return the current request's body, which is not kept. Raises InvalidRequest if it cannot be
    read.
    """
    try:
        raw = request.get_data(cache=False)
        request.environ["wsgi.input"].close()
        return raw
    except HTTPException:  # Flask's own refusals
        raise
    except Exception as error:  # the HTTP server's: cut short, too slow, or wrongly chunked
        raise InvalidRequest(
            f"The body could not be read to its end ({type(error).__name__})."
        ) from None


def respond(answer: Answer | Response) -> Response:
    if isinstance(answer, Response):  # a stream
        return answer
    return Response(answer.body, answer.status, answer.headers, content_type=answer.content_type)
