"""Answers of the WSGI app to whole requests, written in the threads of a pool."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from gunicorn.http import wsgi
from gunicorn.http.errors import ParseException
from gunicorn.http.message import Request

from scheduling.errors import ServingError
from server.http.connections import Connection
from server.http.http_reader import no_request, rendered

Task = Callable[[], None]
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
    environ["wsgi.multithread"] = True
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
        log.exception("the answer to %s %r failed", request.method, request.path)
        if not response.headers_sent:
            failed = ServingError("The answer could not be written.")
            connection.send(rendered(failed))
        return False
    return not response.should_close()


class Pool:
    """Up to `most` threads. A task goes to the thread that became idle last, or to a new one.

    concurrent.futures wakes idle threads in turn, so that in time the stack and allocator memory of
    each grow to what the largest request needs: after one peak a server grew for half an hour.
    Here most threads of a peak stay idle, and small, until the next.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Task]] = []  # where each idle thread waits for a task
        self._waiting: deque[Task] = deque()
        self._n = 0

    def submit(self, task: Task) -> None:
        """Run a task in a thread, now or once one is free."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)
                return
            if self._n == self._most:
                self._waiting.append(task)
                return
            self._n += 1
        # the task comes by the queue: a thread keeps its arguments for life
        tasks = SimpleQueue[Task]()
        tasks.put(task)
        try:
            threading.Thread(target=self._run, args=[tasks], name="http", daemon=True).start()
        except RuntimeError:  # the system starts no more
            with self._lock:
                self._n -= 1
                self._waiting.append(task)

    def _run(self, tasks: SimpleQueue[Task]) -> None:
        task = tasks.get()
        while True:
            try:
                task()
            except Exception:
                log.exception("a request's thread failed; it goes on")
            with self._lock:
                if self._waiting:
                    task = self._waiting.popleft()
                    continue
                self._idle.append(tasks)
            del task  # it holds a whole request
            task = tasks.get()
