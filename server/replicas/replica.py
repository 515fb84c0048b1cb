"""A server among several, called in an event loop. Knows neither HTTP nor Ray."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from config.config import Config
from scheduling.errors import Overloaded, RateLimited, ServingError
from scheduling.inference import TokenEvent
from server.api.messages import Answer, answer
from server.api.refusals import Refused, failure
from server.api.rendering import Renderer, renderer_of
from server.api.routes import METRICS, RESET, Call
from server.engine import LocalEngine, seconds_until
from server.observers.run import Run
from server.request import Request


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


class NoRoom(Exception):
    """This replica has no room, and another may have some."""


class Replica:
    """A server that takes requests which the ingress has read, and answers as a plain one does.

    to: the replica that a call names; any other one refuses it. tries: replicas that a call may be
    offered to, if it names none. tried: those of them that had no room. A Replica is created in the
    event loop that calls it. Raises what Server does.
    """

    def __init__(self, config: Config, name: str):
        self.name = name
        self.engine = LocalEngine(config, replica=name)
        self.manager = self.engine.manager
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()  # for the loop, which wakes once for many
        self._woken = False

    async def answer(
        self, request: Request, to: str | None = None, tried: Sequence[str] = (), tries: int = 1
    ) -> Answer | Full:
        """Return the whole answer. Cancelling this call cancels the request."""
        try:
            renderer = self._renderer(request, to)
            offered = self._offered(to, tried, tries)
            async with aclosing(self._progress(renderer, offered)) as progress:
                async for updates in progress:
                    for each in updates.values():
                        if each.inference.error is not None:
                            raise each.inference.error
            return answer(renderer.whole())
        except NoRoom:
            return Full(self.name)
        except ServingError as error:
            return failure(error)

    async def stream(
        self, request: Request, to: str | None = None, tried: Sequence[str] = (), tries: int = 1
    ) -> AsyncIterator[Answer | Full | bytes]:
        """Yield events as tokens are computed; or the answer to an error before the first."""
        try:
            renderer = self._renderer(request, to)
            offered = self._offered(to, tried, tries)
            async with aclosing(self._progress(renderer, offered)) as progress:
                async for updates in progress:
                    if data := renderer.render(updates):
                        yield data
                    if renderer.over:
                        break
        except NoRoom:
            yield Full(self.name)
        except ServingError as error:
            yield failure(error)

    async def ask(self, call: Call, to: str | None = None) -> Answer:
        """Return the answer of a route about one server."""
        try:
            self._check(to)
            return self.engine.ask(call)
        except ServingError as error:
            return failure(error)

    async def report(self) -> Report:
        manager = self.manager
        self.engine.behind.flush()
        run = self.engine.stats.run().later(manager.epoch_offset)
        blocks = manager.snapshot().n_blocks
        return Report(self.name, manager.not_ready_because(), blocks, run)

    async def metrics(self) -> bytes:
        return self.engine.ask(Call(METRICS)).body

    async def reset(self) -> None:
        """Start a new run."""
        self.engine.ask(Call(RESET))

    async def forget_prefixes(self) -> None:
        self.manager.forget_prefixes()

    def _check(self, to: str | None) -> None:
        if to not in (None, self.name):
            message = f"There is no replica {to} here; GET /stats lists all."
            raise Refused("replica_not_found", message)

    def _offered(self, to: str | None, tried: Sequence[str], tries: int) -> bool:
        """Return whether another replica may take what this one has no room for."""
        return to is None and self.name not in tried and len(tried) + 1 < tries

    def _renderer(self, request: Request, to: str | None) -> Renderer:
        """Return the renderer of a request. Raises ServingError, which is counted."""
        self._check(to)
        try:
            return renderer_of(self.engine, request)
        except ServingError as error:
            self.engine.refused(error)
            raise

    async def _progress(
        self, renderer: Renderer, offered: bool
    ) -> AsyncGenerator[Mapping[int, TokenEvent], None]:
        """Queue the group of a request; yield its updates, until it is over. Raises NoRoom if it
        may be offered to another replica.
        """
        updates: dict[int, TokenEvent] = {}
        turn, group = asyncio.Event(), renderer.group

        def receive(update: TokenEvent) -> None:
            def keep() -> None:
                updates[id(update.inference)] = update
                turn.set()

            self._call(keep)

        for member in group:
            member.listener, member.streamed = receive, renderer.request.stream
        try:
            self.manager.enqueue(group)
        except ServingError as error:
            if offered and isinstance(error, Overloaded) and not isinstance(error, RateLimited):
                raise NoRoom from None
            self.engine.refused(error, group[0])
            raise
        left = len(group)
        try:
            while left:
                await self._until(turn, group[0].deadline)
                turn.clear()
                latest, updates = updates, {}
                left -= sum(update.is_over for update in latest.values())
                yield latest
        finally:
            self.manager.cancel(group)  # without effect unless the reader left before the end

    def _call(self, call: Callable[[], None]) -> None:
        """Have the loop make a call. May be called from any thread."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that a call that comes from now on wakes the loop again
        while self._calls:
            self._calls.popleft()()

    async def _until(self, event: asyncio.Event, deadline: float | None) -> None:
        """Wait for an event; past a deadline expire from here, as the manager may be busy long."""
        while not event.is_set():
            try:
                async with asyncio.timeout(seconds_until(deadline, self.manager.clock)):
                    await event.wait()
            except TimeoutError:
                self.manager.expire()
