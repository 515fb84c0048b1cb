"""The engine's process: an engine, and the HTTP processes that it serves.

A thread for each of these reads what it is asked, one writes what it is told, and one thread queues
and cancels for all. The handler thread only notes that an inference has advanced; pieces are made
by the writers. One that is not read keeps the newest note of each inference, and nothing else.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

from config.config import END_S, HANDOFF, LOADER, Config
from scheduling.errors import ServingError
from scheduling.inference import Inference, TokenEvent
from server.api.refusals import failure
from server.engine import SWITCH_S, LocalEngine, start
from server.processes.messages import (
    Ask,
    Cancel,
    Expire,
    News,
    Piece,
    Queue,
    Refusal,
    Told,
    framed,
    piece_of,
    received,
)

# how long an HTTP process may read nothing, before its requests are given up, as the system has it
STILL = struct.pack("ll", 30, 0)
log = logging.getLogger("effective_batching")
Order = Queue | Cancel | Expire | Refusal
Command = tuple["Peer", Order]


class Peer:
    """An HTTP process: its requests in flight, by its numbers, and what it is to be told."""

    def __init__(
        self,
        engine: LocalEngine,
        connection: socket.socket,
        commands: SimpleQueue[Command],
        asks: ThreadPoolExecutor,
    ):
        self._engine, self._connection = engine, connection
        self._commands, self._asks = commands, asks
        self._members: dict[int, Inference] = {}
        self._told: dict[int, int] = {}  # tokens of a stream that were told, by its number
        self._wake: SimpleQueue[None] = SimpleQueue()  # gets something whenever there is news
        self._lock = threading.Lock()  # guards what follows
        self._newest: dict[int, TokenEvent] = {}
        self._answers: list[Told] = []
        self._closed = False
        self.ended = threading.Event()
        for run in (self._read, self._write):
            threading.Thread(target=run, daemon=True).start()

    # ---- from the process

    def _read(self) -> None:
        try:
            for message in received(self._connection, Order | Ask):
                if isinstance(message, Ask):
                    self._asks.submit(self._answer, message)
                else:
                    self._commands.put((self, message))
        finally:  # whatever ends it
            self._cancel_all()
            self.close()

    def obey(self, message: Order) -> None:
        """Called by one thread for all processes, in the order of their messages."""
        engine = self._engine
        if isinstance(message, Queue):
            self._queue(message)
        elif isinstance(message, Cancel):
            members = self._members
            engine.cancel([members[n] for n in message.numbers if n in members])
        elif isinstance(message, Expire):
            engine.expire()
        else:
            engine.count(message.what)

    def _queue(self, message: Queue) -> None:
        request, group = message.request, self._engine.group(message.request)
        for number, member in enumerate(group, message.first):
            member.listener, member.streamed = partial(self._note, number), request.stream
            self._members[number] = member
        try:
            self._engine.queue(request, group)
        except ServingError as error:
            for number, member in enumerate(group, message.first):
                member.listener, member.error = None, error
                self._note(number, TokenEvent(member, 0, True))

    def _answer(self, ask: Ask) -> None:
        try:
            answer = self._engine.ask(ask.call)
        except Exception as error:
            log.error("unexpected error", exc_info=error)
            answer = failure(error)
        with self._lock:
            self._answers.append(Told(ask.number, answer))
        self._wake.put(None)

    # ---- to the process

    def _note(self, number: int, event: TokenEvent) -> None:
        """Note the progress of an inference. Called by the handler thread."""
        with self._lock:
            if not self._newest:
                self._wake.put(None)
            self._newest[number] = event

    def _write(self) -> None:
        with suppress(OSError):  # the process has ended, which `_read` notices
            while news := self._news():
                self._send(framed(news))
        self._connection.close()
        self.ended.set()

    def _news(self) -> News | None:
        """Wait for news, and return them; None if there will be none."""
        while True:
            self._wake.get()
            with self._lock:
                newest, self._newest = self._newest, {}
                answers, self._answers = self._answers, []
            if newest or answers:
                pieces = [self._piece(number, event) for number, event in newest.items()]
                return News(self._engine.epoch_offset, pieces, answers)
            if self._closed:
                return None

    def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                self._cancel_all()

    def _piece(self, number: int, event: TokenEvent) -> Piece:
        before = self._told.get(number, 0)
        if event.is_over:
            self._told.pop(number, None)
            self._members.pop(number, None)
        else:
            self._told[number] = event.n_tokens
        return piece_of(number, event, before)

    def _cancel_all(self) -> None:
        self._commands.put((self, Cancel([*self._members])))

    def close(self) -> None:
        """Tell the rest, and close the connection."""
        self._closed = True
        for _ in range(2):  # one for the rest, and one to see that there is none
            self._wake.put(None)


def main() -> NoReturn:
    """Serve the HTTP processes that come by the launcher's socket, until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the HTTP processes, which get them too, end it
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_S)
    arrivals = socket.socket(fileno=int(sys.argv[1]))
    config = Config.model_validate_json(os.environ[HANDOFF])
    engine = start(config, pkgutil.resolve_name(os.environ[LOADER]))
    # none arrives any more
    engine.on_failure(lambda error: arrivals.shutdown(socket.SHUT_RD))
    commands, peers = SimpleQueue[Command](), list[Peer]()
    threading.Thread(target=_obey, args=[commands], daemon=True).start()
    asks = ThreadPoolExecutor(config.http_threads)
    while descriptors := socket.recv_fds(arrivals, 1, 1)[1]:
        connection = socket.socket(fileno=descriptors[0])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, STILL)
        peers = [each for each in peers if not each.ended.is_set()]
        peers.append(Peer(engine, connection, commands, asks))
    # in a thread: an iteration may never end
    ending = threading.Thread(target=engine.end, daemon=True)
    ending.start()
    ending.join(END_S)
    engine.close_files()
    for peer in peers:
        peer.close()
        peer.ended.wait(END_S)
    os._exit(engine.exit_code)


def _obey(commands: SimpleQueue[Command]) -> None:
    while True:
        peer, message = commands.get()
        try:
            peer.obey(message)
        except Exception:
            log.exception("a request's message failed; the others go on")


if __name__ == "__main__":
    main()
