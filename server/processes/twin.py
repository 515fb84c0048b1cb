"""The engine as an HTTP process knows it: the twin of a `LocalEngine` in another process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue

from config.config import Config
from generate.tokenizer import load_tokenizer
from scheduling.errors import Draining, EngineFailed, ServingError
from scheduling.inference import Inference, State
from server.api import about
from server.api.messages import Answer
from server.api.refusals import failure
from server.api.routes import MODELS, READY, Call
from server.engine import counted_as
from server.processes.messages import (
    Ask,
    Cancel,
    Expire,
    Message,
    News,
    Queue,
    Refusal,
    apply,
    framed,
    received,
)
from server.processes.spawning import ENGINE
from server.request import Models, Request
from server.serving import check_size, group_of

GONE = "The engine's process has ended; send the request to another server."
STOPPED = "The server was stopped before this request was finished."
DRAINS = "the server is shutting down"


class Twin:
    """An Engine in another process, behind a connection. Its inferences are copies, which advance
    as the engine tells.
    """

    clock = staticmethod(time.perf_counter)  # the system's, and so the engine's, too
    loaded = True  # `end` never waits for a model
    exit_code = 0  # gunicorn's master has the engine's

    def __init__(self, config: Config, connection: socket.socket):
        self.config, self.tokenizer = config, load_tokenizer(config.tokenizer)
        self.models: Models = RemoteModels(config, self.ask)
        self.epoch_offset = time.time() - time.perf_counter()
        self._failure: EngineFailed | None = None
        self._connection = connection
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._numbers = count()
        self._copies: dict[int, Inference] = {}  # of what is in flight
        self._asked: dict[int, SimpleQueue[Answer]] = {}  # where each call waits for its answer
        self._drains = False
        self._failure_calls: list[Callable[[BaseException], None]] = []
        threading.Thread(target=self._read, name="news", daemon=True).start()

    # ---- to the engine

    def group(self, request: Request) -> list[Inference]:
        samplings = [request.sampling] * check_size(self.config, request)
        return group_of(self.config, request, samplings, self.clock(), keyed=False)

    def queue(self, request: Request, group: Sequence[Inference]) -> None:
        with self._lock:
            if self._drains:
                raise Draining("The server is shutting down; send the request to another one.")
            if self._failure is not None:
                raise self._failure
            for member in group:
                member.id, member.done = next(self._numbers), threading.Event()
                self._copies[member.id] = member
        self._send(Queue(group[0].id, request))

    def cancel(self, inferences: Sequence[Inference]) -> None:
        if numbers := [each.id for each in inferences if each.id in self._copies]:
            self._send(Cancel(numbers))

    def expire(self) -> None:
        self._send(Expire())

    def refused(self, error: ServingError) -> None:
        if what := counted_as(error):
            self._send(Refusal(what))

    def ask(self, call: Call) -> Answer:
        answer = SimpleQueue[Answer]()
        with self._lock:
            gone, number = self._failure, next(self._numbers)
            if gone is None:
                self._asked[number] = answer
        why = DRAINS if self._drains else GONE if gone else None
        if call.route is READY and why:
            return about.readiness(why)
        if gone is not None:
            return failure(EngineFailed(GONE))
        rest = call.name, call.user, call.id, dict(call.query), call.body
        self._send(Ask(number, call.route.name, rest))
        return answer.get()

    def drain(self) -> None:
        self._drains = True

    def end(self) -> None:
        self._drains = True
        self._end_all(Draining(STOPPED))

    def close_files(self) -> None:
        """The engine's process has them."""

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        with self._lock:
            self._failure_calls.append(call)
            error = self._failure
        if error is not None:
            call(error)

    def _send(self, message: Message) -> None:
        data = framed(message)
        with self._sending, suppress(OSError):  # it has ended, which `_read` notices
            self._connection.sendall(data)

    # ---- from the engine

    def _read(self) -> None:
        try:
            for news in received(self._connection, News):
                self._take(news)
        finally:  # whatever ends it
            self._lose()

    def _lose(self) -> None:
        with self._lock:
            self._failure = error = EngineFailed(GONE)
            calls, asked, self._asked = [*self._failure_calls], self._asked, {}
        for answer in asked.values():
            answer.put(failure(error))
        self._end_all(error)
        for call in calls:
            call(error)

    def _take(self, news: News) -> None:
        self.epoch_offset = news.epoch_offset
        for told in news.answers:
            self._asked.pop(told.number).put(told.answer)
        for piece in news.pieces:
            copy = self._copies.get(piece.number)
            if copy is not None:  # else it was ended here
                apply(piece, copy)
                self._advanced(copy)

    def _end_all(self, error: ServingError) -> None:
        """End all that is in flight with an error."""
        with self._lock:
            copies = [*self._copies.values()]
        for copy in copies:
            copy.error, copy.state, copy.is_over = error, State.FAILED, True
            self._advanced(copy)

    def _advanced(self, copy: Inference) -> None:
        """Notify all who wait for an inference, as the engine's handler thread does."""
        if copy.is_over:
            self._copies.pop(copy.id, None)
        copy.notify()
        if copy.is_over:
            copy.done.set()


class RemoteModels(Models):
    """Models of an engine, which is asked about names that are not known here."""

    def __init__(self, config: Config, ask: Callable[[Call], Answer]):
        super().__init__(config)
        self._ask = ask

    def adapter_of(self, name: str | None) -> str:
        if name is not None and name not in self.roots:
            models = json.loads(self._ask(Call(MODELS)).body).get("data", ())
            self.roots = {model["id"]: model["root"] for model in models} or self.roots
        return super().adapter_of(name)


def connected(config: Config) -> Twin:
    """Return the twin of the engine whose process the launcher has started. Its end is that of
    gunicorn's master, too.
    """
    ours, theirs = socket.socketpair()
    _, arrivals = map(int, os.environ[ENGINE].split())
    with theirs, socket.socket(fileno=os.dup(arrivals)) as to, suppress(OSError):
        socket.send_fds(to, [b"\0"], [theirs.fileno()])
    twin = Twin(config, ours)
    twin.on_failure(lambda error: os.kill(os.getppid(), signal.SIGTERM))
    return twin
