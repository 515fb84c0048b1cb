"""The completion routes: this server's own, which runs to `num_tokens` whatever tokens come, and
OpenAI's, which end at end-of-text and at `stop` strings; in every batching mode.

A `Renderer` makes an answer, and this file writes it. The HTTP thread of a request writes a plain
answer. Two threads serve all clients beside: one writes the events of streams as tokens are
computed, one cancels requests whose clients have disconnected.

If each stream's HTTP thread wrote its own events, every token would wake a thread that waits for
the GIL to do 30 µs of work: with 64 streams that cost twice the CPU and slowed the engine's thread
down (lab/benchmarks/README.md). So a stream's HTTP thread writes the first piece, with the headers,
and what remains at the end; what comes between is written by the Streamer, which never waits for a
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

from batching import BatchingManager
from scheduling.errors import Overloaded, ServingError
from scheduling.inference import Inference, TokenEvent
from server.api.messages import STREAM, STREAM_HEADERS, Answer, answer
from server.api.reader import RequestReader
from server.api.rendering import Renderer, renderer_of
from server.api.routes import Call, Route
from server.request import Request
from server.serving import Server

# POLLRDHUP is Linux's; elsewhere a poll for POLLIN reports POLLHUP
CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


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
        with contextlib.ExitStack() as stack:
            # without effect unless the client disconnects before the end
            stack.callback(self.server.manager.cancel, group)
            stack.enter_context(self._watcher.watching(connection, group))
            pieces = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(
                chain([next(pieces)], pieces), mimetype=STREAM, headers=STREAM_HEADERS
            )
            response.call_on_close(stack.pop_all().close)
        return response


def started(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread. Raises Overloaded where the system starts no more threads."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Overloaded(
            f"The server could not start its {name} thread ({error}); try again later, or start it "
            "with a higher limit of threads (ulimit -u)."
        ) from None
    return thread


class Streamer:
    """A thread that writes events of all streams, started with the first."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Stream, TokenEvent]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def follow(self, stream: Stream, group: Sequence[Inference]) -> None:
        """Write `stream` as `group`, which is not queued yet, advances. Raises Overloaded."""
        with self._lock:
            self._thread = self._thread or started("streamer", self._run)

        def advance(update: TokenEvent) -> None:
            self._queue.put((stream, update))

        for member in group:
            member.listener, member.streamed = advance, True

    def _run(self) -> None:
        while True:
            newest: defaultdict[Stream, dict[int, TokenEvent]] = defaultdict(dict)
            while not newest or not self._queue.empty():
                stream, update = self._queue.get()
                newest[stream][id(update.inference)] = update
            for stream, by_inference in newest.items():
                stream.advance(by_inference)


class Stream:
    """A streamed answer. WSGI iterates over `body`.

    connection: the socket to which the Streamer may write, in HTTP/1.1's chunks, between two pieces
    of the body; without one the body has all pieces.
    """

    def __init__(self, renderer: Renderer, connection: socket.socket | None):
        self._renderer = renderer
        self._connection = connection
        self._lock = threading.Lock()  # guards all that follows
        self._updates: dict[int, TokenEvent] = {}
        self._direct = False  # the Streamer writes, and not the HTTP thread
        self._unsent = b""  # the rest of a chunk of which the socket took a part
        self._failed: Exception | None = None
        self._turn = threading.Event()  # the HTTP thread has something to do

    def advance(self, updates: dict[int, TokenEvent]) -> None:
        """Take updates; in the Streamer's turn write them, unless they end the answer."""
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


class Watcher:
    """Cancels requests whose client disconnects while they wait, run or are streamed. One thread,
    started with the first request, polls all connections every `interval_s` seconds.

    A poll of the kernel shows that a client has closed its connection, also where bytes are unread.
    Writing would not show it: the first write after a close succeeds. A client that closes only its
    sending direction counts as gone.
    """

    def __init__(self, manager: BatchingManager, interval_s: float = 0.25):
        self._manager = manager
        self._interval_s = interval_s
        self._watched: dict[int, Sequence[Inference]] = {}  # by the connection's file descriptor
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(
        self, connection: socket.socket | None, group: Sequence[Inference]
    ) -> Iterator[None]:
        """Cancel `group` if its connection closes in this block.

        Without a connection (a test client) do nothing. Raises Overloaded.
        """
        if connection is None:
            yield
            return
        number = connection.fileno()
        with self._lock:
            self._thread = self._thread or started("watcher", self._run)
            self._watched[number] = group
        try:
            yield
        finally:
            with self._lock:
                del self._watched[number]

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            poll = select.poll()
            with self._lock:  # so that no connection is closed, and its number reused, meanwhile
                for number in self._watched:
                    poll.register(number, CLOSED | select.POLLIN)
                gone = [self._watched[number] for number, events in poll.poll(0) if events & CLOSED]
            for group in gone:
                self._manager.cancel(group)
