"""A server's routes, and what the handler of one is given. Every front end answers by this table;
server/api/openapi.py says what each route takes and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from server.api.messages import Answer


class Route(NamedTuple):
    method: str
    path: str
    summary: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


class Call(NamedTuple):
    """A request to a route; it may travel between processes. name: at the path's end. user: that
    its key names, if any. id: in its answer's headers, too.
    """

    query: Mapping[str, str] = {}
    body: bytes = b""
    name: str = ""
    user: str | None = None
    id: str = ""


Handler = Callable[[Call], Answer]  # it may raise a ServingError
Row = tuple[Route, Handler]

INFERENCE = Route("POST", "/inference", "complete a prompt, or a group of prompts")
COMPLETION = Route("POST", "/v1/completions", "the same, as OpenAI's clients ask it")
CHAT = Route("POST", "/v1/chat/completions", "a conversation, in OpenAI's form")
TOKENIZE = Route("POST", "/tokenize", "the ids of a prompt or a chat, as vLLM's")
MODELS = Route("GET", "/v1/models", "the model and its LoRA adapters, in OpenAI's form")
MODEL = Route("GET", "/v1/models/{name}", "the same of one name")
LOAD_ADAPTER = Route(
    "POST",
    "/v1/load_lora_adapter",
    "read a LoRA adapter from a folder, as vLLM's; only on servers with a key",
)
UNLOAD_ADAPTER = Route(
    "POST",
    "/v1/unload_lora_adapter",
    "forget a LoRA adapter once its requests have ended, as vLLM's",
)
STATS = Route(
    "GET",
    "/stats",
    "measures of the current run; ?iterations=1&since=N adds an entry for each iteration from "
    "number N on, 10,000 at most",
)
RESET = Route("POST", "/stats/reset", "start a new run")
REQUEST = Route(
    "GET",
    "/requests/{name}",
    "where a request's time went, and what ran beside it: by its X-Request-Id, or else by its "
    "number, of those in flight and the last 2,000 that ended",
)
FORGET_PREFIXES = Route("POST", "/reset_prefix_cache", "forget all prefixes, as vLLM's")
PAGE = Route("GET", "/live", "a page that shows the rows of the batch; it holds no data")
EVENTS = Route(
    "GET",
    "/live/events",
    "what happened since ?since=CURSOR, for that page (docs/live.md); ?load=ID keeps its load "
    "alive",
)
LOAD = Route(
    "POST",
    "/live/load",
    "requests that the server makes itself, for that page; rate 0 ends them",
)
FILE = Route("GET", "/live/{name}", "the page's style or one of its scripts")
METRICS = Route("GET", "/metrics", "for Prometheus")
HEALTH = Route("GET", "/health", "the process answers")
READY = Route("GET", "/ready", "the model is loaded and the handler thread works")
DOCUMENT = Route("GET", "/openapi.json", "this interface, as OpenAPI 3.1 describes it")
DESCRIPTION = Route("GET", "/", "what this server is")

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
