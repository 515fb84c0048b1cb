"""The front end of several replicas: reads and tokenizes each request once, hands it to a replica,
and puts together what all of them tell. Knows HTTP, and of the replicas what `Replicas` says.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from config import MAX_BODY_BYTES, Config
from deploy.replica import Query, Told
from live import panel
from observers.run import Run, added
from scheduling.errors import InvalidRequest, ServingError
from tokenizer import load_tokenizer
from wire import own, refusals
from wire.messages import REQUEST_ID, STREAM, STREAM_HEADERS, Answer, answer, failure, request_id
from wire.openapi import OPEN, document, offered
from wire.request import Request, RequestReader

OF_ONE = ("GET /stats", "GET /metrics", "GET /live/events", "POST /live/load", "GET /timeline")
PREFIX = re.compile("/replicas/([^/]+)(/.*)")


class Replicas(Protocol):
    """What an ingress knows of those behind it. to: the name of the one that is meant."""

    async def answer(self, request: Request, to: str | None) -> Answer: ...

    def stream(self, request: Request, to: str | None) -> AsyncIterator[Answer | bytes]: ...

    async def own(self, route: str, query: Query, raw: bytes, to: str | None) -> Answer: ...

    async def told(self) -> Sequence[Told]: ...

    async def metrics(self) -> Sequence[bytes]: ...

    async def reset(self) -> None: ...

    async def forget_prefixes(self) -> None: ...

    async def wanted(self) -> int:
        """How many there should be."""
        ...

    def report_ages(self) -> Sequence[float]:
        """Seconds, of the reports by which replicas were chosen last; empty if by none."""
        ...


def create_app(config: Config, replicas: Replicas, pids: Sequence[int] = ()) -> FastAPI:
    """The app; a path under /replicas/NAME/ is of that replica alone. pids: of processes beside its
    own, by which a client that started them can tell that it talks to them.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    has_page = config.live == "on"
    reader = RequestReader(config, load_tokenizer(config.tokenizer))
    started = int(time.time())
    mine = Run()  # what the ingress refuses itself

    async def ask(request: Request, to: str | None) -> Response:
        if not request.stream:
            return respond(await replicas.answer(request, to))
        events = replicas.stream(request, to)
        first = await anext(events)
        if isinstance(first, Answer):
            return respond(first)
        return StreamingResponse(_from(first, events), media_type=STREAM, headers=STREAM_HEADERS)

    for path, read in (
        ("/inference", reader.inference),
        ("/v1/completions", reader.completion),
        ("/v1/chat/completions", reader.chat),
    ):

        async def complete(http: Http, read: Callable[[bytes], Request] = read) -> Response:
            request = read(await body_of(http)).named(http.scope["of_user"], http.scope["id"])
            return await ask(request, http.scope.get("replica"))

        app.add_route(path, complete, methods=["POST"])

    @app.post("/tokenize")
    async def tokenize(http: Http) -> Response:
        return respond(answer(reader.tokenize(await body_of(http))))

    @app.get("/v1/models")
    async def models() -> Response:
        return respond(answer(own.models(config, started)))

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        reader.check_model(name)
        return respond(answer(own.model(config, started)))

    @app.get("/stats")
    async def stats(http: Http) -> Response:
        if to := http.scope.get("replica"):
            return respond(await replicas.own("GET /stats", query_of(http), b"", to))
        if http.query_params:
            raise InvalidRequest(
                "iterations are a replica's: ask GET /replicas/NAME/stats; GET /stats names all",
                param="iterations",
            )
        told = merged(config, await replicas.told(), mine) | aged(replicas.report_ages())
        return respond(answer(told))

    @app.post("/stats/reset")
    async def reset() -> Response:
        mine.counts.clear()
        await replicas.reset()
        return respond(answer({"reset": True}))

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await replicas.forget_prefixes()
        return respond(answer({}))

    @app.get("/metrics")
    async def metrics(http: Http) -> Response:
        if to := http.scope.get("replica"):
            return respond(await replicas.own("GET /metrics", {}, b"", to))
        text = one_exposition(await replicas.metrics())
        return respond(Answer(text, content_type=CONTENT_TYPE_PLAIN_0_0_4))

    @app.get("/health")
    async def health() -> Response:
        return respond(answer({"status": "ok"}))

    @app.get("/ready")
    async def ready() -> Response:
        return respond(own.readiness(unready(await replicas.told(), await replicas.wanted())))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return respond(answer(document(bool(config.users_of_keys), has_page)))

    @app.get("/")
    async def about(http: Http) -> Response:
        if has_page and refusals.wants_page(http.headers.get("accept", "")):
            where = f"{http.scope.get('prefix', '')}/live"
            return Response(status_code=302, headers={"Location": where, "Vary": "Accept"})
        if to := http.scope.get("replica"):
            return respond(await replicas.own("GET /", {}, b"", to))
        return respond(answer(own.description(config, has_page, [*pids, os.getpid()])))

    if has_page:

        @app.get("/live")
        async def live(http: Http) -> Response:
            if http.scope.get("replica"):
                return respond(panel.view())
            names = sorted(each.name for each in await replicas.told())
            if not names:
                return respond(own.readiness(unready((), await replicas.wanted())))
            return Response(status_code=302, headers={"Location": f"/replicas/{names[0]}/live"})

        for route in OF_ONE[2:]:
            method, path = route.split()

            async def of_one(http: Http, route: str = route) -> Response:
                if not (to := http.scope.get("replica")):
                    raise InvalidRequest(
                        f"{route} is a replica's: ask /replicas/NAME{route.split()[1]}; GET /stats "
                        "names all"
                    )
                raw = await body_of(http) if route.startswith("POST") else b""
                return respond(await replicas.own(route, query_of(http), raw, to))

            app.add_route(path, of_one, methods=[method])

    @app.exception_handler(ServingError)
    async def serving_error(http: Http, error: ServingError) -> Response:
        if isinstance(error, InvalidRequest):
            mine.counts["invalid"] += 1
        return respond(failure(error))

    @app.exception_handler(HTTPException)
    async def http_error(http: Http, error: HTTPException) -> Response:
        method, path = http.method, http.url.path
        if error.status_code == 405:
            taken = (error.headers or {}).get("Allow", "").split(", ")
            allowed = [*taken, "OPTIONS", *(["HEAD"] if "GET" in taken else [])]
            if method == "OPTIONS":
                return Response(headers={"Allow": ", ".join(sorted(allowed))})
            return respond(failure(refusals.no_such_method(method, path, allowed)))
        return respond(failure(refusals.no_such_route(method, path, offered(has_page))))

    @app.exception_handler(Exception)
    async def defect(http: Http, error: Exception) -> Response:
        return respond(failure(error))  # and Ray's log has it

    app.add_middleware(Guard, keys=config.users_of_keys, hosts=config.hosts)
    return app


