"""The replicas as the ingress reaches them: behind a handle of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from scheduling.errors import EngineFailed
from server.api.messages import DONE, Answer, event
from server.api.refusals import body_of, failure
from server.api.routes import Call
from server.replicas.replica import Full
from server.request import Request

GONE = (ActorDiedError, ActorUnavailableError)
SILENT_S = 5  # that a replica may take to report
TRIES = 3  # replicas, at most, that a request is offered to before it is refused


class Silent(EngineFailed):
    """A replica has not answered in time."""

    code = "replica_silent"


class Handles:
    """The replicas, behind Ray's handle. wanted: how many there should be. most: how many there may
    be. to: the name of a replica; None: any, and if the chosen one is full when a request arrives,
    the request is offered to another.
    """

    def __init__(self, handle: DeploymentHandle, wanted: int, most: int):
        self._handle = handle
        self._streams = handle.options(stream=True)
        self.wanted = wanted
        self._tries = min(TRIES, most)

    async def answer(self, request: Request, to: str | None) -> Answer:
        tried: list[str] = []
        while True:
            call = self._handle.answer.remote(request, to=to, tried=tried, tries=self._tries)
            answer = await self._one(call)
            if not isinstance(answer, Full):
                return answer
            tried = [*tried, answer.name]

    async def ask(self, call: Call, to: str) -> Answer:
        """Return the answer of a route about that replica."""
        return await self._one(self._handle.ask.remote(call, to=to))

    async def stream(self, request: Request, to: str | None) -> AsyncIterator[Answer | bytes]:
        tried: list[str] = []
        is_offered = True
        while is_offered:
            events = self._streams.stream.remote(request, to=to, tried=tried, tries=self._tries)
            begun = is_offered = False
            try:
                async for each in events:
                    if isinstance(each, Full):
                        tried, is_offered = [*tried, each.name], True
                    else:
                        begun = True
                        yield each
            except GONE:
                yield cut_off("replica") if begun else failure(gone("replica"))
            finally:
                events.cancel()  # does nothing unless the reader has gone before the end

    async def all(self, method: str) -> list[Any]:
        """Call a method of `Replica` on each that is up; return the results. Raises Silent."""
        try:
            results = await self._handle.broadcast(method).results_async(
                timeout_s=SILENT_S, return_exceptions=True
            )
        except DeploymentUnavailableError:  # there is none at all
            return []
        except TimeoutError:
            raise Silent(
                f"A replica has not answered for {SILENT_S} s; it is replaced if it goes on. Try "
                "again."
            ) from None
        return [each for each in results if not isinstance(each, GONE)]

    @staticmethod
    async def _one(response: Any) -> Any:
        try:
            return await response
        except GONE:
            return failure(gone("replica"))


def gone(what: str) -> EngineFailed:
    """Return the error of a dead process's requests; not sent again, as one may have killed it."""
    return EngineFailed(f"The {what} that had this request is gone; send it once more.")


def cut_off(what: str) -> bytes:
    """Return the end of such a stream."""
    return event(body_of(gone(what))) + DONE
