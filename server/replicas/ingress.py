"""The front end of several replicas: reads and tokenizes each request once, sends it to a replica,
and merges the reports of all. Knows HTTP, and the replicas by `Handles` alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from config import MAX_BODY_BYTES, Config
from generate.tokenizer import load_tokenizer
from scheduling import routers
from scheduling.errors import InvalidRequest, ServingError
from server.api import own, refusals
from server.api.messages import (
    REQUEST_ID,
    STREAM,
    STREAM_HEADERS,
    Answer,
    answer,
    failure,
    request_id,
)
from server.api.own import Call
from server.api.request import Request, RequestReader
from server.api.routes import OF_PAGE, ROUTES, offered, route_of
from server.observers.run import Run
from server.replicas import merging
from server.replicas.handles import Handles

# routes about one server: about a replica, if the path names one
OF_ONE = ("GET /", "GET /stats", "GET /metrics", *OF_PAGE)
PREFIX = re.compile("/replicas/([^/]+)(/.*)")


class Ingress:
    """Handlers of the routes of several replicas. pids: the deployment's other processes."""

    def __init__(self, config: Config, replicas: Handles, pids: Sequence[int]):
        self._config, self._replicas, self._pids = config, replicas, [*pids, os.getpid()]
        self.counted = Run()  # requests that the ingress itself refused
        reader = RequestReader(config, load_tokenizer(config.tokenizer))
        self._readers, self._shared = reader.readers(), own.handlers(config, reader)

    async def handle(self, route: str, http: Http) -> Response:
        """Answer a request to a route by its name in ROUTES. Raises ServingError."""
        to: str | None = http.scope.get("replica")
        if not to and route in OF_PAGE[1:]:  # all but the page itself
            raise InvalidRequest(
                f"{route} belongs to one replica: ask /replicas/NAME{route.split()[1]}; GET /stats "
                "lists the names"
            )
        raw = await body_of(http) if ROUTES[route].body else b""
        call = Call(dict(http.query_params), raw, http.path_params.get("name", ""))
        if read := self._readers.get(route):
            request = read(raw).named(http.scope["of_user"], http.scope["id"])
            return await self._complete(request, to)
        if shared := self._shared.get(route):
            return respond(shared(call))
        if to and route in OF_ONE:
            return respond(await self._replicas.own(route, call, to))
        return respond(await self._of_all(route, call))

    async def _complete(self, request: Request, to: str | None) -> Response:
        if not request.stream:
            return respond(await self._replicas.answer(request, to))
        events = self._replicas.stream(request, to)
        first = await anext(events)
        if isinstance(first, Answer):
            return respond(first)
        return StreamingResponse(_from(first, events), media_type=STREAM, headers=STREAM_HEADERS)

    async def _of_all(self, route: str, call: Call) -> Answer:
        """Answer a route about all replicas together."""
        replicas = self._replicas
        if route == "GET /":
            return own.description(self._config, self._pids)
        if route == "GET /metrics":
            text = merging.metrics(await replicas.all("metrics"))
            return Answer(text, content_type=CONTENT_TYPE_PLAIN_0_0_4)
        if route == "POST /stats/reset":
            self.counted.counts.clear()
            await replicas.all("reset")
            return answer({"reset": True})
        if route == "POST /reset_prefix_cache":
            await replicas.all("forget_prefixes")
            return answer({})
        if route == "GET /stats" and call.query:
            raise InvalidRequest(
                "iterations belong to one replica: ask GET /replicas/NAME/stats", param="iterations"
            )
        reports = await replicas.all("report")
        if route == "GET /stats":
            ages = routers.report_ages_s
            return answer(merging.stats(self._config, reports, self.counted, ages))
        if route == "GET /live" and reports:
            return own.to_page(f"/replicas/{min(each.name for each in reports)}")
        if route in ("GET /live", "GET /ready"):
            return own.readiness(merging.not_ready_because(reports, replicas.wanted))
        raise KeyError(route)


def create_app(config: Config, replicas: Handles, pids: Sequence[int] = ()) -> FastAPI:
    """Return the app; paths under /replicas/NAME/ reach one replica. pids: as for Ingress."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    has_page = config.live == "on"
    ingress = Ingress(config, replicas, pids)
    for name in offered(has_page):
        method, path = name.replace("{name}", "{name:path}").split()
        app.add_route(path, partial(ingress.handle, name), methods=[method])

    @app.exception_handler(ServingError)
    async def serving_error(http: Http, error: ServingError) -> Response:
        if isinstance(error, InvalidRequest):
            ingress.counted.counts["invalid"] += 1
        return respond(failure(error))

    @app.exception_handler(HTTPException)
    async def http_error(http: Http, error: HTTPException) -> Response:
        method, path = http.method, http.url.path
        if error.status_code != 405:
            return respond(failure(refusals.no_such_route(method, path, has_page)))
        allowed = {*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS"}
        if method == "OPTIONS":
            return Response(headers={"Allow": ", ".join(sorted(allowed))})
        return respond(failure(refusals.no_such_method(method, path, allowed)))

    @app.exception_handler(Exception)
    async def defect(http: Http, error: Exception) -> Response:
        return respond(failure(error))  # and Ray's log has it

    app.add_middleware(Guarded, guard=refusals.Guard(config.users_of_keys, config.hosts, has_page))
    return app


class Guarded:
    """ASGI middleware: applies the guard's checks before any route, finds the replica that a path
    names, and puts the request's id into the answer's headers.
    """

    def __init__(self, app: Any, guard: refusals.Guard):
        self._app, self._guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        prefix, headers = "", Headers(scope=scope)
        if scope["method"] == "HEAD":  # the HTTP server leaves the body out
            scope = {**scope, "method": "GET"}
        if match := PREFIX.fullmatch(scope["path"]):
            prefix = f"/replicas/{match[1]}"
            scope = {**scope, "path": match[2], "replica": match[1]}
        given = headers.get(REQUEST_ID, "")
        id_ = request_id(given)

        async def named(message: Any) -> None:
            # Ray's proxy adds an id that the request had, or its own, but not ours
            if message["type"] == "http.response.start" and id_ != given:
                MutableHeaders(scope=message)[REQUEST_ID] = id_
            await send(message)

        route = route_of(scope["method"], scope["path"], self._guard.has_page)
        try:
            user = self._guard.user_of(scope["method"], route, headers)
        except ServingError as error:
            await respond(failure(error))(scope, receive, named)
            return
        if self._guard.shows_page(route, headers):
            await respond(own.to_page(prefix))(scope, receive, named)
            return
        await self._app({**scope, "id": id_, "of_user": user}, receive, named)


def respond(answer: Answer) -> Response:
    headers = {**answer.headers, "Content-Type": answer.content_type}
    return Response(answer.body, answer.status, headers)


async def body_of(http: Http) -> bytes:
    """Return the whole body. Raises Refused for a large one, InvalidRequest if it ends early."""
    raw = bytearray()
    try:
        async for part in http.stream():
            raw += part
            if len(raw) > MAX_BODY_BYTES:
                raise refusals.too_large()
    except ClientDisconnect:
        raise InvalidRequest("The body could not be read to its end (ClientDisconnect).") from None
    return bytes(raw)


async def _from(first: bytes, events: AsyncIterator[Answer | bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in events:
        assert isinstance(each, bytes), "what goes wrong after the first event is an event"
        yield each
