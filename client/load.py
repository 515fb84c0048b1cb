"""Replay of a trace against a server: an open loop, one task a request, as many in flight as the trace asks for.

Latencies are of answers alone: whatever fails is counted, with its reason, and never timed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from client.data import Request
from stats import Answer

Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: an answer with its text, or the error in a sentence."""

    request: Request
    sent_at: float
    answer: Answer | None = None
    text: str = ""
    error: str = ""


class ServerError(Exception):
    """The server could not be reached, or did not answer as this client expects."""


def replay(
    url: str,
    requests: Sequence[Request],
    timeout_s: float = 3600.0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send every request at its instant; return the outcomes in the order of the requests."""
    _allow_open_files(len(requests) + 64)
    return asyncio.run(_replay(url, requests, timeout_s, on_outcome))


async def _replay(
    url: str, requests: Sequence[Request], timeout_s: float, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()

        async def send(request: Request) -> Outcome:
            await asyncio.sleep(start + request.at - time.perf_counter())
            sent_at = time.perf_counter() - start
            try:
                async with session.post(f"{url}/inference", json=request.body()) as response:
                    body = await response.json(content_type=None)
                    answered_at = time.perf_counter() - start
                    outcome = _outcome(request, sent_at, answered_at, response.status, body)
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                outcome = Outcome(request, sent_at, error=f"{type(error).__name__}: {error}".rstrip(": "))
            on_outcome(outcome)
            return outcome

        return list(await asyncio.gather(*(send(request) for request in requests)))


def _outcome(request: Request, sent_at: float, answered_at: float, status: int, body: Any) -> Outcome:
    try:
        if status != 200:
            return Outcome(request, sent_at, error=f"{status} {body['error']['message']}")
        usage, timings = body["usage"], body["timings"]
        answer = Answer(
            request.id, request.at, sent_at, answered_at, usage["prompt_tokens"], usage["completion_tokens"], timings
        )
        return Outcome(request, sent_at, answer, body["completion"])
    except (KeyError, TypeError):
        return Outcome(request, sent_at, error=f"{status} with an answer in another form than /inference gives")


def get(url: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """GET a JSON object. Raises ServerError."""
    return _call("GET", url, None, timeout_s)


def post(url: str, body: Any = None, timeout_s: float = 3600.0) -> dict[str, Any]:
    """POST a JSON object. Raises ServerError, with the server's own message where it gave one."""
    return _call("POST", url, body, timeout_s)


def _call(method: str, url: str, body: Any, timeout_s: float) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.request(method, url, json=body) as response:
            answer = json.loads(await response.read())
            if response.status != 200:
                raise ServerError(f"{url} answered {response.status}: {answer['error']['message']}")
            return answer

    return _run(url, call())


def stream(url: str, body: dict[str, Any], timeout_s: float, show: Callable[[str], None]) -> None:
    """POST to /inference of the server at `url`; `show` each piece of the text as it comes. Raises ServerError."""

    async def call() -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/inference", json=body | {"stream": True}) as response,
        ):
            if response.status != 200:
                raise ServerError(f"{url} answered {response.status}: {json.loads(await response.read())['error']['message']}")
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data in (b"", b"[DONE]"):
                    continue
                if "error" in (event := json.loads(data)):
                    raise ServerError(f"{url} stopped: {event['error']['message']}")
                show(event.get("text", ""))

    _run(url, call())


def _run(url: str, call: Coroutine[Any, Any, Answered]) -> Answered:
    """Run an exchange with a server; what can go wrong with it becomes a ServerError."""
    try:
        return asyncio.run(call)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ServerError(f"no answer from {url} ({error or type(error).__name__}); start one with ./server.sh MODE") from None
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"{url} did not answer with JSON in the form expected; is it an effective-batching server?") from None


def _allow_open_files(n: int) -> None:
    """Every request in flight is an open socket; many systems allow 1,024 files unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = n if hard == resource.RLIM_INFINITY else min(n, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
