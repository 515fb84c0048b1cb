"""Replay of a trace against a server.

The loop is open: what is sent when is fixed beforehand, whatever the server does, so a slow server
cannot slow its own load (coordinated omission). A trace with `users` closes it; in conversations
the first turns are fixed so, and each later one follows an answer. Latencies are of answers alone:
whatever fails is counted, with its reason, and never timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import resource
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import aiohttp

from client.calls import headers
from client.columns import Outcomes
from client.data import Request
from client.wire import Plain, Reply, Unreadable, Wire, refusal
from stats import Answer

# connections that idle longer are not used again: some servers close theirs after 2 s, and a
# request sent just then is lost
KEEPALIVE_S = 1.0
TICK_S = 0.05
HEAD_START_S = 0.05  # between the first line of the trace and its sending
UNSENT = "not sent, as an earlier turn of its conversation failed"


class Outcome(NamedTuple):
    """What became of one request: an answer with its text, or the error in a sentence."""

    request: Request
    scheduled_at: float
    sent_at: float
    ended_at: float  # when it was answered, or failed
    answer: Answer | None = None
    text: str = ""
    error: str = ""
    sent: bool = True  # false where an earlier turn failed, and there was nothing to send


class Interrupted(KeyboardInterrupt):
    """A replay that was stopped: what ended before is in `outcomes`."""

    def __init__(self, outcomes: Outcomes | list[Outcome]):
        super().__init__()
        self.outcomes = outcomes


class Watch:
    """Told what happens in a replay; a progress display overrides what it wants to know."""

    def sent(self) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...

    def tick(self) -> None:
        """Twenty times a second on average, at random instants, from first send to last ending.

        Also when nothing else happens.
        """


def replay(
    url: str,
    requests: Sequence[Request],
    wire: Wire | None = None,
    timeout_s: float = 3600.0,
    watch: Watch | None = None,
    key: str | None = None,
    others: Sequence[str] = (),
) -> list[Outcome]:
    """Send every request at its instant; return the outcomes in the order of the requests.

    Raises Interrupted on Ctrl-C. `key`: the server's API key, here and below. `others`: more
    servers; all get requests in turn (round robin), in the order in which those are sent.
    """
    _allow_open_files(len(requests) + 64)
    outcomes: dict[int, Outcome] = {}
    try:
        with _no_pauses():
            asyncio.run(
                _replay(
                    [url, *others],
                    requests,
                    wire or Plain(),
                    timeout_s,
                    watch or Watch(),
                    outcomes,
                    key,
                )
            )
    except KeyboardInterrupt:
        raise Interrupted([outcomes[r.id] for r in requests if r.id in outcomes]) from None
    return [outcomes[request.id] for request in requests]


async def _replay(
    urls: Sequence[str],
    requests: Sequence[Request],
    wire: Wire,
    timeout_s: float,
    watch: Watch,
    outcomes: dict[int, Outcome],
    key: str | None,
) -> None:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    # what can be encoded before the first is sent; what repeats an answer, when it is known
    bodies = {request.id: _encoded(wire, request) for request in requests if request.after is None}
    followers = {request.after: request for request in requests if request.after is not None}
    turns = itertools.cycle(urls)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers(key)
    ) as session:
        start = time.perf_counter() + HEAD_START_S

        def end(outcome: Outcome) -> None:
            outcomes[outcome.request.id] = outcome
            watch.ended(outcome)

        async def send(request: Request, scheduled_at: float, body: bytes) -> Outcome:
            sent_at = time.perf_counter() - start
            watch.sent()
            pieces = []
            answer, text, error = None, "", ""
            try:
                async with session.post(next(turns) + wire.path, data=body) as response:
                    async for data in response.content.iter_any():
                        pieces.append((time.perf_counter() - start, data))
                reply = Reply(
                    request, scheduled_at, sent_at, pieces or [(time.perf_counter() - start, b"")]
                )
                if response.status != 200:
                    raise Unreadable(refusal(response.status, reply.body))
                answer, text = wire.read(reply)
            except Unreadable as unreadable:
                error = str(unreadable)
            except (TimeoutError, aiohttp.ClientError, OSError) as failure:
                error = f"{type(failure).__name__}: {failure}".rstrip(": ")
            ended_at = answer.answered_at if answer else time.perf_counter() - start
            end(outcome := Outcome(request, scheduled_at, sent_at, ended_at, answer, text, error))
            return outcome

        async def converse(request: Request, scheduled_at: float) -> None:
            """Send a request, and each later turn when its predecessor's answer says so."""
            outcome = await send(request, scheduled_at, bodies.pop(request.id))
            said = ""
            while following := followers.get(request.id):
                said += (request.prompt or "") + outcome.text
                due = outcome.ended_at + (following.think_s or 0.0)
                if outcome.error:
                    watch.sent()  # and ended at once: it counts as a request, and is none in flight
                    at = outcome.ended_at
                    outcome = Outcome(following, at, at, at, error=UNSENT, sent=False)
                    end(outcome)
                else:
                    body = _encoded(wire, following.continuing(said))
                    await _until(start + due)
                    outcome = await send(following, due, body)
                request = following

        first_at = 0.0 if requests[0].users else min(request.at for request in requests)
        ticking = asyncio.create_task(_tick(start + first_at, watch))
        if users := requests[0].users:
            waiting = iter(requests)
            await _until(start)

            async def user() -> None:
                for request in waiting:  # the users share it: each takes the next
                    now = max(0.0, time.perf_counter() - start)
                    await send(request, now, bodies.pop(request.id))

            await asyncio.gather(*(user() for _ in range(users)))
        else:
            async with asyncio.TaskGroup() as tasks:
                firsts = (request for request in requests if request.after is None)
                for request in sorted(firsts, key=lambda request: request.at):
                    await _until(start + request.at)
                    tasks.create_task(converse(request, request.at))
        ticking.cancel()


def _encoded(wire: Wire, request: Request) -> bytes:
    return json.dumps(wire.body(request)).encode()


async def _until(instant: float) -> None:
    """Sleep until then, on the clock of time.perf_counter; not at all where it is past."""
    if (left := instant - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _tick(start: float, watch: Watch) -> None:
    """Tick once in each TICK_S from `start` on, anywhere in it.

    Equal intervals would beat with equal gaps of a load.
    """
    rng = random.Random(0)
    for k in itertools.count():
        await asyncio.sleep(start + (k + rng.random()) * TICK_S - time.perf_counter())
        watch.tick()


@contextlib.contextmanager
def _no_pauses() -> Iterator[None]:
    """While instants are measured, Python's collector goes through new objects alone.

    Going through all of them takes milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _allow_open_files(n: int) -> None:
    """Every request in flight is an open socket; many systems allow 1,024 files unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = n if hard == resource.RLIM_INFINITY else min(n, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
