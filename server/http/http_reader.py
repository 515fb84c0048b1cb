"""Bytes in, whole HTTP/1.1 requests out: knows no socket, no thread and no clock.

gunicorn's parser reads the head, and alone decides how long the body is; the body is collected
here. Each byte is read a bounded number of times, however small the pieces in which bytes arrive.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

from gunicorn.http import errors
from gunicorn.http.body import ChunkedReader
from gunicorn.http.message import Request
from gunicorn.http.unreader import IterUnreader

from scheduling.errors import ServingError
from server.api.refusals import Refused, failure, too_large

MAX_HEAD_BYTES = 32_768  # a request line and its headers
MAX_LINE_BYTES = 1_024  # a chunk's size and extensions; all trailers
CHUNKS_AT_ONCE = 32  # parsed before the other connections have their turn
FREE_CHUNKS = 1_000  # may be small; a body with more must have MEAN_CHUNK bytes in each on average
MEAN_CHUNK = 16

# the end of a head, or of a line that ends with LF alone, which the parser then refuses
HEAD_ENDS = re.compile(rb"\r\n\r\n|(?<!\r)\n")
VERSION = re.compile(rb" HTTP/[0-9]\.[0-9]$")
CHUNK = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?")
WRONG_CHUNKS = "The chunks of the body are malformed; send it with a Content-Length."
STATUS: dict[type[Exception], int] = {
    errors.InvalidHTTPVersion: 505,
    errors.LimitRequestLine: 414,
    errors.ExpectationFailed: 417,
    errors.LimitRequestHeaders: 431,
    errors.UnsupportedTransferCoding: 501,
}


def rendered(error: ServingError) -> bytes:
    """Return an error as a complete HTTP answer, which closes the connection."""
    answer = failure(error)
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + answer.body


def invalid(message: str, status: int = 400) -> Refused:
    """Return the error for bytes that are no HTTP/1.1 request."""
    return Refused("invalid_http", message, status)


def no_request(error: Exception, status: int = 400) -> Refused:
    """Return the error for a request that gunicorn's parser refuses."""
    return invalid(f"This is no HTTP/1.1 request; correct it: {str(error)[:200]}", status)


