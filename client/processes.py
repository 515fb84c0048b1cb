"""The replay of one trace by several processes, since Python's lock keeps one of them to one core.

Each process has its part of the schedule, and sends it by the clock of all. Users of a
closed loop and conversations stay whole in one process. At each tick a process says what it sent
and what ended, so that the watch of a replay sees the same events as with one process, at most a
tick later.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from client.load import Clock, Interrupted, Watch, replay
from client.outcomes import Outcome
from client.traces import Request
from client.wire import Wire

ROOT = Path(__file__).resolve().parents[1]
MOST, AUTO_MOST = 64, 8
ENOUGH = 200.0  # requests per second that one process sends in time, on slow machines too
GRACE_S = 2.0  # for the last words of processes that were told to stop


def read_number(text: str) -> int | None:
    """Return the value of --client-processes, None for `auto`. Raises ArgumentTypeError."""
    if text == "auto":
        return None
    if not (text.isdecimal() and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"give auto, or a number from 1 to {MOST}")
    return int(text)


def number_for(requests: Sequence[Request]) -> int:
    """Return how many processes send a trace with `auto`: 1 below ENOUGH requests per second and in
    a closed loop, whose load is not known before; else a quarter of the cores.
    """
    at = [request.at for request in requests]
    if requests[0].users or len(at) / max(1.0, max(at) - min(at)) < ENOUGH:
        return 1
    return min(max(1, (os.cpu_count() or 1) // 4), AUTO_MOST)


def parts(requests: Sequence[Request], n: int) -> list[list[Request]]:
    """Return the requests of each of at most n processes: whole users, or whole conversations."""
    by_time = sorted(requests, key=lambda request: request.at)
    shared: list[list[Request]] = [[] for _ in range(n)]
    if users := min(requests[0].users or 0, len(requests)):
        for k, request in enumerate(by_time):
            shared[k % users % n].append(request)
        # a part's first request says how many users the part has
        return [
            [part[0].model_copy(update={"users": len(range(k, users, n))}), *part[1:]]
            for k, part in enumerate(shared)
            if part
        ]
    followers = {request.after: request for request in requests}
    for k, first in enumerate(each for each in by_time if each.after is None):
        turn: Request | None = first
        while turn:
            shared[k % n].append(turn)
            turn = followers.get(turn.id)
    return [part for part in shared if part]


def replay_in(
    n: int,
    url: str,
    requests: Sequence[Request],
    wire: Wire,
    timeout_s: float = 3600.0,
    watch: Watch | None = None,
    key: str | None = None,
) -> list[Outcome]:
    """Send every request at its instant, from n processes; else as `client.load.replay`.

    Raises Interrupted on Ctrl-C, when `watch` says that it is over, and when a process dies.
    """
    shared = _Shared(requests, watch or Watch())
    with suppress(KeyboardInterrupt):
        asyncio.run(shared.run(parts(requests, n), (url, wire, timeout_s, key)))
    ended = [shared.outcomes[r.id] for r in requests if r.id in shared.outcomes]
    if len(ended) < len(requests):
        raise Interrupted(ended)
    return ended


class _Shared:
    """One replay by several processes, seen from the process that starts them."""

    def __init__(self, requests: Sequence[Request], watch: Watch):
        self._requests = {request.id: request for request in requests}
        self._watch, self._ticks = watch, 0
        self._senders: list[_Sender] = []
        self.outcomes: dict[int, Outcome] = {}

    async def run(self, shares: Sequence[list[Request]], how: tuple[Any, ...]) -> None:
        self._over, self._silent = asyncio.Event(), asyncio.Event()
        self._senders += [_Sender() for _ in shares]
        self._unready = len(shares)
        for sender, share in zip(self._senders, shares):
            sender.say((share, *how))
            asyncio.get_running_loop().add_reader(sender.pipe.fileno(), self._hear, sender)
        try:
            await self._over.wait()
        finally:  # all have ended, or the rest is told to stop: at a bound, by Ctrl-C, as one died
            for sender in self._senders:
                sender.say(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._silent.wait(), GRACE_S)
            for sender in self._senders:
                sender.process.kill()
                sender.end()

    def _hear(self, sender: _Sender) -> None:
        """Take one message of a process: that it is ready, or what came of a tick."""
        try:
            message = sender.pipe.recv()
        except (EOFError, OSError):
            self._lose(sender)
            return
        if message is None:
            self._unready -= 1
            if not self._unready:
                clock = Clock.now(self._requests.values())
                for each in self._senders:
                    each.say(clock)
            return
        sender.ticks, sent, ended = message
        for _ in range(sent):
            self._watch.sent()
        for outcome in ended:
            id = outcome.request.id
            self.outcomes[id] = replace(outcome, request=self._requests[id])  # as it was given
            self._watch.ended(self.outcomes[id])
        self._tick()

    def _lose(self, sender: _Sender) -> None:
        asyncio.get_running_loop().remove_reader(sender.pipe.fileno())
        self._senders.remove(sender)
        if (code := sender.end()) and not self._over.is_set():
            print(
                f"error: a process of this client ended with code {code}, and the replay with it; "
                "give --client-processes 1, or find what ended it (memory?)",
                file=sys.stderr,
            )
            self._over.set()
        if self._senders:
            self._tick()
        else:
            self._over.set()
            self._silent.set()

    def _tick(self) -> None:
        """Tick as soon as all processes have."""
        while self._ticks < min(sender.ticks for sender in self._senders):
            self._ticks += 1
            self._watch.tick()
        if self._watch.over:
            self._over.set()


class _Sender:
    """A process that sends a part of a trace. ticks: how many it had."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        fd, self.ticks = theirs.fileno(), 0
        # Ctrl-C in a terminal is for all of its session: this process ends when it is told
        self.process = subprocess.Popen(
            [sys.executable, "-m", "client.processes", str(fd)],
            stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        theirs.close()

    def say(self, message: Any) -> None:
        """Tell its part, the clock, or (None) that the replay ends now."""
        with suppress(OSError):  # it has ended
            self.pipe.send(message)

    def end(self) -> int:
        """Return the exit code of a process that ends, or is ended."""
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(GRACE_S)
        self.process.kill()
        return self.process.wait()


class _Told(Watch):
    """Tells another process what it sees, once per tick."""

    def __init__(self, pipe: Connection):
        self._pipe, self._ticks, self._sent = pipe, 0, 0
        self._ended: list[Outcome] = []

    def clock(self, _: Sequence[Request]) -> Clock:
        """Wait until all processes are ready. Raises Interrupted if nothing is to be sent."""
        self._pipe.send(None)
        if (clock := self._pipe.recv()) is None:
            raise Interrupted([])
        threading.Thread(target=self._obey, daemon=True).start()
        return clock

    def _obey(self) -> None:
        """End as on Ctrl-C when told so, or when nobody listens any more."""
        self._pipe.poll(None)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def sent(self) -> None:
        self._sent += 1

    def ended(self, outcome: Outcome) -> None:
        self._ended.append(outcome)

    def tick(self) -> None:
        self._ticks += 1
        self.tell()

    def tell(self) -> None:
        with suppress(OSError):  # nobody listens
            self._pipe.send((self._ticks, self._sent, self._ended))
        self._sent, self._ended = 0, []


def main() -> None:
    """Replay the part that comes through the socket whose number is given."""
    told = _Told(pipe := Connection(int(sys.argv[1])))
    with suppress(Interrupted, EOFError):
        part, url, wire, timeout_s, key = pipe.recv()
        try:
            replay(url, part, wire, timeout_s, told, key, told.clock)
        finally:
            told.tell()


if __name__ == "__main__":
    main()
