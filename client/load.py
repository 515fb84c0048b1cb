"""Replay of a trace against a server.

The loop is open: instants of sending are fixed beforehand, whatever the server does, so a slow
server cannot slow its own load (coordinated omission). A trace with `users` closes it; in
conversations the first turns are fixed so, and each later one follows an answer. Latencies are of
answers alone: failures are counted, with their reasons, and never timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp

from client.calls import headers, hidden
from client.outcomes import Outcome, Outcomes
from client.traces import Request
from client.wire import DONE, DONE_LINE, Plain, Reply, Unreadable, Wire, refusal, utf8
from config.open_files import allow_open_files

# connections that idle longer are not used again: some servers close theirs after 2 s, and a
# request sent just then is lost
KEEPALIVE_S = 1.0
# after [DONE]: most servers end their answer with it or at once, and their connections are kept;
# those of others are closed, as the next request of a closed loop waits meanwhile
LINGER_S = 0.005
TICK_S = 0.05
HEAD_START_S = 0.05  # between the first line of the trace and its sending
UNSENT = "not sent, as an earlier turn of its conversation failed"


class Interrupted(KeyboardInterrupt):
    """A replay that was stopped; `outcomes` has those of requests that ended before."""

    def __init__(self, outcomes: Outcomes | list[Outcome]):
        super().__init__()
        self.outcomes = outcomes


class Clock(NamedTuple):
    """When a replay begins, on the clock of time.perf_counter, which all processes share; and how
    many seconds later its first request is due, when ticks begin.
    """

    start: float
    first_at: float

    @classmethod
    def now(cls, requests: Iterable[Request]) -> Clock:
        first_at = min(0.0 if request.users else request.at for request in requests)
        return cls(time.perf_counter() + HEAD_START_S, first_at)


class Watch:
    """Notified of a replay's events; a progress display overrides those that it shows."""

    over = False  # true: the replay ends now, whatever is left of it

    def sent(self) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...

    def tick(self) -> None:
        """Called twenty times per second on average, at random instants, from first send to end."""

    def skip(self, ticks: int) -> None:
        """Called in place of so many ticks at which nothing has changed since the last one."""


def replay(
    url: str,
    requests: Sequence[Request],
    wire: Wire | None = None,
    timeout_s: float = 3600.0,
    watch: Watch | None = None,
    key: str | None = None,
    clock: Callable[[Sequence[Request]], Clock] = Clock.now,
) -> list[Outcome]:
    """Send every request at its instant; return the outcomes in the order of the requests.

    Raises Interrupted on Ctrl-C, or when `watch` says that it is over. `key`: the server's API key.
    clock: asked when all is ready to be sent.
    """
    allow_open_files(len(requests) + 64)
    run = _Replay(url, requests, wire or Plain(), watch or Watch())
    try:
        with _no_pauses():
            asyncio.run(run.run(timeout_s, key, clock))
        whole = len(run.outcomes) == len(requests)
    except KeyboardInterrupt:
        whole = False
    ended = [run.outcomes[r.id] for r in requests if r.id in run.outcomes]
    if not whole:
        raise Interrupted(ended)
    return ended