class Guard:
    """Asked before any route: a key, if there are any, that a POST is JSON, and which replica is
    meant. The answer has the request's id in a header.
    """

    def __init__(
        self, app: Any, keys: Mapping[str, str | None], hosts: Collection[str] | None = None
    ):
        self._app, self._keys, self._hosts = app, keys, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # of which the HTTP server leaves the body out
            scope = {**scope, "method": "GET"}
        if found := PREFIX.fullmatch(scope["path"]):
            prefix = f"/replicas/{found[1]}"
            scope = {**scope, "path": found[2], "replica": found[1], "prefix": prefix}
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        given = headers.get(REQUEST_ID.lower(), "")
        id_ = request_id(given)

        async def named(message: Any) -> None:
            # Ray's proxy, which makes an id where there is none, echoes the one that was given
            if message["type"] == "http.response.start" and id_ != given:
                MutableHeaders(scope=message)[REQUEST_ID] = id_
            await send(message)

        try:
            scope = {**scope, "id": id_, "of_user": self._check(scope, headers)}
        except ServingError as error:
            await respond(failure(error))(scope, receive, named)
            return
        await self._app(scope, receive, named)

    def _check(self, scope: Any, headers: Mapping[str, str]) -> str | None:
        """Whom its key names."""
        is_open = f"{scope['method']} {scope['path']}" in OPEN
        looks = scope["path"] == "/" and refusals.wants_page(headers.get("accept", ""))
        user = None
        if not (is_open or looks):
            user = refusals.user_of(self._keys, headers.get("authorization", ""))
        if self._hosts is not None and scope["path"] not in ("/health", "/ready"):
            refusals.check_host(headers.get("host", ""), self._hosts)
        if scope["method"] == "POST":
            refusals.check_post(headers.get("content-type", ""))
        return user


def respond(told: Answer) -> Response:
    headers = {**told.headers, "Content-Type": told.content_type}
    return Response(told.body, told.status, headers)


def query_of(http: Http) -> Query:
    return dict(http.query_params)


async def body_of(http: Http) -> bytes:
    """Raises Refused as soon as it is too large, and InvalidRequest if it breaks off."""
    raw = bytearray()
    try:
        async for part in http.stream():
            raw += part
            if len(raw) > MAX_BODY_BYTES:
                raise refusals.too_large()
    except ClientDisconnect:
        raise InvalidRequest("The body could not be read to its end (ClientDisconnect).") from None
    return bytes(raw)


def unready(told: Sequence[Told], wanted: int) -> str | None:
    """Why not all replicas can be sent requests."""
    for each in told:
        if each.not_ready is not None:
            return f"replica {each.name}: {each.not_ready}"
    if len(told) < wanted:
        return f"{len(told)} of {wanted} replicas are up"
    return None


def merged(config: Config, told: Sequence[Told], mine: Run) -> dict[str, Any]:
    """GET /stats: of all replicas together, and of each."""

    def report(blocks: int, run: Run) -> dict[str, Any]:
        head = {"mode": config.mode, "model": config.model, "kv_blocks": blocks}
        return head | run.told()

    run = added([mine, *(each.run for each in told)])
    each = {one.name: report(one.kv_blocks, one.run) for one in told}
    for one in each.values():
        del one["definitions"]  # once is enough
    return report(sum(one.kv_blocks for one in told), run) | {"replicas": each}


def aged(seconds: Sequence[float]) -> dict[str, Any]:
    """Of GET /stats: how old the reports were that chose a replica, if any did."""
    if not seconds:
        return {}
    p50, p99, most = (1e3 * np.percentile(seconds, (50, 99, 100))).tolist()
    return {"report_age_ms": {"p50": p50, "p99": p99, "max": most}}


def one_exposition(texts: Iterable[bytes]) -> bytes:
    """Prometheus' text of several, each of which has a label of its own."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family

    class All:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)


async def _from(first: bytes, events: AsyncIterator[Answer | bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in events:
        assert isinstance(each, bytes), "what goes wrong after the first event is an event"
        yield each
