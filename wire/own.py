"""What a server says of itself, and what its own routes are asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduling.errors import InvalidRequest
from stats import DEFINITIONS
from wire.messages import Answer, answer
from wire.openapi import offered

if TYPE_CHECKING:
    from config import Config

NUMBER = re.compile("[0-9]{1,18}")
Query = Mapping[str, str]


def description(config: Config, live: bool, pids: Sequence[int]) -> dict[str, Any]:
    """GET /. pids: of its processes, by which a client that started it can tell that it talks to
    it.
    """
    return {
        "name": "effective-batching",
        "mode": config.mode,
        "model": config.model,
        "config": config.model_dump(),
        "routes": {name: route.summary for name, route in offered(live).items()},
        "definitions": DEFINITIONS,
        "pids": pids,
    }


def readiness(reason: str | None) -> Answer:
    """GET /ready. reason: why requests should not be sent here now."""
    if reason is None:
        return answer({"status": "ready"})
    return answer({"status": "not ready", "reason": reason}, 503)


def model(config: Config, created: int) -> dict[str, Any]:
    """GET /v1/models/{name}. created: seconds since the epoch."""
    served = {
        "id": config.model_name,
        "object": "model",
        "created": created,
        "owned_by": "effective-batching",
    }
    return served | {"root": config.model, "max_model_len": config.max_model_len}


def models(config: Config, created: int) -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [model(config, created)]}


def iterations_since(query: Query) -> int | None:
    """Of GET /stats: from which iteration on, if they are asked for. Raises InvalidRequest."""
    iterations, since = query.get("iterations"), query.get("since")
    if iterations not in (None, "1"):
        raise InvalidRequest("iterations: only 1 is offered; leave it out", param="iterations")
    if since is not None and not (iterations and NUMBER.fullmatch(since)):
        raise InvalidRequest(
            "since: give the number of an iteration, and iterations=1 with it", param="since"
        )
    return int(since or 0) if iterations else None


def cursor(query: Query) -> int | None:
    """Of GET /live/events: what was told already. Raises InvalidRequest."""
    since = query.get("since")
    if since is not None and not NUMBER.fullmatch(since):
        raise InvalidRequest("since: give the cursor of an earlier answer", param="since")
    return None if since is None else int(since)


def last(query: Query) -> int:
    """Of GET /timeline: how many iterations. Raises InvalidRequest."""
    last = query.get("last", "500")
    if not (NUMBER.fullmatch(last) and int(last)):
        raise InvalidRequest("last: give a number of iterations, from 1 on", param="last")
    return int(last)