class _Replay:
    """One replay; instants are seconds since its start."""

    _session: aiohttp.ClientSession
    _fresh: aiohttp.ClientSession  # whose connections are new
    _start: float  # on the clock of time.perf_counter
    _sending: asyncio.Task[None]
    _key: str | None  # the server's API key

    def __init__(self, url: str, requests: Sequence[Request], wire: Wire, watch: Watch):
        self._url, self._requests, self._wire, self._watch = url, requests, wire, watch
        # encoded before the first is sent, but for those that repeat an answer
        self._bodies = {r.id: self._encoded(r) for r in requests if r.after is None}
        self._followers = {r.after: r for r in requests if r.after is not None}
        self.outcomes: dict[int, Outcome] = {}

    async def run(
        self, timeout_s: float, key: str | None, clock: Callable[[Sequence[Request]], Clock]
    ) -> None:
        users, self._key = self._requests[0].users, key
        notes = aiohttp.TraceConfig()
        notes.on_connection_reuseconn.append(_note_kept)
        how: Any = {"headers": headers(key) | dict(self._wire.headers)}
        how |= {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        new = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=kept, trace_configs=[notes], **how) as self._session,
            aiohttp.ClientSession(connector=new, **how) as self._fresh,
        ):
            self._start, first_at = clock(self._requests)
            sending = self._closed_loop(users) if users else self._open_loop()
            self._sending = asyncio.create_task(sending)
            ticking = asyncio.create_task(self._tick(first_at))
            try:
                await self._sending
            except asyncio.CancelledError:
                if not self._watch.over:  # Ctrl-C
                    raise
            ticking.cancel()

    async def _closed_loop(self, users: int) -> None:
        waiting = iter(sorted(self._requests, key=lambda request: request.at))
        await self._until(0.0)

        async def user() -> None:
            for request in waiting:  # the users share it: each takes the next
                await self._send(request, max(0.0, self._now()), self._bodies.pop(request.id))

        await asyncio.gather(*(user() for _ in range(min(users, len(self._requests)))))

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            firsts = (request for request in self._requests if request.after is None)
            for request in sorted(firsts, key=lambda request: request.at):
                await self._until(request.at)
                tasks.create_task(self._converse(request))

    async def _converse(self, request: Request) -> None:
        """Send a request, and each later turn some time after the answer before it."""
        outcome = await self._send(request, request.at, self._bodies.pop(request.id))
        conversation = ""
        while following := self._followers.get(request.id):
            conversation += (request.prompt or "") + outcome.text
            due = outcome.ended_at + (following.think_s or 0.0)
            if outcome.error:
                self._watch.sent()  # and ended at once: a request that is never in flight
                at = outcome.ended_at
                outcome = Outcome(following, at, at, at, error=UNSENT, sent=False)
                self._end(outcome)
            else:
                whole = following
                if following.prompt:
                    prompt = conversation + following.prompt
                    whole = following.model_copy(update={"prompt": prompt})
                body = self._encoded(whole)
                await self._until(due)
                outcome = await self._send(following, due, body)
            request = following

    async def _send(self, request: Request, scheduled_at: float, body: bytes) -> Outcome:
        sent_at = self._now()
        self._watch.sent()
        outcome, error = None, ""
        notes: set[str] = set()
        try:
            async with await self._posted(body, notes) as response:
                pieces = await self._pieces(response)
            reply = Reply(request, scheduled_at, sent_at, pieces or [(self._now(), b"")])
            if response.method != "POST":  # 301 to 303: the library went on with a GET
                response = response.history[0]
            if response.status != 200:
                location = response.headers.get("Location", "").removesuffix(self._wire.path)
                raise Unreadable(refusal(response.status, reply.body, location))
            outcome = self._wire.read(reply)
        except Unreadable as unreadable:
            error = str(unreadable)
        except TimeoutError:
            error = f"the answer was not complete after {self._session.timeout.total:g} s"
        except Exception as failure:  # whatever a server answers: the load goes on
            error = f"{type(failure).__name__}: {failure}".rstrip(": ")
        if outcome is None:
            outcome = Outcome(request, scheduled_at, sent_at, self._now(), error=error)
        secrets = self._key, self._wire.headers
        text, error = (utf8(hidden(s, *secrets)) for s in (outcome.text, outcome.error))
        outcome = replace(outcome, text=text, error=error, resent="resent" in notes)
        self._end(outcome)
        return outcome

    async def _posted(self, body: bytes, notes: set[str]) -> aiohttp.ClientResponse:
        """Send a request; and once more, if a kept connection was closed before any answer: a
        server may close it just then. notes: gets "kept" and "resent".
        """
        # a redirect may lead elsewhere: the library would not send a key there, but these headers
        how: dict[str, Any] = {"data": body, "allow_redirects": not self._wire.headers}
        url = self._url + self._wire.path
        try:
            return await self._session.post(url, trace_request_ctx=notes, **how)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as lost:
            # the message of an answer that had begun is its head
            if "kept" not in notes or not isinstance(getattr(lost, "message", ""), str):
                raise
        notes.add("resent")
        return await self._fresh.post(url, **how)

    async def _pieces(self, response: aiohttp.ClientResponse) -> list[tuple[float, bytes]]:
        """Return (instant, bytes) of an answer, which is over with [DONE], whatever follows."""
        pieces, end = [], b"\n"
        async for data in response.content.iter_any():
            pieces.append((self._now(), data))
            end = end[-32:] + data
            if DONE in end and DONE_LINE.search(end):
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    await asyncio.wait_for(response.content.read(), LINGER_S)
                break
        return pieces

    def _end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.request.id] = outcome
        self._watch.ended(outcome)
        self._look()

    def _look(self) -> None:
        if self._watch.over:
            self._sending.cancel()

    async def _tick(self, first_at: float) -> None:
        """Tick once in each TICK_S, anywhere in it: equal intervals could coincide with equal gaps
        of a load.
        """
        rng = random.Random(0)
        for k in itertools.count():
            await asyncio.sleep(first_at + (k + rng.random()) * TICK_S - self._now())
            self._watch.tick()
            self._look()

    def _encoded(self, request: Request) -> bytes:
        return json.dumps(self._wire.body(request)).encode()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _until(self, instant: float) -> None:
        """Sleep until an instant, unless it is past."""
        if (remaining := instant - self._now()) > 0:
            await asyncio.sleep(remaining)


async def _note_kept(_: Any, request: Any, __: Any) -> None:
    """Note that a request is sent on a kept connection."""
    request.trace_request_ctx.add("kept")


@contextlib.contextmanager
def _no_pauses() -> Iterator[None]:
    """Let Python's collector visit new objects alone: all of them take it milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
