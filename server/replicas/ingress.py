"""The front end of several replicas: reads and tokenizes each request once, sends it to a replica,
and merges the reports of all. Knows HTTP, and the replicas by `Handles` alone.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from config.config import MAX_BODY_BYTES, Config
from generate.tokenizer import load_tokenizer
from scheduling import routers
from scheduling.errors import Draining, InvalidRequest, ServingError
from server.api import about, routes
from server.api.door import Door, to_page
from server.api.messages import JSON, REQUEST_ID, STREAM, STREAM_HEADERS, Answer, answer, request_id
from server.api.reader import RequestReader
from server.api.refusals import Refused, failure, too_large, too_slow
from server.api.routes import Call, Handlers
from server.observers.run import Run
from server.replicas import merging
from server.replicas.handles import Handles, cut_off, gone
from server.request import Request

# routes about one server: about a replica, if the path names one
OF_ONE = (
    *(routes.DESCRIPTION, routes.STATS, routes.METRICS, routes.REQUEST, *routes.OF_PAGE),
    *(routes.RESET, routes.FORGET_PREFIXES, *routes.PROBES),
)
# headers that Ray's proxy obeys begin so, with - or _; one keeps the row of a client that has gone
ORDERS = "x-request-", "x-session-id", "serve-multiplexed-model-id"
PREFIX = re.compile("/replicas/([^/]+)(/.*)")


class Ingress:
    """Handlers of the routes of several replicas. pids: the deployment's other processes."""

    def __init__(self, config: Config, replicas: Handles, pids: Sequence[int]):
        self._config, self._replicas, self._pids = config, replicas, [*pids, os.getpid()]
        self.counted = Run()  # requests that the ingress itself refused
        reader = RequestReader(config, load_tokenizer(config.tokenizer))
        self._readers = reader.readers()
        fixed = dict.fromkeys((routes.LOAD_ADAPTER, routes.UNLOAD_ADAPTER), adapters_are_fixed)
        self._shared: Handlers = (
            about.of_config(config, reader) | about.of_models(reader.models) | fixed
        )

    async def handle(self, http: Http) -> Response:
        """Answer a request that the door has admitted. Raises ServingError."""
        call: Call = http.scope["call"]
        to: str | None = http.scope.get("replica")
        route = call.route
        if not to and route in (routes.REQUEST, routes.EVENTS, routes.LOAD, routes.FILE):
            raise InvalidRequest(
                f"{route.name} belongs to one replica: ask /replicas/NAME{route.path}; GET /stats "
                "lists the names"
            )
        call = call._replace(query=dict(http.query_params))
        if route.method == "POST":
            call = call._replace(body=await body_of(http, self._config.body_timeout_s))
        if read := self._readers.get(route):
            return await self._complete(read(call), to)
        if to and route in OF_ONE:
            return respond(await self._replicas.ask(call, to))
        if shared := self._shared.get(route):
            return respond(shared(call))
        return respond(await self._of_all(call))

    async def _complete(self, request: Request, to: str | None) -> Response:
        if not request.stream:
            return respond(await self._replicas.answer(request, to))
        events = self._replicas.stream(request, to)
        first = await anext(events)
        if isinstance(first, Answer):
            return respond(first)
        return StreamingResponse(_from(first, events), media_type=STREAM, headers=STREAM_HEADERS)

    async def _of_all(self, call: Call) -> Answer:
        """Answer a route about all replicas together."""
        replicas, route = self._replicas, call.route
        if route == routes.DESCRIPTION:
            return about.description(self._config, self._pids)
        if route == routes.METRICS:
            return about.metrics(merging.metrics(await replicas.all("metrics")))
        if route == routes.RESET:
            self.counted.counts.clear()
            await replicas.all("reset")
            return answer({"reset": True})
        if route == routes.FORGET_PREFIXES:
            await replicas.all("forget_prefixes")
            return answer({})
        if route == routes.STATS and call.query:
            raise InvalidRequest(
                "iterations belong to one replica: ask GET /replicas/NAME/stats", param="iterations"
            )
        reports = await replicas.all("report")
        if route == routes.STATS:
            ages = routers.report_ages_s
            return answer(merging.stats(self._config, reports, self.counted, ages))
        if route == routes.PAGE and reports:
            return to_page(f"/replicas/{min(each.name for each in reports)}")
        if route in (routes.PAGE, routes.READY):
            return about.readiness(merging.not_ready_because(reports, replicas.wanted))
        raise KeyError(route)


