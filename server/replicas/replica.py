"""A server among several, called in an event loop. Knows neither HTTP nor Ray."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from config.config import Config
from scheduling.errors import InvalidRequest, Overloaded, RateLimited, ServingError
from scheduling.inference import Inference, TokenEvent
from scheduling.records import IterationRecord
from server.api import about
from server.api.messages import Answer, answer
from server.api.refusals import Refused, failure
from server.api.rendering import renderer_of
from server.api.routes import HEALTH, METRICS, RESET, Call, Handlers
from server.live.panel import PageRoutes
from server.observers.run import Run
from server.request import Request
from server.serving import Server


class Report(NamedTuple):
    """Measures and state of a replica, to be merged with those of others."""

    name: str
    not_ready: str | None  # the reason; None: ready
    kv_blocks: int
    run: Run  # its times are seconds since the epoch


def needs(config: Config) -> dict[str, float]:
    """Return the resources of one replica: the CPUs that its engine computes with, or a GPU."""
    on_cpu = config.device == "cpu" and config.model != "fake"
    return {"CPU": float(config.threads if on_cpu else 0), "GPU": float(config.device != "cpu")}


class Full(NamedTuple):
    """Result in place of an answer: this replica has no room. Nothing was begun or counted, and the
    request may be offered to another replica.
    """

    name: str


class LoopCalls:
    """Calls that threads hand to an event loop, which wakes once for many; sets events of ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False
        self._ends: dict[int, asyncio.Event] = {}  # by id() of inferences

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that a call put from now on wakes the loop again
        while self._calls:
            self._calls.popleft()()

    def expect(self, inference: Inference) -> asyncio.Event:
        """Return the event of an inference that is not queued yet."""
        end = self._ends[id(inference)] = asyncio.Event()
        return end

    def forget(self, group: Sequence[Inference]) -> None:
        for inference in group:
            self._ends.pop(id(inference), None)

    def iteration(self, record: IterationRecord) -> None:
        pass

    def answered(self, inference: Inference) -> None:
        if (end := self._ends.pop(id(inference), None)) is not None:
            self.put(end.set)


class Replica:
    """A server that takes requests which the ingress has read, and answers as a plain one does.

    to: the replica that a call names; any other one refuses it. tries: replicas that a call may be
    offered to, if it names none. tried: those of them that had no room. A Replica is created in the
    event loop that calls it. Raises what Server does.
    """

    def __init__(self, config: Config, name: str):
        self.name = name
        self.server = Server(config, replica=name)
        self.manager = self.server.manager
        self._calls = LoopCalls(asyncio.get_running_loop())
        self.manager.observe(self._calls)
        self._handlers: Handlers = {HEALTH: about.health}
        self._handlers |= about.of_server(self.server, [os.getpid()])
        if config.live != "off":
            self._handlers |= PageRoutes(self.server).handlers()

    async def answer(
        self, request: Request, to: str | None = None, tried: Sequence[str] = (), tries: int = 1
    ) -> Answer | Full:
        """Return the whole answer. Cancelling this call cancels the request."""
        group: Sequence[Inference] = ()
        queued: Sequence[Inference] = ()
        try:
            self._check(to)
            renderer = renderer_of(self.server, request)
            group = renderer.group
            ends = [self._calls.expect(member) for member in group]
            if not self._enqueue(group, to, tried, tries):
                return Full(self.name)
            queued = group
            for member, end in zip(group, ends):
                await self._until(end, member.deadline)
                if member.error is not None:
                    raise member.error
            return answer(renderer.whole())
        except ServingError as error:
            return self._failed(error)
        finally:
            self._calls.forget(group)
            self.manager.cancel(queued)  # without effect on answered ones

    async def stream(
        self, request: Request, to: str | None = None, tried: Sequence[str] = (), tries: int = 1
    ) -> AsyncIterator[Answer | Full | bytes]:
        """Yield events as tokens are computed; or the answer to an error before the first."""
        updates: dict[int, TokenEvent] = {}
        turn = asyncio.Event()

        def receive(update: TokenEvent) -> None:
            def keep() -> None:
                updates[id(update.inference)] = update
                turn.set()

            self._calls.put(keep)

        queued: Sequence[Inference] = ()
        try:
            self._check(to)
            renderer = renderer_of(self.server, request)
            group = renderer.group
            for member in group:
                member.listener, member.streamed = receive, True
            if not self._enqueue(group, to, tried, tries):
                yield Full(self.name)
                return
            queued = group
            while not renderer.over:
                await self._until(turn, group[0].deadline)
                turn.clear()
                latest, updates = updates, {}
                if data := renderer.render(latest):
                    yield data
        except ServingError as error:
            yield self._failed(error)
        finally:
            self.manager.cancel(queued)  # without effect unless the reader left before the end

    async def ask(self, call: Call, to: str | None = None) -> Answer:
        """Return the answer of a route about one server."""
        try:
            self._check(to)
            return self._handlers[call.route](call)
        except ServingError as error:
            return self._failed(error)

    async def report(self) -> Report:
        manager = self.manager
        run = self.server.stats.run().later(manager.epoch_offset)
        blocks = manager.snapshot().n_blocks
        return Report(self.name, manager.not_ready_because(), blocks, run)

    async def metrics(self) -> bytes:
        return self._handlers[METRICS](Call(METRICS)).body

    async def reset(self) -> None:
        """Start a new run."""
        self._handlers[RESET](Call(RESET))

    async def forget_prefixes(self) -> None:
        self.manager.forget_prefixes()

    def _check(self, to: str | None) -> None:
        if to not in (None, self.name):
            message = f"There is no replica {to} here; GET /stats lists all."
            raise Refused("replica_not_found", message)

    def _failed(self, error: ServingError) -> Answer:
        if isinstance(error, InvalidRequest):
            self.server.stats.invalid()
        return failure(error)

    def _enqueue(
        self, group: Sequence[Inference], to: str | None, tried: Sequence[str], tries: int
    ) -> bool:
        """Queue a group; return False if there is no room, and another replica may have some."""
        may_try_another = to is None and self.name not in tried and len(tried) + 1 < tries
        try:
            self.manager.enqueue(group)
        except Overloaded as error:
            if may_try_another and not isinstance(error, RateLimited):
                return False
            self.server.stats.refused(group[0])
            raise
        return True

    async def _until(self, event: asyncio.Event, deadline: float | None) -> None:
        """Wait for an event; past a deadline expire from here, as the manager may be busy long."""
        while not event.is_set():
            try:
                async with asyncio.timeout(self.server.seconds_until(deadline)):
                    await event.wait()
            except TimeoutError:
                self.manager.expire()