class Reader:
    """Reader of the requests of one connection, one after another.

    settings: gunicorn's. client: the client's address. max_body_bytes: limit of a whole body.
    admit: called before a body is read; raises ServingError if it must not be.
    """

    def __init__(
        self,
        settings: Any,
        client: Any,
        max_body_bytes: int,
        admit: Callable[[Request], None] = lambda request: None,
    ):
        self._admit = admit
        self._settings = settings
        self._client = client
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()  # bytes that are not parsed yet
        self._searched = 0  # bytes of the buffer that hold no end of a head
        self._request: Request | None = None  # its head is complete, its body is not
        self._body = bytearray()
        self._missing = 0  # bytes of the body, or of its chunk, that are still to come
        self._chunked = False
        self._chunks = 0  # chunks of the body so far
        self._separator = b""  # ends the previous chunk
        self._in_trailers = False
        self.has_more = False  # `next_request` left chunks for another turn

    @property
    def awaits(self) -> Literal["nothing", "head", "body"]:
        """Incomplete part of the current request; "nothing" between two requests."""
        if self._request is not None:
            return "body"
        return "head" if self._buffer else "nothing"

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept: at most MAX_HEAD_BYTES + max_body_bytes + those of the last `feed`,
        unless requests are pipelined.
        """
        return len(self._buffer) + len(self._body)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def forget(self) -> None:
        """Discard all bytes received, to free their memory."""
        self._buffer, self._body, self.has_more = bytearray(), bytearray(), False

    def next_request(self) -> Request | None:
        """Return the next request with its whole body, or None while a part of it is missing.

        Raises ServingError.
        """
        self.has_more = False
        if self._request is None and not self._take_head():
            return None
        if not self._take_body():
            return None
        request, self._request = self._request, None
        assert request is not None
        request.body = io.BytesIO(self._body)
        self._body = bytearray()
        return request

    def wants_continue(self) -> bool:
        """Return whether the client awaits "100 Continue"; True at most once for a request."""
        if self._request is None or not self._request._expected_100_continue:
            return False
        self._request._expected_100_continue = False  # else gunicorn would say it again
        return not self._buffer and not self._body

    def _take_head(self) -> bool:
        # some clients end a body with one (RFC 9112, section 2.2)
        if self._buffer.startswith(b"\r\n"):
            del self._buffer[:2]
        head_end = HEAD_ENDS.search(self._buffer, max(0, self._searched - 3))
        end = head_end.end() if head_end else len(self._buffer)
        if end > MAX_HEAD_BYTES:
            message = f"The headers are larger than {MAX_HEAD_BYTES:,} bytes; send fewer."
            raise Refused("headers_too_large", message)
        if head_end is None:
            self._searched = end
            return False
        head = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._searched = 0
        try:
            request = Request(self._settings, IterUnreader([head]), self._client)
        except (errors.ParseException, errors.NoMoreData, StopIteration) as error:
            status = STATUS.get(type(error), 400)
            if status == 505 and not VERSION.search(head.partition(b"\r\n")[0]):
                status = 400  # it is no version at all
            raise no_request(error, status) from None
        self._chunked = isinstance(request.body.reader, ChunkedReader)
        self._check(request)
        self._separator, self._in_trailers, self._chunks = b"", False, 0
        self._missing = 0
        if not self._chunked:
            self._expect(request.body.reader.length)
        if self._chunked or self._missing:
            self._admit(request)
        self._request = request
        return True

    def _check(self, request: Request) -> None:
        """Check what RFC 9112 asks of a head, and gunicorn's parser does not: one Host (3.2), and
        no coding that is not decoded here (6.1).
        """
        hosts, codings = (
            [value for name, value in request.headers if name == wanted]
            for wanted in ("HOST", "TRANSFER-ENCODING")
        )
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise invalid(f"The request has {len(hosts)} Host headers; send exactly one.")
        named = {coding.strip().lower() for value in codings for coding in value.split(",")}
        if unknown := named - {"chunked", "identity"}:
            raise invalid(
                f"The body's transfer coding {min(unknown)[:50]} is not decoded here; send it as "
                "it is.",
                501,
            )

    def _expect(self, n: int) -> None:
        if len(self._body) + n > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._missing = n

    def _take_body(self) -> bool:
        """Read the received part of the body; return whether it is complete."""
        for _ in range(CHUNKS_AT_ONCE):
            self._body += self._buffer[: self._missing]
            taken = min(self._missing, len(self._buffer))
            del self._buffer[:taken]
            self._missing -= taken
            if self._missing:
                return False
            if not self._chunked:
                return True
            if self._in_trailers:
                return self._skip_trailers()
            if not self._take_size():
                return False
        self.has_more = True
        return False

    def _take_size(self) -> bool:
        """Read the next chunk's size; return False while its line is incomplete."""
        end = self._line_end(b"\r\n", len(self._separator))
        if end is None:
            return False
        line = bytes(self._buffer[:end])
        size = CHUNK.fullmatch(line, len(self._separator))
        if size is None or not line.startswith(self._separator):
            raise invalid(WRONG_CHUNKS)
        del self._buffer[: end + 2]
        self._separator = b"\r\n"
        self._expect(int(size[1], 16))
        self._in_trailers = self._missing == 0
        if self._chunks >= FREE_CHUNKS and len(self._body) < MEAN_CHUNK * self._chunks:
            raise invalid(
                f"The body's chunks hold less than {MEAN_CHUNK} bytes on average; send it with a "
                "Content-Length."
            )
        self._chunks += 1
        return True

    def _skip_trailers(self) -> bool:
        """Skip the trailers, which nothing here uses; return False until they are complete."""
        if self._buffer.startswith(b"\r\n"):
            del self._buffer[:2]
            return True
        end = self._line_end(b"\r\n\r\n", 0)
        if end is None:
            return False
        del self._buffer[: end + 4]
        return True

    def _line_end(self, ending: bytes, start: int) -> int | None:
        end = self._buffer.find(ending, start, MAX_LINE_BYTES)
        if end >= 0:
            return end
        if len(self._buffer) >= MAX_LINE_BYTES:
            raise invalid(WRONG_CHUNKS)
        return None