def adapters_are_fixed(call: Call) -> Answer:
    message = "Replicas read their adapters when they start; name them in --lora."
    raise Refused("adapters_are_fixed", message)


def create_app(config: Config, replicas: Handles, pids: Sequence[int] = ()) -> FastAPI:
    """Return the app; paths under /replicas/NAME/ reach one replica. pids: as for Ingress."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    ingress = Ingress(config, replicas, pids)
    app.add_route("/{path:path}", ingress.handle, methods=["GET", "POST"])

    @app.exception_handler(ServingError)
    async def serving_error(http: Http, error: ServingError) -> Response:
        if isinstance(error, InvalidRequest):
            ingress.counted.counts["invalid"] += 1
        return respond(failure(error))

    @app.exception_handler(Exception)
    async def defect(http: Http, error: Exception) -> Response:
        return respond(failure(error))  # and Ray's log has it

    app.add_middleware(AtTheDoor, door=Door(config))
    return app


class AtTheDoor:
    """ASGI middleware: every request passes the door; finds the replica that a path names."""

    def __init__(self, app: Any, door: Door):
        self._app, self._door = app, door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        prefix, path, headers = "", scope["path"], Headers(scope=scope)
        if match := PREFIX.fullmatch(path):
            prefix, path = f"/replicas/{match[1]}", match[2]
            scope = {**scope, "replica": match[1]}
        id_ = request_id(headers.get(REQUEST_ID, ""))
        call: Call | Answer
        try:
            call = self._door.admit(scope["method"], path, headers, id_, prefix)
        except ServingError as error:
            call = failure(error)
        if isinstance(call, Answer):
            await respond(call)(scope, receive, send)
            return
        # the HTTP server leaves the body of a HEAD out
        more = {"path": path, "method": call.route.method, "call": call}
        await self._app({**scope, **more}, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Ray's proxy puts around itself."""
    return [Middleware(around_proxy)]


def around_proxy(app: Any) -> Any:
    """Return ASGI middleware that lets no client give Ray's proxy orders, and makes errors ours."""

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        headers = MutableHeaders(scope=scope)
        id_ = request_id(headers.get(REQUEST_ID, ""))
        for name in headers:
            if name.replace("_", "-").startswith(ORDERS):
                del headers[name]
        headers[REQUEST_ID] = id_  # Ray's proxy puts it into the answer, too
        kind, is_ours, is_whole = "", scope["type"] != "http", False

        async def returned(message: Any) -> None:
            nonlocal kind, is_ours, is_whole
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"])["Content-Type"]
                is_ours = message["status"] < 400 or kind == JSON
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            if is_ours:
                await send(message)

        await app(scope, receive, returned)
        if not is_ours:  # it is Ray's, or there is none
            ends = Draining("The replicas are starting or shutting down; send the request later.")
            error = failure(ends if kind else gone("ingress"))
            await respond(error._replace(headers={REQUEST_ID: id_}))(scope, receive, send)
        elif kind.startswith(STREAM) and not is_whole:
            await send({"type": "http.response.body", "body": cut_off("ingress")})

    return passed


def respond(answer: Answer) -> Response:
    headers = {**answer.headers, "Content-Type": answer.content_type}
    return Response(answer.body, answer.status, headers)


async def body_of(http: Http, limit_s: float) -> bytes:
    """Return the whole body. Raises Refused for a large or a late one, InvalidRequest if it ends
    early.
    """
    raw = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for part in http.stream():
                raw += part
                if len(raw) > MAX_BODY_BYTES:
                    raise too_large()
    except TimeoutError:
        raise too_slow("--body-timeout-s", limit_s) from None
    except ClientDisconnect:
        raise InvalidRequest("The body could not be read to its end (ClientDisconnect).") from None
    return bytes(raw)


async def _from(first: bytes, events: AsyncIterator[Answer | bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in events:
        assert isinstance(each, bytes), "what goes wrong after the first event is an event"
        yield each
