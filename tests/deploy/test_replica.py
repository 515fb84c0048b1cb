"""A replica in an event loop, as in an ingress: requests that it hands back or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from config import build
from deploy.replica import Full, Replica
from wire.messages import Answer
from wire.request import Request

# two rows and no queue; an iteration takes 20 ms
SETTINGS = {"model": "fake", "max_batch_size": 2, "max_waiting": 0, "loop_interval_ms": 20}
SHORT, LONG = Request([[1, 2]], 2), Request([[1, 2]], 30)


def run(what: Callable[[Replica], Awaitable[Any]], **settings: Any) -> Any:
    """Return the result of a call of a replica `a` that has loaded."""

    async def alone() -> Any:
        replica = Replica(build("dynamic", SETTINGS | settings, {}), "a")
        try:
            assert await asyncio.to_thread(replica.manager.wait_until_loaded)
            return await what(replica)
        finally:
            await asyncio.to_thread(replica.server.close)

    return asyncio.run(alone())


async def first_of(events: AsyncIterator[Any]) -> Any:
    """Return the first event; the rest is read, too."""
    first, *_ = [each async for each in events]
    return first


def status(result: Any) -> int:
    assert isinstance(result, Answer)
    return result.status


def counts(replica: Replica) -> list[int]:
    stats = replica.server.report(None)
    return [stats[name] for name in ("completed", "refused", "cancelled")]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("offer", "is_refused"),
    [
        ({"tries": 2}, False),
        ({"tries": 3, "tried": ["b"]}, False),
        ({"tries": 2, "tried": ["b"]}, True),  # the last one
        ({"tries": 3, "tried": ["a"]}, True),  # it had it already
        ({"tries": 3, "to": "a"}, True),  # no other is meant
        ({}, True),
    ],
)
def test_without_room_it_hands_a_request_back_until_none_is_left(
    offer: dict[str, Any], is_refused: bool, stream: bool
) -> None:
    async def fill(replica: Replica) -> None:
        held = [asyncio.create_task(replica.answer(LONG)) for _ in range(2)]
        while replica.manager.snapshot().running < 2:
            await asyncio.sleep(0.01)
        if stream:
            result = await first_of(replica.stream(SHORT, **offer))
        else:
            result = await replica.answer(SHORT, **offer)
        assert [*map(status, await asyncio.gather(*held))] == [200, 200]
        if is_refused:
            assert status(result) == 429
        else:
            assert result == Full("a")
        assert counts(replica) == [2, int(is_refused), 0]

    run(fill)


def test_with_room_it_answers_a_request_for_which_another_had_none() -> None:
    assert status(run(lambda replica: replica.answer(SHORT, tried=["b"], tries=3))) == 200


def test_a_users_limit_is_not_asked_of_another_replica() -> None:
    async def twice(replica: Replica) -> None:
        first, second = [await replica.answer(SHORT, tries=3) for _ in range(2)]
        assert (status(first), status(second)) == (200, 429)
        assert isinstance(second, Answer) and b"rate_limit_exceeded" in second.body

    run(twice, user_requests_per_minute=1)


def test_requests_while_it_drains_are_refused() -> None:
    async def drained(replica: Replica) -> None:
        replica.manager.drain()
        assert status(await replica.answer(SHORT, tries=3)) == 503
        assert status(await first_of(replica.stream(SHORT, tries=3))) == 503
        assert counts(replica)[2] == 0

    run(drained)
