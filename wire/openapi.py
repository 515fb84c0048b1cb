"""GET /openapi.json: every route, what it takes and what it answers, errors too, as OpenAPI 3.1.

Bodies are the models that are validated with (wire/bodies.py), answers those of wire/answers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from wire import answers
from wire.bodies import (
    ChatRequest,
    CompletionRequest,
    InferenceRequest,
    LoadRequest,
    TokenizeRequest,
)
from wire.messages import JSON

VERSION = "1"
HTML = "text/html"
PROBLEMS = {
    400: "the request can never be served as it stands; `param` names the field",
    401: "the server has an API key, and this is not it",
    404: "there is no such model here",
    413: "the body is too large",
    415: "a POST must be application/json",
    429: "the queue is full, or the user has had what a minute allows; try again after "
    "`Retry-After` seconds",
    500: "the engine failed in an iteration of this request",
    503: "the server is shutting down",
    504: "the request's deadline passed",
}
HEADERS = {401: "WWW-Authenticate", 429: "Retry-After"}


@dataclass(frozen=True, slots=True)
class Route:
    """`answer`: a model, or the media type of a text. `events`: of its stream.

    `problems`: beside 401.
    """

    summary: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    events: tuple[type[BaseModel], ...] = ()
    problems: tuple[int, ...] = ()
    parameters: Sequence[dict[str, Any]] = ()


SERVING = (400, 413, 415, 429, 500, 503, 504)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
PAGE = (
    {
        "name": "iterations",
        "in": "query",
        "schema": {"enum": ["1"]},
        "description": "add an entry for each iteration",
    },
    {
        "name": "since",
        "in": "query",
        "schema": NUMBER,
        "description": "from this iteration on; needs iterations=1",
    },
)
EVENTS = (
    {
        "name": "since",
        "in": "query",
        "schema": NUMBER,
        "description": "the cursor of an earlier answer; without it all that is kept",
    },
    {
        "name": "load",
        "in": "query",
        "schema": {"type": "string"},
        "description": "the id of the load that the page started",
    },
)
LAST = (
    {
        "name": "last",
        "in": "query",
        "schema": NUMBER,
        "description": "so many iterations (default: 500)",
    },
)
NAME = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},)
ROUTES = {
    "POST /inference": Route(
        "complete a prompt, or a group of prompts",
        answers.InferenceAnswer,
        InferenceRequest,
        (answers.InferencePiece, answers.InferenceEnd),
        SERVING,
    ),
    "POST /v1/completions": Route(
        "the same, as OpenAI's clients ask it",
        answers.Completion,
        CompletionRequest,
        (answers.CompletionChunk,),
        (*SERVING, 404),
    ),
    "POST /v1/chat/completions": Route(
        "a conversation, in OpenAI's form",
        answers.ChatCompletion,
        ChatRequest,
        (answers.ChatCompletionChunk,),
        (*SERVING, 404),
    ),
    "POST /tokenize": Route(
        "the ids of a prompt or a chat, as vLLM's",
        answers.Tokens,
        TokenizeRequest,
        problems=(400, 404, 413, 415),
    ),
    "GET /v1/models": Route("the model, in OpenAI's form", answers.Models),
    "GET /v1/models/{name}": Route(
        "the same of one name", answers.Model, problems=(404,), parameters=NAME
    ),
    "GET /stats": Route(
        "measures of the current run; ?iterations=1&since=N adds an entry for each iteration from "
        "number N on",
        answers.Stats,
        problems=(400,),
        parameters=PAGE,
    ),
    "POST /stats/reset": Route("start a new run", answers.Reset, problems=(415,)),
    "POST /reset_prefix_cache": Route(
        "forget all prefixes, as vLLM's", answers.Forgotten, problems=(415,)
    ),
    "GET /live": Route("a page that shows the rows of the batch; it holds no data", HTML),
    "GET /live/events": Route(
        "what happened since ?since=CURSOR, for that page (docs/live.md); ?load=ID keeps its load "
        "alive",
        answers.Events,
        problems=(400,),
        parameters=EVENTS,
    ),
    "POST /live/load": Route(
        "requests that the server makes itself, for that page; rate 0 ends them",
        answers.LoadStarted,
        LoadRequest,
        problems=(400, 413, 415),
    ),
    "GET /timeline": Route(
        "the last ?last=N iterations that somebody looked at, as Chrome's trace events",
        JSON,
        problems=(400,),
        parameters=LAST,
    ),
    "GET /metrics": Route("for Prometheus", "text/plain"),
    "GET /health": Route("the process answers", answers.Health),
    "GET /ready": Route("the model is loaded and the handler thread works", answers.Ready),
    "GET /openapi.json": Route("this interface, as OpenAPI 3.1 describes it", JSON),
    "GET /": Route("what this server is", answers.Description),
}
OPEN = ("GET /health", "GET /ready", "GET /live")  # need no key


OF_PAGE = ("GET /live", "GET /live/events", "POST /live/load", "GET /timeline")


def offered(live: bool) -> dict[str, Route]:
    """The routes of a server, with or without the page."""
    return {name: route for name, route in ROUTES.items() if live or name not in OF_PAGE}


@functools.cache
def document(has_key: bool, live: bool) -> dict[str, Any]:
    """The OpenAPI document of a server, with or without an API key."""
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}  # in order, each once
    routes = offered(live)
    for route in routes.values():
        if route.body:
            models[route.body, "validation"] = None
        for answer in (route.answer, *route.events, answers.Error, answers.NotReady):
            if not isinstance(answer, str):
                models[answer, "serialization"] = None
    _, schemas = models_json_schema([*models], ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for name, route in routes.items():
        method, path = name.split()
        paths.setdefault(path, {})[method.lower()] = _operation(name, route, has_key)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "effective-batching", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if has_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(name: str, route: Route, has_key: bool) -> dict[str, Any]:
    content = (
        {route.answer: {"schema": {"type": "string"}}}
        if isinstance(route.answer, str)
        else _json(route.answer)
    )
    if route.answer == JSON:
        content = {JSON: {"schema": {"type": "object"}}}
    if route.events:
        content["text/event-stream"] = {"schema": _event(route.events)}
    responses = {"200": {"description": route.summary, "content": content}}
    for status in sorted({*route.problems, *([401] if has_key and name not in OPEN else [])}):
        responses[str(status)] = {"description": PROBLEMS[status], "content": _json(answers.Error)}
        if status in HEADERS:
            responses[str(status)]["headers"] = {
                HEADERS[status]: {"required": True, "schema": {"type": "string"}}
            }
    if name == "GET /ready":
        responses["503"] = {
            "description": "not yet, or no more",
            "content": _json(answers.NotReady),
        }
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.body:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    elif name.startswith("POST"):
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": {}}}}
    if route.parameters:
        operation["parameters"] = [*route.parameters]
    if has_key and name in OPEN:
        operation["security"] = []
    return operation


def _event(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """One server-sent event: the next of `models`, an error, or the end."""
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
