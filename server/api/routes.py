"""Table of a server's routes: body, answer and errors of each. Every front end registers its
handlers by this table, and /openapi.json describes it (server/api/openapi.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from server.api import answers
from server.api.bodies import (
    ChatRequest,
    CompletionRequest,
    InferenceRequest,
    LoadRequest,
    TokenizeRequest,
)
from server.api.messages import JSON
from server.api.models import LoadAdapterRequest, UnloadAdapterRequest

HTML, TEXT, ANY_TEXT = "text/html", "text/plain", "text/*"


@dataclass(frozen=True, slots=True)
class Route:
    """A route. answer: a model, or a text's media type. events: a stream's. problems: errors."""

    summary: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    events: tuple[type[BaseModel], ...] = ()
    problems: tuple[int, ...] = ()
    parameters: Sequence[dict[str, Any]] = ()


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


SERVING = (400, 404, 413, 415, 429, 500, 503, 504)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
PAGE = (
    _query("iterations", {"enum": ["1"]}, "add an entry for each iteration"),
    _query("since", NUMBER, "the same from this iteration on"),
)
EVENTS = (
    _query("since", NUMBER, "the cursor of an earlier answer; without it all that is kept"),
    _query("load", {"type": "string"}, "the id of the load that the page started"),
)
NAME = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},)
ROUTES = {
    "POST /inference": Route(
        "complete a prompt, or a group of prompts",
        answers.InferenceAnswer, InferenceRequest,
        (answers.InferencePiece, answers.InferenceEnd), SERVING,
    ),
    "POST /v1/completions": Route(
        "the same, as OpenAI's clients ask it",
        answers.Completion, CompletionRequest, (answers.CompletionChunk,), SERVING,
    ),
    "POST /v1/chat/completions": Route(
        "a conversation, in OpenAI's form",
        answers.ChatCompletion, ChatRequest, (answers.ChatCompletionChunk,), SERVING,
    ),
    "POST /tokenize": Route(
        "the ids of a prompt or a chat, as vLLM's",
        answers.Tokens, TokenizeRequest, problems=(400, 404, 413, 415),
    ),
    "GET /v1/models": Route("the model and its LoRA adapters, in OpenAI's form", answers.Models),
    "GET /v1/models/{name}": Route(
        "the same of one name", answers.Model, problems=(404,), parameters=NAME
    ),
    "POST /v1/load_lora_adapter": Route(
        "read a LoRA adapter from a folder, as vLLM's; only on servers with a key",
        TEXT, LoadAdapterRequest, problems=(400, 403, 404, 413, 415),
    ),
    "POST /v1/unload_lora_adapter": Route(
        "forget a LoRA adapter once its requests have ended, as vLLM's",
        TEXT, UnloadAdapterRequest, problems=(400, 403, 404, 413, 415),
    ),
    "GET /stats": Route(
        "measures of the current run; ?iterations=1&since=N adds an entry for each iteration from "
        "number N on, 10,000 at most",
        answers.Stats, problems=(400,), parameters=PAGE,
    ),
    "POST /stats/reset": Route("start a new run", answers.Reset, problems=(415,)),
    "POST /reset_prefix_cache": Route(
        "forget all prefixes, as vLLM's", answers.Forgotten, problems=(415,)
    ),
    "GET /live": Route("a page that shows the rows of the batch; it holds no data", HTML),
    "GET /live/events": Route(
        "what happened since ?since=CURSOR, for that page (docs/live.md); ?load=ID keeps its load "
        "alive",
        answers.Events, problems=(400,), parameters=EVENTS,
    ),
    "POST /live/load": Route(
        "requests that the server makes itself, for that page; rate 0 ends them",
        answers.LoadStarted, LoadRequest, problems=(400, 413, 415),
    ),
    "GET /live/{name}": Route(  # after the others, which it would take
        "the page's style or one of its scripts", ANY_TEXT, problems=(404,), parameters=NAME
    ),
    "GET /metrics": Route("for Prometheus", TEXT),
    "GET /health": Route("the process answers", answers.Health),
    "GET /ready": Route("the model is loaded and the handler thread works", answers.Ready),
    "GET /openapi.json": Route("this interface, as OpenAPI 3.1 describes it", JSON),
    "GET /": Route("what this server is", answers.Description),
}  # fmt: skip
OPEN = ("GET /health", "GET /ready", "GET /live", "GET /live/{name}")  # need no key
OF_PAGE = ("GET /live", "GET /live/{name}", "GET /live/events", "POST /live/load")
NAMED = ("GET /v1/models/{name}", "GET /live/{name}")  # whose path ends with a name


def offered(has_page: bool) -> dict[str, Route]:
    """The routes of a server, with or without the page."""
    return {name: route for name, route in ROUTES.items() if has_page or name not in OF_PAGE}


def route_of(method: str, path: str, has_page: bool) -> str | None:
    """The name in ROUTES of the route that takes a request, if there is one."""
    routes = offered(has_page)
    if (name := f"{method} {path}") in routes:
        return name
    prefixes = [(route, route.removesuffix("{name}")) for route in NAMED if route in routes]
    return next(
        (each for each, prefix in prefixes if name.startswith(prefix) and name != prefix), None
    )
