"""Handlers of routes that every front end answers by itself, and descriptions of a server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from scheduling.errors import InvalidRequest
from stats import DEFINITIONS
from wire.messages import Answer, answer
from wire.openapi import document
from wire.request import RequestReader
from wire.routes import HTML, offered

if TYPE_CHECKING:
    from config import Config

NUMBER = re.compile("[0-9]{1,18}")
Query = Mapping[str, str]


class Call(NamedTuple):
    """One HTTP request to a route. Plain data, which may travel between processes.

    name: of the model in the path.
    """

    query: Query
    body: bytes = b""
    name: str = ""


Handler = Callable[[Call], Answer]


def handlers(config: Config, reader: RequestReader) -> dict[str, Handler]:
    """Handlers by the names of ROUTES; all raise a ServingError for what cannot be served."""
    model = {
        "id": config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "effective-batching",
        "root": config.model,
        "max_model_len": config.max_model_len,
    }

    def one_model(call: Call) -> Answer:
        reader.check_model(call.name)
        return answer(model)

    return {
        "POST /tokenize": lambda call: answer(reader.tokenize(call.body)),
        "GET /v1/models": lambda call: answer({"object": "list", "data": [model]}),
        "GET /v1/models/{name}": one_model,
        "GET /health": lambda call: answer({"status": "ok"}),
        "GET /openapi.json": lambda call: answer(
            document(bool(config.users_of_keys), config.live == "on")
        ),
    }


def to_page(prefix: str = "") -> Answer:
    """The answer to GET / of a browser: where the page is. prefix: of its path, as a replica's."""
    headers = {"Location": f"{prefix}/live", "Vary": "Accept"}
    return Answer(b"", 302, headers, f"{HTML}; charset=utf-8")


def description(config: Config, pids: Sequence[int]) -> Answer:
    """GET /. pids: of the server's processes, by which a client that started it recognises it."""
    result = {
        "name": "effective-batching",
        "mode": config.mode,
        "model": config.model,
        "config": config.model_dump(),
        "routes": {name: route.summary for name, route in offered(config.live == "on").items()},
        "definitions": DEFINITIONS,
        "pids": pids,
    }
    return answer(result)


def readiness(reason: str | None) -> Answer:
    """GET /ready. reason: why requests should not be sent here now."""
    if reason is None:
        return answer({"status": "ready"})
    return answer({"status": "not ready", "reason": reason}, 503)


def iterations_since(query: Query) -> int | None:
    """The first iteration that GET /stats is asked for, if any. Raises InvalidRequest."""
    iterations, since = query.get("iterations"), query.get("since")
    if iterations not in (None, "1"):
        raise InvalidRequest("iterations: only 1 is offered; leave it out", param="iterations")
    if since is not None and not (iterations and NUMBER.fullmatch(since)):
        raise InvalidRequest(
            "since: give the number of an iteration, and iterations=1 with it", param="since"
        )
    return int(since or 0) if iterations else None


def cursor(query: Query) -> int | None:
    """The cursor that GET /live/events goes on from, if any. Raises InvalidRequest."""
    since = query.get("since")
    if since is not None and not NUMBER.fullmatch(since):
        raise InvalidRequest("since: give the cursor of an earlier answer", param="since")
    return None if since is None else int(since)


def last(query: Query) -> int:
    """The number of iterations that GET /timeline is asked for. Raises InvalidRequest."""
    last = query.get("last", "500")
    if not (NUMBER.fullmatch(last) and int(last)):
        raise InvalidRequest("last: give a number of iterations, from 1 on", param="last")
    return int(last)
