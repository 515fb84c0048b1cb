"""Answers, independent of the HTTP server that sends them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from scheduling.errors import GenerationFailed, ServingError

JSON = "application/json"
STREAM = "text/event-stream"
# of a stream: proxies must not buffer it
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# header of a request's id, in its answer too; the request log has the id as request_id
REQUEST_ID = "X-Request-Id"

# ASCII alone: some clients take U+2028 or U+0085 in a stream for the end of a line
to_json = json.JSONEncoder(separators=(",", ":")).encode


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = JSON


def request_id(given: str) -> str:
    """Return the id that a client gave, or a new one if that is missing or fits no header."""
    return given if re.fullmatch("[!-~]{1,128}", given) else secrets.token_hex(16)


def answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer in JSON, its keys in the order of `data`."""
    return Answer(f"{to_json(data)}\n".encode(), status, headers or {})


def failure(error: Exception) -> Answer:
    """Return the answer to an error; an unexpected one shows no more than its class."""
    if not isinstance(error, ServingError):
        error = GenerationFailed(f"Unexpected error: {type(error).__name__}")
    return answer(error.body(), error.status, error.headers)
