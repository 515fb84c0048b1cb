"""Answers and events, independent of the HTTP server that sends them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

JSON = "application/json"
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
STREAM = "text/event-stream"
# a stream's: proxies must not buffer it
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"  # the last event

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


def event(data: Any) -> bytes:
    """Return data as one server-sent event."""
    return f"data: {to_json(data)}\n\n".encode()
