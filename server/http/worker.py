"""gunicorn's worker: one loop reads every connection, and a thread gets a request once it is whole.

gunicorn's own threaded worker gives a thread to a connection, however slow its client, and closes
connections on its only loop, waiting up to 2 s for each (27.0.1). Here no client makes the loop
wait, and none makes a thread wait but one that stops reading its answer, for at most STILL_S.

A connection waits for one of four things, each with a time limit; a whole request is then handled
in a thread until it is answered:

    HEAD       for the first byte, or the rest, of line and headers: header_timeout_s, then 408
    BODY       for the rest of a body: body_timeout_s, then 408
    IDLE       for another request: KEEPALIVE_S
    LINGERING  answered and closed by us, for the client to read that and close too: LINGER_S

At most `worker_connections` are open. One more closes another: of those in LINGERING the one that
has waited longest, if there is none of those in HEAD, then IDLE, then BODY. A connection that is
being answered, or has unread bytes, is never closed for another. Requests in flight take at most
MAX_UNFINISHED_BYTES together; beyond that, the unfinished one that has waited longest is refused.

SIGTERM: no new connections; requests in flight are finished, new ones on connections that are still
open get 503. After drain_timeout_s those still in flight get an error. A second SIGTERM changes
nothing. SIGINT and SIGQUIT (Ctrl-C, which reaches the worker from the terminal and from gunicorn's
master) give those in flight that error at once. The handlers only notify the loop: gunicorn's own
take the thread pool's lock, and deadlock if a second signal interrupts the first.
"""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from gunicorn.http.message import Request
from gunicorn.workers import base
from werkzeug.datastructures import Headers

from config.config import END_S, HANDOFF, MAX_BODY_BYTES, SPARE_FILES, Config
from scheduling.errors import Draining, ServingError
from server.api.messages import REQUEST_ID, request_id
from server.api.refusals import Refused, too_slow
from server.http.answering import Pool, answer
from server.http.connections import AT_ONCE, Connection, Connections, Wait, in_turn
from server.http.http_reader import Reader, invalid, rendered

