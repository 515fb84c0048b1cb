"""The completion routes: this server's own, which runs to `num_tokens` whatever tokens come, and
OpenAI's, which end at end-of-text and at `stop` strings; in every batching mode.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain

from flask import Blueprint, Response, g, request

from batching import LONGEST_WAIT_S
from routes.responses import body, respond_json
from routes.streams import Stream, Streamer
from routes.watcher import Watcher
from scheduling.errors import Overloaded
from scheduling.inference import Inference
from serving import Exchange, Server
from wire import own
from wire.messages import STREAM, STREAM_HEADERS
from wire.request import Request, RequestReader


def blueprint(server: Server) -> Blueprint:
    routes = Blueprint("completions", __name__)
    completions = Completions(server)
    reader = RequestReader(server.config, server.tokenizer)
    started = int(time.time())

    @routes.post("/inference")
    def inference() -> Response:
        return completions.answer(reader.inference(body()))

    @routes.post("/v1/completions")
    def completion() -> Response:
        return completions.answer(reader.completion(body()))

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        return completions.answer(reader.chat(body()))

    @routes.post("/tokenize")
    def tokenize() -> Response:
        return respond_json(reader.tokenize(body()))

    @routes.get("/v1/models")
    def models() -> Response:
        return respond_json(own.models(server.config, started))

    @routes.get("/v1/models/<name>")
    def model(name: str) -> Response:
        reader.check_model(name)
        return respond_json(own.model(server.config, started))

    return routes


class Completions:
    """The way from a request to a server and back."""

    def __init__(self, server: Server):
        self.server = server
        self._watcher = Watcher(server.manager)
        self._streamer = Streamer()

    def answer(self, asked: Request) -> Response:
        """Raises what is wrong with it, and the first error of a member."""
        exchange = Exchange(self.server, asked.named(g.user, g.request_id))
        if asked.stream:
            return self._stream(exchange)
        self._wait_for(exchange.group)
        return respond_json(exchange.whole())

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
            self.server.manager.cancel(group)  # nobody will see the others' texts
            raise

    def _enqueue(self, group: Sequence[Inference], stream: Stream | None = None) -> None:
        try:
            if stream is not None:
                self._streamer.follow(stream, group)
            self.server.manager.enqueue(group)
        except Overloaded:
            self.server.refused(group)
            raise

    def _wait(self, event: threading.Event, deadline: float | None) -> None:
        """Wait; when the deadline passes see to it that the manager knows.

        The manager's own thread may be in a long iteration.
        """
        while not event.wait(
            None
            if deadline is None
            else min(max(0.01, deadline - self.server.manager.clock()), LONGEST_WAIT_S)
        ):
            self.server.manager.expire()

    def _stream(self, exchange: Exchange) -> Response:
        """Queue the group, and answer with server-sent events as its tokens are computed.

        Those that pile up while the reader is slow come as one. Waits for the first text, so that
        what goes wrong before it is raised and has a status of its own; what goes wrong later is an
        event.
        """
        group = exchange.group
        connection = request.environ.get("gunicorn.socket")
        chunked = (
            type(connection) is socket.socket
            and request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
        )
        stream = Stream(exchange.events(), connection if chunked else None)
        self._enqueue(group, stream)
        with ExitStack() as stack:
            # does nothing unless the reader has gone before the end
            stack.callback(self.server.manager.cancel, group)
            stack.enter_context(self._watcher.watching(connection, group))
            told = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(chain([next(told)], told), mimetype=STREAM, headers=STREAM_HEADERS)
            response.call_on_close(stack.pop_all().close)
        return response
