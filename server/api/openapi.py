"""GET /openapi.json: the routes of server/api/routes.py, as OpenAPI 3.1 describes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from config.config import MAX_BODY_BYTES
from server.api import answers
from server.api.messages import JSON, STREAM
from server.api.routes import OPEN, READY, Route, offered

VERSION = "1"
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
        if route.body:
            models[route.body, "validation"] = None
        for answer in (route.answer, *route.events, answers.Error, answers.NotReady):
            if not isinstance(answer, str):
                models[answer, "serialization"] = None
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, has_key)
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


def _operation(route: Route, has_key: bool) -> dict[str, Any]:
    if isinstance(route.answer, str):
        kind = "object" if route.answer == JSON else "string"
        content: dict[str, Any] = {route.answer: {"schema": {"type": kind}}}
    else:
        content = _json(route.answer)
    if route.events:
        content[STREAM] = {"schema": _event(route.events)}
    responses = {"200": {"description": route.summary, "content": content}}
    for status in sorted({*route.problems, *([401] if has_key and route not in OPEN else [])}):
        responses[str(status)] = {"description": PROBLEMS[status], "content": _json(answers.Error)}
        if status in HEADERS:
            header = {"required": True, "schema": {"type": "string"}}
            responses[str(status)]["headers"] = {HEADERS[status]: header}
    if route is READY:
        content = _json(answers.NotReady)
        responses["503"] = {"description": "not yet, or no more", "content": content}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.body:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    elif route.method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": {}}}}
    if route.parameters:
        operation["parameters"] = [*route.parameters]
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