KEEPALIVE_S = 75.0  # longer than clients keep their pools, which else would be reset under load
LINGER_S = 2.0
STILL_S = 30  # seconds that a client may read nothing of its answer
# how long a connection may wait for anything once SIGTERM came: its request may be on the way
DRAINING_S = 2.0
ENDING_S = 0.5  # the same after Ctrl-C
READ_BYTES = 65_536
MAX_UNFINISHED_BYTES = 256_000_000
TOO_MANY_BODIES = "The server holds too many unfinished bodies; send the request again."
PARSED_AT_ONCE = 8  # connections with more bytes than one turn parses, continued in a turn
RELEASED_AT_ONCE = 25  # closed connections; it takes longer than accepting one
PAUSE_S = 0.1  # before accepting is tried again, when the system had no file left
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Worker(base.Worker):
    """gunicorn's worker. `_serve` runs in a thread; all else, but signal handlers, in the loop."""

    def init_process(self) -> None:
        self.config = Config.model_validate_json(os.environ[HANDOFF])
        self._pool = Pool(self.cfg.threads)
        self._poller = selectors.DefaultSelector()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the loop, from others
        self._unparsed: deque[Connection] = deque()  # with more bytes than one turn parses
        self._numbers = count(1)  # numbers of connections, by age
        self._accepting = False
        self._accept_from = 0.0
        self._drain_until: float | None = None
        self._ending = False
        limits = {
            Wait.LINGERING: LINGER_S,
            Wait.HEAD: self.config.header_timeout_s,
            Wait.IDLE: KEEPALIVE_S,
            Wait.BODY: self.config.body_timeout_s,
        }
        most, files = self.cfg.worker_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most_unreleased = max(0, files - SPARE_FILES - most)
        self._connections = Connections(self._poller, limits, most, most_unreleased)
        super().init_process()

    # ---- signals

    def handle_exit(self, signum: int, frame: Any) -> None:
        """SIGTERM."""
        self._call(self._drain)

    def handle_quit(self, signum: int, frame: Any) -> None:
        """SIGINT and SIGQUIT."""
        if self.booted:
            self.end()
        else:
            super().handle_quit(signum, frame)

    def end(self) -> None:
        """End, with an error for requests in flight. May be called from any thread."""
        self._call(self._end)

    def _call(self, callback: Callable[[], None]) -> None:
        """Run a callback in the loop. May be called from any thread and signal handler."""
        self._calls.put(callback)
        with suppress(BlockingIOError):  # the pipe is full, so the loop will look
            os.write(self.PIPE[1], b"\0")

    def _drain(self) -> None:
        if self._drain_until is not None:
            return
        self._drain_until = time.monotonic() + self.config.drain_timeout_s
        self.wsgi.extensions["engine"].drain()
        for listener in self.sockets:
            # connections that the system has let in already are answered
            self._accept(listener, listener.getsockname())
        self._accept_while(False)
        for listener in self.sockets:
            listener.close()
        self.alive = False
        self._connections.shorten(DRAINING_S)

    def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        self._drain()
        self._connections.shorten(ENDING_S)
        engine = self.wsgi.extensions["engine"]
        # in a thread, since it waits for the handler thread, but not for a model that still loads
        threading.Thread(target=engine.end, daemon=not engine.loaded).start()
        leave = threading.Timer(END_S, self._leave)
        leave.daemon = True
        leave.start()

    def _leave(self) -> None:
        """End although connections are open, whose clients read nothing."""
        self.cfg.worker_exit(None, self)
        os._exit(0)

    # ---- the loop

    def run(self) -> None:
        self._poller.register(self.PIPE[0], selectors.EVENT_READ, self._run_calls)
        timeout = struct.pack("ll", STILL_S, 0)
        for listener in self.sockets:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        # no self.notify(): with gunicorn's timeout of 0 nothing reads the time it would leave
        while self.alive or self._connections.open:
            if self.alive:
                # while no connection can give way, new ones wait in the system's backlog
                has_room = self._connections.has_room
                self._accept_while(has_room and time.monotonic() >= self._accept_from)
            ready = [key.data for key, _ in self._poller.select(self._select_timeout_s())]
            for callback in ready:
                if not isinstance(callback, Connection):
                    callback()
            for connection in in_turn([each for each in ready if isinstance(each, Connection)]):
                self._read(connection)
            for _ in range(min(len(self._unparsed), PARSED_AT_ONCE)):
                connection = self._unparsed.popleft()
                if connection.waits is Wait.BODY:  # it was not closed meanwhile
                    self._advance(connection)
            self._end_overdue()
            self._connections.release(RELEASED_AT_ONCE)
            if self.ppid != os.getppid():  # gunicorn's master has died
                self._drain()
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                self._end()

    def _run_calls(self) -> None:
        os.read(self.PIPE[0], 4096)
        for _ in range(self._calls.qsize()):  # for those that come later there is another byte
            self._calls.get_nowait()()

    def _select_timeout_s(self) -> float:
        """Seconds to wait for bytes: until the next deadline, at most 1."""
        now = time.monotonic()
        times = [self._connections.next_at(), *([now] if self._unparsed else [])]
        if self._accept_from > now:
            times.append(self._accept_from)
        return min(1.0, max(0.0, min(times) - now))

    def _end_overdue(self) -> None:
        """Close or refuse connections past their deadline."""
        for connection, wait in self._connections.overdue():
            if wait not in (Wait.HEAD, Wait.BODY) or connection.reader.awaits == "nothing":
                self._connections.close(connection)
            elif self.alive:
                setting = "--header-timeout-s" if wait is Wait.HEAD else "--body-timeout-s"
                self._refuse(connection, too_slow(setting, self._connections.limits[wait]))
            else:
                message = "The server is shutting down; send the request to another one."
                self._refuse(connection, Draining(message))

    # ---- connections

    def _accept_while(self, room: bool) -> None:
        if room == self._accepting:
            return
        self._accepting = room
        for listener in self.sockets:
            if room:
                accept = partial(self._accept, listener, listener.getsockname())
                self._poller.register(listener, selectors.EVENT_READ, accept)
            else:
                self._poller.unregister(listener)

    def _accept(self, listener: Any, server: Any) -> None:
        for _ in range(AT_ONCE):
            if not (self.alive and self._connections.has_room):  # draining began in this turn
                return
            try:
                sock, client = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_FILES and not self._connections.make_room():
                    self.log.warning(
                        "no connection can be accepted: %s; raise `ulimit -n`", error.strerror
                    )
                    self._accept_from = time.monotonic() + PAUSE_S
                return
            sock.setblocking(True)
            reader = Reader(self.cfg, client, MAX_BODY_BYTES, self._admit)
            self._connections.add(Connection(next(self._numbers), sock, client, server, reader))

    def _admit(self, request: Request) -> None:
        """Check the key of a request before its body is read. Raises Refused."""
        headers, door = Headers(request.headers), self.wsgi.extensions["door"]
        try:
            door.user(request.method, request.path, headers)
        except Refused as error:
            error.headers[REQUEST_ID] = request_id(headers.get(REQUEST_ID, ""))
            raise

    def _read(self, connection: Connection) -> None:
        # closed for another in this turn, or not parsed as far as it was read
        if connection.waits is None or connection.reader.has_more:
            return
        try:
            data = connection.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._connections.close(connection)
            return
        if connection.waits is Wait.LINGERING:
            connection.lingered_bytes += len(data)
            if not data or connection.lingered_bytes > MAX_BODY_BYTES:
                self._connections.close(connection)
        elif data:
            connection.reader.feed(data)
            self._advance(connection)
        elif connection.reader.awaits == "nothing":
            self._connections.close(connection)
        else:
            message = "The request is incomplete; send all of it."
            self._refuse(connection, invalid(message))

    def _advance(self, connection: Connection) -> None:
        """Give the next request to a thread if it is whole, else wait for the rest of it."""
        try:
            request = connection.reader.next_request()
        except ServingError as error:
            self._refuse(connection, error)
            return
        except Exception:
            self.log.exception("a request could not be read")
            self._connections.close(connection)
            return
        if request is not None:
            self._submit(connection, request)
            return
        if connection.reader.has_more:  # after the others, though nothing new may come
            self._unparsed.append(connection)
        if connection.reader.wants_continue():
            connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        before, awaited = connection.waits, Wait(connection.reader.awaits)
        if awaited is not before and (before, awaited) != (Wait.HEAD, Wait.IDLE):
            self._connections.wait(connection, awaited)
        self._connections.count_bytes(connection, connection.reader.held_bytes)
        while self._connections.held_bytes > MAX_UNFINISHED_BYTES and (
            oldest := self._connections.oldest(Wait.BODY)
        ):
            self._refuse(oldest, Refused("overloaded", TOO_MANY_BODIES))

    def _submit(self, connection: Connection, request: Request) -> None:
        """Hand a whole request to a thread; its body's bytes count until it is answered."""
        self._connections.take(connection)
        n = len(request.body.getbuffer()) + connection.reader.held_bytes
        self._connections.count_bytes(connection, n)
        if self._connections.held_bytes > MAX_UNFINISHED_BYTES:
            self._refuse(connection, Refused("overloaded", TOO_MANY_BODIES))
        else:
            self._pool.submit(partial(self._serve, connection, request))

    def _refuse(self, connection: Connection, error: ServingError) -> None:
        self.wsgi.extensions["engine"].refused(error)
        connection.send(rendered(error))
        self._linger(connection)

    def _linger(self, connection: Connection) -> None:
        """Close the sending direction and wait for the client's close: else unread bytes would
        reset the connection (RFC 9112, 9.6).
        """
        self._connections.take(connection)
        connection.reader.forget()
        self._connections.count_bytes(connection, 0)
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._connections.close(connection)
        else:
            self._connections.wait(connection, Wait.LINGERING)

    # ---- in a thread

    def _serve(self, connection: Connection, request: Request) -> None:
        keep = False
        try:
            keep = answer(self.wsgi, self.cfg, connection, request, last=not self.alive)
        except BlockingIOError:
            self.log.warning(
                "a client read nothing of its answer for %d s; its connection is closed", STILL_S
            )
        except OSError as error:
            self.log.debug("a client is gone: %s", error)
        finally:
            request.body.close()
            self._call(partial(self._advance if keep else self._linger, connection))
