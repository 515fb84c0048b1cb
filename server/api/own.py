"""Handlers of the routes that need no engine, and answers that describe a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from scheduling.errors import InvalidRequest
from server.api.messages import Answer, answer
from server.api.openapi import document
from server.api.refusals import Refused
from server.api.request import RequestReader
from server.api.routes import offered
from stats import DEFINITIONS

if TYPE_CHECKING:
    from config import Config

NUMBER = re.compile("[0-9]{1,18}")
Query = Mapping[str, str]


class Call(NamedTuple):
    """An HTTP request to a route; it may travel between processes. name: of the path's model."""

    query: Query
    body: bytes = b""
    name: str = ""


Handler = Callable[[Call], Answer]


def handlers(config: Config, reader: RequestReader) -> dict[str, Handler]:
    """Return handlers by their names in ROUTES. Each raises ServingError for a wrong call."""
    models = reader.models

    def one_model(call: Call) -> Answer:
        models.adapter_of(call.name)
        return answer(models.cards()[call.name])

    def fixed(call: Call) -> Answer:
        message = "Replicas read their adapters when they start; name them in --lora."
        raise Refused("adapters_are_fixed", message)

    return {
        "POST /tokenize": lambda call: answer(reader.tokenize(call.body)),
        "GET /v1/models": lambda call: answer(
            {"object": "list", "data": [*models.cards().values()]}
        ),
        "GET /v1/models/{name}": one_model,
        "POST /v1/load_lora_adapter": fixed,  # a server by itself has its own
        "POST /v1/unload_lora_adapter": fixed,
        "GET /health": lambda call: answer({"status": "ok"}),
        "GET /openapi.json": lambda call: answer(
            document(bool(config.users_of_keys), config.live == "on")
        ),
    }


def to_page(prefix: str = "") -> Answer:
    """Redirect a browser from GET / to the page. prefix: before its path, as a replica has."""
    headers = {"Location": f"{prefix}/live", "Vary": "Accept"}
    return Answer(b"", 302, headers)


def description(config: Config, pids: Sequence[int]) -> Answer:
    """Answer GET /. pids: the server's processes, by which the program that started it knows it."""
    result = {
        "name": "effective-batching", "mode": config.mode, "model": config.model,
        "config": config.model_dump(),
        "routes": {name: route.summary for name, route in offered(config.live == "on").items()},
        "definitions": DEFINITIONS, "pids": pids,
    }  # fmt: skip
    return answer(result)


def readiness(reason: str | None) -> Answer:
    """Answer GET /ready. reason: why requests should not be sent here now, if any."""
    if reason is None:
        return answer({"status": "ready"})
    return answer({"status": "not ready", "reason": reason}, 503)


def number(query: Query, name: str, message: str) -> int | None:
    """Return a number of a query, if it is there. Raises InvalidRequest with this sentence."""
    value = query.get(name)
    if value is None:
        return None
    if not NUMBER.fullmatch(value):
        raise InvalidRequest(f"{name}: {message}", param=name)
    return int(value)


def iterations_since(query: Query) -> int | None:
    """Return the first iteration to report in GET /stats, if any. Raises InvalidRequest."""
    if query.get("iterations", "1") != "1":
        raise InvalidRequest("iterations: only 1 is offered; leave it out", param="iterations")
    since = number(query, "since", "give the number of an iteration")
    return since if since is not None or "iterations" not in query else 0
