"""The completion routes: this server's own, which runs to `num_tokens` whatever tokens come, and
OpenAI's, which end at end-of-text and at `stop` strings; in every batching mode.

A `Renderer` makes an answer, and this file writes it. The HTTP thread of a request writes a plain
answer. Two threads serve all clients beside: one writes the events of streams as tokens are
computed, one cancels requests whose clients have disconnected.

If each stream's HTTP thread wrote its own events, every token would wake a thread that waits for
the GIL to do 30 µs of work: with 64 streams that cost twice the CPU and slowed the engine's thread
down (lab/benchmarks/README.md). So a stream's HTTP thread writes the first piece, with the headers,
and what remains at the end; what comes between is written by the streamer, which never waits for a
reader: while a socket takes no more, that stream's tokens pile up and then go as one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import NoReturn

from flask import Response, request

from scheduling.errors import Overloaded, ServingError
from scheduling.inference import Inference, TokenEvent
from server.api.messages import STREAM, STREAM_HEADERS, Answer, answer
from server.api.reader import RequestReader
from server.api.refusals import failure
from server.api.rendering import Renderer, renderer_of
from server.api.routes import Call, Route
from server.engine import Engine, seconds_until
from server.request import Request

# POLLRDHUP is Linux's; elsewhere a poll for POLLIN reports POLLHUP
CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Completions:
    """Handlers of the completion routes."""

    def __init__(self, engine: Engine, reader: RequestReader):
        self._engine, self._reader = engine, reader
        self._watcher = Watcher(engine.cancel)
        self._streamer = Background("streamer", self._write_streams)
        self._updates: SimpleQueue[tuple[Stream, TokenEvent]] = SimpleQueue()

    def handlers(self) -> dict[Route, Callable[[Call], Answer | Response]]:
        readers = self._reader.readers()
        return {route: partial(self._answer, read) for route, read in readers.items()}

    def _answer(self, read: Callable[[Call], Request], call: Call) -> Answer | Response:
        """Answer a request. Raises ServingError for one that the engine does not get."""
        renderer = renderer_of(self._engine, read(call))
        connection = request.environ.get("gunicorn.socket")
        if connection is not None:
            self._watcher.start()
        if renderer.request.stream:
            self._streamer.start()
        try:
            if renderer.request.stream:
                return self._stream(renderer, connection)
            self._wait_for(renderer, connection)
            return answer(renderer.whole())
        except ServingError as error:
            error.__traceback__ = None  # its frames refer to the group, and that to the error
            return failure(error)

    def _wait_for(self, renderer: Renderer, connection: socket.socket | None) -> None:
        """Queue the group, and wait until all of it is answered. Raises the first error."""
        self._engine.queue(renderer.request, renderer.group)
        try:
            with self._watcher.watching(connection, renderer.group):
                for member in renderer.group:
                    self._wait(member.done, member.deadline)
                    if member.error is not None:
                        raise member.error
        except BaseException:
            self._engine.cancel(renderer.group)  # the others' texts will not be read
            raise

    def _wait(self, event: threading.Event, deadline: float | None) -> None:
        """Wait for an event; past the deadline expire requests from here, since the manager's own
        thread may be in a long iteration.
        """
        while not event.wait(seconds_until(deadline, self._engine.clock)):
            self._engine.expire()

    def _stream(self, renderer: Renderer, connection: socket.socket | None) -> Response:
        """Queue the group, and answer with server-sent events as its tokens are computed.

        Tokens that pile up while the reader is slow are sent as one event. Returns with the first
        text, so that an error before it is raised and has its own status; a later one is an event.
        """
        group, version = renderer.group, request.environ["SERVER_PROTOCOL"]
        chunked = type(connection) is socket.socket and version == "HTTP/1.1"
        stream = Stream(renderer, connection if chunked else None)
        for member in group:
            member.listener = lambda update: self._updates.put((stream, update))
            member.streamed = True
        with contextlib.ExitStack() as stack:
            # else a cycle, if it is refused: the listener refers to the answer
            stack.callback(forget_listeners, group)
            self._engine.queue(renderer.request, group)
            # without effect unless the client disconnects before the end
            stack.callback(self._engine.cancel, group)
            stack.enter_context(self._watcher.watching(connection, group))
            pieces = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(
                chain([next(pieces)], pieces), mimetype=STREAM, headers=STREAM_HEADERS
            )
            response.call_on_close(stack.pop_all().close)
        return response

    def _write_streams(self) -> None:
        """Write the events of all streams, as they are computed."""
        while True:
            newest: defaultdict[Stream, dict[int, TokenEvent]] = defaultdict(dict)
            while not newest or not self._updates.empty():
                stream, update = self._updates.get()
                newest[stream][id(update.inference)] = update
            for stream, by_inference in newest.items():
                stream.advance(by_inference)


def forget_listeners(group: Sequence[Inference]) -> None:
    for member in group:
        member.listener = None


class Background:
    """A daemon thread, started when it is first needed."""

    def __init__(self, name: str, run: Callable[[], None]):
        self._name, self._run = name, run
        self._lock = threading.Lock()
        self._runs = False

    def start(self) -> None:
        """Start it, unless it runs. Raises Overloaded where the system starts no more threads."""
        if self._runs:
            return
        with self._lock:
            try:
                if not self._runs:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._runs = True
            except RuntimeError as error:
                raise Overloaded(
                    f"The server could not start its {self._name} thread ({error}); try again "
                    "later, or start it with a higher limit of threads (ulimit -u)."
                ) from None


class Stream:
    """A streamed answer. WSGI iterates over `body`.

    connection: the socket to which the streamer may write, in HTTP/1.1's chunks, between two pieces
    of the body; without one the body has all pieces.
    """

    def __init__(self, renderer: Renderer, connection: socket.socket | None):
        self._renderer = renderer
        self._connection = connection
        self._lock = threading.Lock()  # guards all that follows
        self._updates: dict[int, TokenEvent] = {}
        self._direct = False  # the streamer writes, and not the HTTP thread
        self._unsent = b""  # the rest of a chunk of which the socket took a part
        self._failed: Exception | None = None
        self._turn = threading.Event()  # the HTTP thread has something to do

    def advance(self, updates: dict[int, TokenEvent]) -> None:
        """Take updates; in the streamer's turn write them, unless they end the answer."""
        with self._lock:
            self._updates |= updates
            over = {key for key, update in self._updates.items() if update.is_over}
            if (
                self._direct
                and not self._renderer.ends(over)
                and not any(self._updates[key].inference.error for key in over)
            ):
                try:
                    self._write()
                    return
                # the client is gone, or a defect: the other streams go on
                except Exception as error:
                    self._failed = error
            self._direct = False
            self._turn.set()

    def _write(self) -> None:
        assert self._connection is not None
        try:
            if not self._unsent and (data := self._render()):
                self._unsent = b"%X\r\n%b\r\n" % (len(data), data)
            while self._unsent:
                self._unsent = self._unsent[
                    self._connection.send(self._unsent, socket.MSG_DONTWAIT) :
                ]
        except BlockingIOError:
            pass  # the reader is slow

    def body(self, wait: Callable[[threading.Event], None]) -> Iterator[bytes]:
        """Yield the pieces that the HTTP thread writes; it waits for its turns by `wait`.

        Raises a ServingError that comes before the first piece, and OSError if the client is gone.
        """
        while not self._renderer.over:
            wait(self._turn)
            with self._lock:
                self._turn.clear()
                if self._failed:
                    self._fail()
                unsent, self._unsent = self._unsent, b""
                data = self._render()
            if unsent and self._connection:
                self._connection.sendall(unsent)
            if data:
                yield data
            with self._lock:
                self._direct = (
                    self._renderer.begun and self._connection is not None and not self._updates
                )

    def _fail(self) -> NoReturn:
        """Raise the error that ends the stream, which is kept nowhere."""
        failed, self._failed = self._failed, None
        assert failed is not None
        try:
            raise failed
        finally:
            del failed  # else a cycle: its traceback refers to this frame

    def _render(self) -> bytes:
        """Return the events for all updates."""
        updates, self._updates = self._updates, {}
        return self._renderer.render(updates)


