"""GET /openapi.json: what every route of server/api/routes.py takes and answers, as OpenAPI 3.1 has
it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from config import MAX_BODY_BYTES
from server.api import answers, bodies, lora, routes
from server.api.messages import JSON, STREAM
from server.api.routes import OPEN, READY, Route, offered

VERSION = "1"


class Described(NamedTuple):
    """What a route takes and answers. answer: a model, or a text's media type. problems: statuses
    of errors. events: models of a stream's.
    """

    answer: type[BaseModel] | str
    problems: Sequence[int] = ()
    body: type[BaseModel] | None = None
    events: Sequence[type[BaseModel]] = ()
    parameters: Sequence[dict[str, Any]] = ()


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
OF_STATS = (
    _query("iterations", {"enum": ["1"]}, "add an entry for each iteration"),
    _query("since", NUMBER, "the same from this iteration on"),
)
OF_EVENTS = (
    _query("since", NUMBER, "the cursor of an earlier answer; without it all that is kept"),
    _query("load", {"type": "string"}, "the id of the load that the page started"),
)
NAME = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},)

READING = (400, 413, 415)
SERVING = (400, 404, 413, 415, 429, 500, 503, 504)
ADAPTING = (400, 403, 404, 413, 415)
INFERENCE = answers.InferencePiece, answers.InferenceEnd
DESCRIBED = {
    routes.INFERENCE: Described(
        answers.InferenceAnswer, SERVING, bodies.InferenceRequest, INFERENCE
    ),
    routes.COMPLETION: Described(
        answers.Completion, SERVING, bodies.CompletionRequest, [answers.CompletionChunk]
    ),
    routes.CHAT: Described(
        answers.ChatCompletion, SERVING, bodies.ChatRequest, [answers.ChatCompletionChunk]
    ),
    routes.TOKENIZE: Described(answers.Tokens, (400, 404, 413, 415), bodies.TokenizeRequest),
    routes.MODELS: Described(answers.Models),
    routes.MODEL: Described(answers.Model, [404], parameters=NAME),
    routes.LOAD_ADAPTER: Described("text/plain", ADAPTING, lora.LoadAdapterRequest),
    routes.UNLOAD_ADAPTER: Described("text/plain", ADAPTING, lora.UnloadAdapterRequest),
    routes.STATS: Described(answers.Stats, [400], parameters=OF_STATS),
    routes.REQUEST: Described(answers.RecentRequests, [404], parameters=NAME),
    routes.RESET: Described(answers.Reset, [415]),
    routes.FORGET_PREFIXES: Described(answers.Forgotten, [415]),
    routes.PAGE: Described("text/html"),
    routes.EVENTS: Described(answers.Events, [400], parameters=OF_EVENTS),
    routes.LOAD: Described(answers.LoadStarted, READING, bodies.LoadRequest),
    routes.FILE: Described("text/*", [404], parameters=NAME),
    routes.METRICS: Described("text/plain"),
    routes.HEALTH: Described(answers.Health),
    routes.READY: Described(answers.Ready),
    routes.DOCUMENT: Described(JSON),
    routes.DESCRIPTION: Described(answers.Description),
}
PROBLEMS = {
    400: "the request can never be served as it stands; `param` names the field",
    401: "the server has an API key, and this is not it",
    403: "the `Host` is not allowed, or only a server with a key does it",
    404: "there is no such route, model, adapter or request here",
    405: "the route takes another method, which the header `Allow` names",
    408: "headers or body came too slowly",
    413: f"the body is larger than {MAX_BODY_BYTES:,} bytes",
    415: "a POST must be application/json, and not compressed",
    429: "the queue is full, the user has reached a limit per minute, or the request's limit on "
    "time to first token is out of reach; try again after `Retry-After` seconds",
    431: "the headers are too large",
    500: "the engine failed in an iteration of this request",
    503: "the server is shutting down, its engine is broken, or unfinished bodies fill its memory",
    504: "the request's deadline passed, in the queue or later",
}
HEADERS = {401: "WWW-Authenticate", 429: "Retry-After"}


@functools.cache
def document(has_key: bool, live: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a server, with or without an API key and the page."""
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}  # in order, each once
    paths: dict[str, dict[str, Any]] = {}
    for route in offered(live):
        described = DESCRIBED[route]
        if described.body:
            models[described.body, "validation"] = None
        for answer in (described.answer, *described.events, answers.Error, answers.NotReady):
            if not isinstance(answer, str):
                models[answer, "serialization"] = None
        operation = _operation(route, described, has_key)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    _, schemas = models_json_schema([*models], ref_template="#/components/schemas/{model}")
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "effective-batching", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if has_key:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _operation(route: Route, of: Described, has_key: bool) -> dict[str, Any]:
    if isinstance(of.answer, str):
        kind = "object" if of.answer == JSON else "string"
        content: dict[str, Any] = {of.answer: {"schema": {"type": kind}}}
    else:
        content = _json(of.answer)
    if of.events:
        content[STREAM] = {"schema": _event(of.events)}
    responses = {"200": {"description": route.summary, "content": content}}
    for status in sorted({*of.problems, *([401] if has_key and route not in OPEN else [])}):
        responses[str(status)] = {"description": PROBLEMS[status], "content": _json(answers.Error)}
        if status in HEADERS:
            header = {"required": True, "schema": {"type": "string"}}
            responses[str(status)]["headers"] = {HEADERS[status]: header}
    if route == READY:
        content = _json(answers.NotReady)
        responses["503"] = {"description": "not yet, or no more", "content": content}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if of.body:
        operation["requestBody"] = {"required": True, "content": _json(of.body)}
    elif route.method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": {}}}}
    if of.parameters:
        operation["parameters"] = [*of.parameters]
    if has_key and route in OPEN:
        operation["security"] = []
    return operation


def _event(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the schema of a server-sent event: one of `models`, an error, or the end."""
    schemas = [_ref(model) for model in models] + [_ref(answers.Error)]
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": schemas}}
    return {
        "type": "object",
        "description": 'one event, with "stream": true; the last is [DONE]',
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {JSON: {"schema": _ref(model)}}
