"""A server's routes, with what each takes and answers, and what the handler of one is given. Every
front end answers by this table, and server/api/openapi.py describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from server.api import answers, bodies
from server.api.messages import JSON, Answer


@dataclass(frozen=True, eq=False)
class Route:
    """answer: a model, or a text's media type. problems: statuses of errors. events: models of a
    stream's.
    """

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str
    problems: Sequence[int] = ()
    body: type[BaseModel] | None = None
    events: Sequence[type[BaseModel]] = ()
    parameters: Sequence[dict[str, Any]] = ()

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)  # another process has the table, too


class Call(NamedTuple):
    """A request that may call its route; it may travel between processes. name: at the path's end.
    user: that its key names, if any. id: in its answer's headers, too.
    """

    route: Route
    name: str = ""
    user: str | None = None
    id: str = ""
    query: Mapping[str, str] = {}
    body: bytes = b""


Handler = Callable[[Call], Answer]  # it may raise a ServingError
Handlers = dict[Route, Handler]


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
# problems of several routes
SERVING = (400, 404, 413, 415, 429, 500, 503, 504)
ADAPTING = (400, 403, 404, 413, 415)

INFERENCE = Route(
    "POST", "/inference", "complete a prompt, or a group of prompts", answers.InferenceAnswer,
    SERVING, bodies.InferenceRequest, [answers.InferencePiece, answers.InferenceEnd],
)  # fmt: skip
COMPLETION = Route(
    "POST", "/v1/completions", "the same, as OpenAI's clients ask it", answers.Completion, SERVING,
    bodies.CompletionRequest, [answers.CompletionChunk],
)  # fmt: skip
CHAT = Route(
    "POST", "/v1/chat/completions", "a conversation, in OpenAI's form", answers.ChatCompletion,
    SERVING, bodies.ChatRequest, [answers.ChatCompletionChunk],
)  # fmt: skip
TOKENIZE = Route(
    "POST", "/tokenize", "the ids of a prompt or a chat, as vLLM's", answers.Tokens,
    (400, 404, 413, 415), bodies.TokenizeRequest,
)  # fmt: skip
MODELS = Route(
    "GET", "/v1/models", "the model and its LoRA adapters, in OpenAI's form", answers.Models
)
MODEL = Route(
    "GET", "/v1/models/{name}", "the same of one name", answers.Model, [404], parameters=NAME
)
LOAD_ADAPTER = Route(
    "POST", "/v1/load_lora_adapter",
    "read a LoRA adapter from a folder, as vLLM's; only on servers with a key", "text/plain",
    ADAPTING, bodies.LoadAdapterRequest,
)  # fmt: skip
UNLOAD_ADAPTER = Route(
    "POST", "/v1/unload_lora_adapter",
    "forget a LoRA adapter once its requests have ended, as vLLM's", "text/plain", ADAPTING,
    bodies.UnloadAdapterRequest,
)  # fmt: skip
STATS = Route(
    "GET", "/stats",
    "measures of the current run; ?iterations=1&since=N adds an entry for each iteration from "
    "number N on, 10,000 at most", answers.Stats, [400], parameters=OF_STATS,
)  # fmt: skip
RESET = Route("POST", "/stats/reset", "start a new run", answers.Reset, [415])
REQUEST = Route(
    "GET", "/requests/{name}",
    "where a request's time went, and what ran beside it: by its X-Request-Id, or else by its "
    "number, of those in flight and the last 2,000 that ended", answers.RecentRequests, [404],
    parameters=NAME,
)  # fmt: skip
FORGET_PREFIXES = Route(
    "POST", "/reset_prefix_cache", "forget all prefixes, as vLLM's", answers.Forgotten, [415]
)
PAGE = Route(
    "GET", "/live", "a page that shows the rows of the batch; it holds no data", "text/html"
)
EVENTS = Route(
    "GET", "/live/events",
    "what happened since ?since=CURSOR, for that page (docs/live.md); ?load=ID keeps its load "
    "alive", answers.Events, [400], parameters=OF_EVENTS,
)  # fmt: skip
LOAD = Route(
    "POST", "/live/load", "requests that the server makes itself, for that page; rate 0 ends them",
    answers.LoadStarted, (400, 413, 415), bodies.LoadRequest,
)  # fmt: skip
FILE = Route(
    "GET", "/live/{name}", "the page's style or one of its scripts", "text/*", [404],
    parameters=NAME,
)  # fmt: skip
METRICS = Route("GET", "/metrics", "for Prometheus", "text/plain")
HEALTH = Route("GET", "/health", "the process answers", answers.Health)
READY = Route("GET", "/ready", "the model is loaded and the handler thread works", answers.Ready)
DOCUMENT = Route("GET", "/openapi.json", "this interface, as OpenAPI 3.1 describes it", JSON)
DESCRIPTION = Route("GET", "/", "what this server is", answers.Description)

OF_PAGE = (PAGE, EVENTS, LOAD, FILE)
ROUTES = (
    *(INFERENCE, COMPLETION, CHAT, TOKENIZE, MODELS, MODEL, LOAD_ADAPTER, UNLOAD_ADAPTER),
    *(STATS, REQUEST, RESET, FORGET_PREFIXES, *OF_PAGE),
    *(METRICS, HEALTH, READY, DOCUMENT, DESCRIPTION),
)
PROBES = (HEALTH, READY)
OPEN = (*PROBES, PAGE, FILE)  # need no key


def offered(has_page: bool) -> Sequence[Route]:
    """Return the routes of a server, with or without the page."""
    return [route for route in ROUTES if has_page or route not in OF_PAGE]


def named(name: str) -> Route:
    """Return the route of a name."""
    return next(route for route in ROUTES if route.name == name)
