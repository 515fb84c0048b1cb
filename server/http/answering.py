"""Answers of the WSGI app to whole requests, written in a thread."""

from __future__ import annotations

import logging
from typing import Any

from gunicorn.http import wsgi
from gunicorn.http.errors import ParseException
from gunicorn.http.message import Request

from scheduling.errors import ServingError
from server.api.door import CALLER
from server.http.connections import Connection
from server.http.http_reader import no_request, rendered

log = logging.getLogger("gunicorn.error")


def answer(app: Any, settings: Any, connection: Connection, request: Request, last: bool) -> bool:
    """Answer a request; return whether its connection can be used again.

    last: the connection closes after this request. Raises OSError if the client is gone, and
    BlockingIOError if it has stopped reading.
    """
    try:
        response, environ = wsgi.create(
            request, connection.sock, connection.client, connection.server, settings
        )
    except ParseException as error:
        connection.send(rendered(no_request(error)))
        return False
    environ |= {"wsgi.multithread": True, CALLER: request.caller}
    if last:
        response.force_close()
    try:
        pieces = app(environ, response.start_response)
        try:
            for piece in pieces:
                response.write(piece)
            response.close()
        finally:
            pieces.close()
    except OSError:
        raise
    except Exception:
        log.exception("the answer to %s %s failed", request.method, request.path)
        if not response.headers_sent:
            failed = ServingError("The answer could not be written.")
            connection.send(rendered(failed))
        return False
    return not response.should_close()
