"""Routes about a server: its models, its state and its measures. Knows no HTTP server: `app` serves
them with Flask, and `server.replicas` behind an ingress.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from scheduling.errors import InvalidRequest
from server.api import routes
from server.api.messages import Answer, answer
from server.api.openapi import document
from server.api.reader import RequestReader
from server.api.refusals import Refused
from server.api.routes import Call, Handlers, offered
from server.observers.recent import KEPT
from server.request import Models
from server.serving import Server
from stats import DEFINITIONS

if TYPE_CHECKING:
    from config.config import Config

NUMBER = re.compile("[0-9]{1,18}")


def of_config(config: Config, reader: RequestReader) -> Handlers:
    """Return the routes that need no engine."""
    has_key, has_page = bool(config.users_of_keys), config.live != "off"
    return {
        routes.TOKENIZE: lambda call: answer(reader.tokenize(call.body)),
        routes.HEALTH: health,
        routes.DOCUMENT: lambda call: answer(document(has_key, has_page)),
    }


def of_models(models: Models) -> Handlers:
    """Return the routes about models."""

    def one_model(call: Call) -> Answer:
        models.adapter_of(call.name)
        return answer(cards(models)[call.name])

    return {
        routes.MODELS: lambda call: answer({"object": "list", "data": [*cards(models).values()]}),
        routes.MODEL: one_model,
    }


def of_server(server: Server, pids: Sequence[int]) -> Handlers:
    """Return the routes about the engine. pids: of the server's processes."""
    manager = server.manager

    def reset(call: Call) -> Answer:
        server.stats.reset(manager.clock())
        return answer({"reset": True})

    def forget_prefixes(call: Call) -> Answer:
        manager.forget_prefixes()
        return answer({})

    def request(call: Call) -> Answer:
        if not (found := server.recent.find(call.name)):
            message = f"No request {call.name[:100]!r} is in flight or among the last {KEPT:,}."
            raise Refused("not_found", message)
        return answer({"requests": found})

    return of_models(server.models) | {
        routes.DESCRIPTION: lambda call: description(server.config, pids),
        routes.HEALTH: health,
        routes.REQUEST: request,
        routes.READY: lambda call: readiness(manager.not_ready_because()),
        routes.STATS: lambda call: answer(server.report(iterations_since(call.query))),
        routes.METRICS: lambda call: metrics(generate_latest(server.metrics.registry)),
        routes.RESET: reset,
        routes.FORGET_PREFIXES: forget_prefixes,
    }


def cards(models: Models) -> dict[str, Any]:
    """Return what OpenAI's routes say of each model, in vLLM's form."""
    facts: dict[str, Any] = {"object": "model", "created": models.created}
    facts |= {"owned_by": "effective-batching", "max_model_len": models.max_model_len}
    return {
        name: {"id": name, "root": root, "parent": None if name == models.base else models.base}
        | facts
        for name, root in models.roots.copy().items()
    }


def description(config: Config, pids: Sequence[int]) -> Answer:
    """Answer GET /. pids: the server's processes, by which the program that started it knows it."""
    known = {route.name: route.summary for route in offered(config.live != "off")}
    result = {"name": "effective-batching", "mode": config.mode, "model": config.model}
    result |= {"config": config.model_dump(), "routes": known, "definitions": DEFINITIONS}
    return answer(result | {"pids": pids})


def health(call: Call) -> Answer:
    """Answer GET /health."""
    return answer({"status": "ok"})


def readiness(reason: str | None) -> Answer:
    """Answer GET /ready. reason: why requests should not be sent here now, if any."""
    if reason is None:
        return answer({"status": "ready"})
    return answer({"status": "not ready", "reason": reason}, 503)


def metrics(text: bytes) -> Answer:
    """Answer GET /metrics, whatever the Accept header says: in OpenMetrics the library may turn the
    colons of vLLM's names into underscores.
    """
    return Answer(text, content_type=CONTENT_TYPE_PLAIN_0_0_4)


def number(query: Mapping[str, str], name: str, message: str) -> int | None:
    """Return a number of a query, if it is there. Raises InvalidRequest with this sentence."""
    value = query.get(name)
    if value is None:
        return None
    if not NUMBER.fullmatch(value):
        raise InvalidRequest(f"{name}: {message}", param=name)
    return int(value)


def iterations_since(query: Mapping[str, str]) -> int | None:
    """Return the first iteration to report in GET /stats, if any. Raises InvalidRequest."""
    if query.get("iterations", "1") != "1":
        raise InvalidRequest("iterations: only 1 is offered; leave it out", param="iterations")
    since = number(query, "since", "give the number of an iteration")
    return since if since is not None or "iterations" not in query else 0