class Watcher(Background):
    """Cancels requests whose client disconnects while they wait, run or are streamed: a thread that
    polls all connections every `interval_s` seconds.

    A poll of the kernel shows that a client has closed its connection, also where bytes are unread.
    Writing would not show it: the first write after a close succeeds. A client that closes only its
    sending direction counts as gone.
    """

    def __init__(self, cancel: Callable[[Sequence[Inference]], None], interval_s: float = 0.25):
        super().__init__("watcher", self._watch)
        self._cancel, self._interval_s = cancel, interval_s
        self._watched: dict[int, Sequence[Inference]] = {}  # by the connection's file descriptor
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def watching(
        self, connection: socket.socket | None, group: Sequence[Inference]
    ) -> Iterator[None]:
        """Cancel `group`, which is queued, if its connection closes in this block.

        Without a connection (a test client) do nothing.
        """
        if connection is None:
            yield
            return
        number = connection.fileno()
        with self._guard:
            self._watched[number] = group
        try:
            yield
        finally:
            with self._guard:
                del self._watched[number]

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval_s)
            poll = select.poll()
            with self._guard:  # so that no connection is closed, and its number reused, meanwhile
                for number in self._watched:
                    poll.register(number, CLOSED | select.POLLIN)
                gone = [self._watched[number] for number, events in poll.poll(0) if events & CLOSED]
            if gone:
                self._cancel([*chain(*gone)])
