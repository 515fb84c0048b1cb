"""The HTTP server. `create_app` parses, validates, tokenizes, enqueues, waits and answers; nothing
else. `launch.py` starts it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from config import HANDOFF, MAX_BODY_BYTES, Config
from generate import OutOfMemory, load_generator
from kernels import KernelUnavailable
from routes import completions, live, metrics
from routes.guard import guard, guard_hosts, wants_page
from routes.responses import respond, respond_json
from scheduling.errors import EngineFailed, InvalidRequest, ServingError
from serving import Load, Server
from weights import WeightsUnavailable
from wire import own, refusals
from wire.messages import failure
from wire.openapi import document, offered

log = logging.getLogger("effective_batching")


def create_app(config: Config, server: Server | None = None) -> Flask:
    """Return the app of a server; without one it starts its own. `app.extensions["server"]` holds
    it.

    Raises what Server does.
    """
    server = server or Server(config)
    app = Flask(__name__, static_folder=None)
    has_page = config.live == "on"
    guard(app, config.users_of_keys, has_page)
    guard_hosts(app, config.hosts)
    app.config["MAX_CONTENT_LENGTH"] = (
        MAX_BODY_BYTES + 1
    )  # where Flask stops reading a body without a Content-Length
    app.extensions["server"] = server
    manager, stats = server.manager, server.stats
    app.register_blueprint(completions.blueprint(server))
    app.register_blueprint(metrics.blueprint(server.metrics.registry))
    if has_page:
        app.register_blueprint(live.blueprint(server))

    @app.get("/stats")
    def get_stats() -> Response:
        return respond_json(server.report(own.iterations_since(request.args)))

    @app.post("/stats/reset")
    def reset_stats() -> Response:
        stats.reset(manager.clock())
        return respond_json({"reset": True})

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        manager.forget_prefixes()
        return respond_json({})

    @app.get("/health")
    def health() -> Response:
        return respond_json({"status": "ok"})

    @app.get("/ready")
    def ready() -> Response:
        return respond(own.readiness(manager.not_ready_because()))

    @app.get("/openapi.json")
    def openapi() -> Response:
        return respond_json(document(bool(config.users_of_keys), has_page))

    @app.get("/")
    def about() -> Response:
        if has_page and wants_page():
            return Response(status=302, headers={"Location": "/live", "Vary": "Accept"})
        return respond_json(own.description(config, has_page, [os.getpid(), os.getppid()]))

    @app.errorhandler(ServingError)
    def serving_error(error: ServingError) -> Response:
        if isinstance(error, InvalidRequest):
            stats.invalid()
        # its frames hold the group, which holds the error: a cycle that all of a request is in
        error.__traceback__ = None
        return respond(failure(error))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        method, path = request.method, request.path
        if error.code == 404:
            refused = refusals.no_such_route(method, path, offered(has_page))
        elif isinstance(error, MethodNotAllowed):
            refused = refusals.no_such_method(method, path, error.valid_methods or ())
        elif error.code == 413:
            refused = refusals.too_large()
        else:
            code = error.name.lower().replace(" ", "_")
            refused = refusals.Refused(error.code or 500, code, error.description or error.name)
        return respond(failure(refused))

    @app.errorhandler(Exception)
    def defect(error: Exception) -> Response:
        log.error("unexpected error", exc_info=error)
        return respond(failure(error))

    return app


# ---- gunicorn


def serve(load: Load = load_generator) -> Flask:
    """gunicorn's entry point, in the worker: the app of the Config that the launcher handed on,
    with the engine of `load`.
    """
    config = Config.model_validate_json(os.environ[HANDOFF])
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    # A thread that runs Python makes the engine's wait for the GIL this long: 5 ms, the default, is
    # longer than a whole iteration. With 0.1 ms the threads that wait wake each other up: many
    # streams then cost 1.7 times the CPU.
    sys.setswitchinterval(1e-3)
    server = Server(config, load)

    def say_why(error: BaseException) -> None:
        known = isinstance(
            error, (WeightsUnavailable, KernelUnavailable, OutOfMemory, EngineFailed)
        )
        log.error(
            "the server ends: %s",
            server.manager.not_ready_because(),
            exc_info=None if known else error,
        )

    server.manager.on_failure(say_why)  # gunicorn_conf.py then ends it
    threading.Thread(target=_announce, args=[server], daemon=True).start()
    return create_app(config, server)


def _announce(server: Server) -> None:
    if server.manager.wait_until_loaded():
        config, blocks = server.config, server.manager.snapshot().n_blocks
        log.info(
            "ready: %s mode on http://%s:%d, %d KV blocks",
            config.mode,
            config.host,
            config.port,
            blocks,
        )
