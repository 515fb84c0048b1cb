"""What the completion routes share: a body is read, its group is waited for or streamed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeVar

from flask import Response, request
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from batching import LONGEST_WAIT_S
from config import MAX_BODY_BYTES
from routes.streams import Part, Stream, Streamer
from routes.watcher import Watcher
from scheduling.errors import InvalidRequest, Overloaded
from scheduling.inference import Inference
from serving import Server
from tokenizer import Detokenizer, StopRule

Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body]) -> Body:
    """The current HTTP request's body, validated.

    Raises InvalidRequest, naming the first field that is wrong.
    """
    try:
        raw = request.get_data()
    except HTTPException:  # Flask's own refusals
        raise
    except Exception as error:  # the HTTP server's: cut short, too slow, or wrongly chunked
        raise InvalidRequest(
            f"The body could not be read to its end ({type(error).__name__})."
        ) from None
    if len(raw) > MAX_BODY_BYTES:
        raise RequestEntityTooLarge
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])[:100] if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field}: {message}" if field else message, param=field) from None


def usage_of(group: Sequence[Inference]) -> dict[str, Any]:
    """The tokens of an answered group; a prompt counts once, however many completions it has."""
    leaders = [member for member in group if member.leader is None]
    prompt = sum(len(member.prompt_ids) for member in leaders)
    completion = sum(len(member.tokens) for member in group)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in leaders)},
    }


class Completions:
    """The way from a route to a server and back."""

    def __init__(self, server: Server):
        self.server = server
        self._watcher = Watcher(server.manager)
        self._streamer = Streamer()

    def wait(self, group: Sequence[Inference]) -> None:
        """Queue the group, and wait until all of it is answered.

        Raises what enqueue does, and the first error of a member.
        """
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

    def stream(
        self,
        group: Sequence[Inference],
        piece: Callable[[int, str, int, bool], Any],
        end: Callable[[], Any | None],
        *,
        echo: bool = False,
        rule: StopRule | None = None,
    ) -> Response:
        """Queue the group, and answer with server-sent events as its tokens are computed.

        `piece(i, text, n, last)`: the event for the next n tokens of the group's i-th inference;
        those that pile up while the reader is slow come as one. `end()`: an event after all of
        them, or None. Waits for the first text, so that what goes wrong before it is raised and has
        a status of its own; what goes wrong later is an event.
        """
        prompts = [member.prompt_ids if echo else [] for member in group]
        parts = {
            id(m): Part(i, Detokenizer(self.server.tokenizer, rule), ids)
            for i, (m, ids) in enumerate(zip(group, prompts))
        }
        connection = request.environ.get("gunicorn.socket")
        chunked = (
            type(connection) is socket.socket
            and request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
        )
        stream = Stream(parts, piece, end, connection if chunked else None)
        self._enqueue(group, stream)
        with ExitStack() as stack:
            # does nothing unless the reader has gone before the end
            stack.callback(self.server.manager.cancel, group)
            stack.enter_context(self._watcher.watching(connection, group))
            body = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(
                chain([next(body)], body), mimetype="text/event-stream",
                # proxies: pass it on at once
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )  # fmt: skip
            response.call_on_close(stack.pop_all().close)
        return response
