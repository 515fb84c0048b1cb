"""The completion routes: this server's own, which runs to `num_tokens` whatever tokens come, and
OpenAI's, which end at end-of-text and at `stop` strings; in every batching mode.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

from flask import Response, request

from scheduling.errors import Overloaded, ServingError
from scheduling.inference import Inference
from server.api.messages import STREAM, STREAM_HEADERS, Answer, answer
from server.api.reader import RequestReader
from server.api.rendering import Renderer, renderer_of
from server.api.routes import Call, Route
from server.http.streams import Stream, Streamer, Watcher
from server.request import Request
from server.serving import Server


class Completions:
    """Handlers of the completion routes."""

    def __init__(self, server: Server, reader: RequestReader):
        self.server, self._reader = server, reader
        self._watcher = Watcher(server.manager)
        self._streamer = Streamer()

    def handlers(self) -> dict[Route, Callable[[Call], Answer | Response]]:
        readers = self._reader.readers()
        return {route: partial(self._answer, read) for route, read in readers.items()}

    def _answer(self, read: Callable[[Call], Request], call: Call) -> Answer | Response:
        """Answer a request. Raises ServingError: for an invalid one, or the group's first error."""
        renderer = renderer_of(self.server, read(call))
        if renderer.request.stream:
            return self._stream(renderer)
        self._wait_for(renderer.group)
        return answer(renderer.whole())

    def _wait_for(self, group: Sequence[Inference]) -> None:
        """Queue the group, and wait until all of it is answered."""
        self._enqueue(group)
        try:
            with self._watcher.watching(request.environ.get("gunicorn.socket"), group):
                for member in group:
                    self._wait(member.done, member.deadline)
                    if member.error is not None:
                        raise member.error
        except BaseException:
            self.server.manager.cancel(group)  # the others' texts will not be read
            raise

    def _enqueue(self, group: Sequence[Inference], stream: Stream | None = None) -> None:
        try:
            if stream is not None:
                self._streamer.follow(stream, group)
            self.server.manager.enqueue(group)
        except ServingError as error:
            for member in group:
                member.listener = None  # else a cycle: it refers to the answer
            if isinstance(error, Overloaded):
                self.server.stats.refused(group[0])
            raise

    def _wait(self, event: threading.Event, deadline: float | None) -> None:
        """Wait for an event; past the deadline expire requests from here, since the manager's own
        thread may be in a long iteration.
        """
        while not event.wait(self.server.seconds_until(deadline)):
            self.server.manager.expire()

    def _stream(self, renderer: Renderer) -> Response:
        """Queue the group, and answer with server-sent events as its tokens are computed.

        Tokens that pile up while the reader is slow are sent as one event. Returns with the first
        text, so that an error before it is raised and has its own status; a later one is an event.
        """
        group = renderer.group
        environ = request.environ
        connection = environ.get("gunicorn.socket")
        chunked = type(connection) is socket.socket and environ["SERVER_PROTOCOL"] == "HTTP/1.1"
        stream = Stream(renderer, connection if chunked else None)
        self._enqueue(group, stream)
        with ExitStack() as stack:
            # without effect unless the client disconnects before the end
            stack.callback(self.server.manager.cancel, group)
            stack.enter_context(self._watcher.watching(connection, group))
            pieces = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(
                chain([next(pieces)], pieces), mimetype=STREAM, headers=STREAM_HEADERS
            )
            response.call_on_close(stack.pop_all().close)
        return response
