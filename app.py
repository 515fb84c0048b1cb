"""The HTTP server. `create_app` parses, validates, tokenizes, enqueues, waits and answers; nothing
else.

    python app.py MODE [settings]    checks the settings, fetches what is missing, becomes gunicorn

The launcher resolves the Config once and hands it on; a bad setting ends with exit 2 before any
worker boots.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from config import DOOMED_FILES, HANDOFF, MAX_BODY_BYTES, SPARE_FILES, Config, ConfigError, parse
from generate import OutOfMemory, load_generator
from kernels import KernelUnavailable
from observers.line_writer import open_log
from routes import inference, live, metrics, openai, openapi
from routes.completions import Completions
from routes.guard import guard, wants_page
from routes.openapi import offered
from scheduling.errors import (
    EngineFailed,
    GenerationFailed,
    InvalidRequest,
    ServingError,
)
from serving import Load, Server
from stats import DEFINITIONS
from tokenizer import TokenizerUnavailable, load_tokenizer
from weights import WeightsUnavailable, locate

log = logging.getLogger("effective_batching")


def create_app(config: Config, server: Server | None = None) -> Flask:
    """Return the app of a server; without one it starts its own. `app.extensions["server"]` holds
    it.

    Raises what Server does.
    """
    server = server or Server(config)
    app = Flask(__name__, static_folder=None)
    guard(app, config.api_key, server.live is not None)
    app.json.sort_keys = False  # type: ignore[attr-defined]  # an answer reads in the order in which it is written
    app.config["MAX_CONTENT_LENGTH"] = (
        MAX_BODY_BYTES + 1
    )  # where Flask stops reading a body without a Content-Length
    app.extensions["server"] = server
    manager, stats = server.manager, server.stats
    completions = Completions(server)
    app.register_blueprint(inference.blueprint(completions))
    app.register_blueprint(openai.blueprint(completions))
    app.register_blueprint(metrics.blueprint(server.metrics.registry))
    routes = offered(server.live is not None)
    app.register_blueprint(openapi.blueprint(config.api_key is not None, server.live is not None))
    if server.live is not None:
        app.register_blueprint(live.blueprint(server, server.live))

    @app.get("/stats")
    def get_stats() -> Response:
        result = {
            "mode": config.mode,
            "model": config.model,
            "kv_blocks": manager.snapshot().n_blocks,
        } | stats.snapshot()
        iterations, since = request.args.get("iterations"), request.args.get("since")
        if iterations not in (None, "1"):
            raise InvalidRequest("iterations: only 1 is offered; leave it out", param="iterations")
        if since is not None and not (iterations and re.fullmatch("[0-9]{1,18}", since)):
            raise InvalidRequest(
                "since: give the number of an iteration, and iterations=1 with it", param="since"
            )
        if iterations:
            result |= stats.iterations(int(since or 0))
        return jsonify(result)

    @app.post("/stats/reset")
    def reset_stats() -> Response:
        stats.reset(manager.clock())
        return jsonify(reset=True)

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        manager.forget_prefixes()
        return jsonify({})

    @app.get("/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get("/ready")
    def ready() -> tuple[Response, int]:
        reason = manager.not_ready_because()
        return (
            (jsonify(status="ready"), 200)
            if reason is None
            else (jsonify(status="not ready", reason=reason), 503)
        )

    @app.get("/")
    def about() -> Response:
        if server.live is not None and wants_page():
            return Response(status=302, headers={"Location": "/live", "Vary": "Accept"})
        return jsonify(
            name="effective-batching",
            mode=config.mode,
            model=config.model,
            config=config.model_dump(),
            routes={name: route.summary for name, route in routes.items()},
            definitions=DEFINITIONS,
            pids=[
                os.getpid(),
                os.getppid(),
            ],  # a client that started a server can tell that it talks to it
        )

    @app.errorhandler(ServingError)
    def serving_error(error: ServingError) -> tuple[Response, int, Mapping[str, str]]:
        if isinstance(error, InvalidRequest):
            stats.invalid()
        return jsonify(error.body()), error.status, error.headers

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> tuple[Response, int, dict[str, str]]:
        code = (error.name or "error").lower().replace(" ", "_")
        message = error.description or error.name
        if error.code == 404:
            message = (
                f"There is no {request.method} {request.path} here; routes: {', '.join(routes)}."
            )
        if isinstance(error, MethodNotAllowed):
            methods = ", ".join(sorted({*(error.valid_methods or ())} - {"HEAD", "OPTIONS"}))
            message = f"{request.path} takes no {request.method}; use {methods}."
        if error.code == 413:
            message = f"The body is larger than {MAX_BODY_BYTES:,} bytes."
        headers = {
            name: value for name, value in error.get_headers() if name != "Content-Type"
        }  # Allow
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return jsonify(error=body), error.code or 500, headers

    @app.errorhandler(Exception)
    def defect(error: Exception) -> tuple[Response, int, Mapping[str, str]]:
        log.error("unexpected error", exc_info=error)
        return serving_error(GenerationFailed(f"Unexpected error: {type(error).__name__}"))

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


def main(argv: Sequence[str], entry: str = "app:serve()") -> None:
    """`entry`: what gunicorn's worker calls."""
    try:
        config = parse(argv)
        load_tokenizer(config.tokenizer)
        locate(config)
        _check_port(config)
        _check_files(config)
    except (ConfigError, TokenizerUnavailable, WeightsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    blocks = (
        f"{config.n_blocks} KV blocks"
        if config.pool_is_known
        else "what memory is left in KV blocks"
    )
    kv = (
        f"{blocks} of {config.block_size} tokens" if config.generator == "cached" else "no KV cache"
    )
    print(
        f"serving {config.model} ({config.shape.parameters / 1e6:.1f}M parameters, {config.dtype}, "
        f"{config.device}, "
        f"{config.threads} threads, attention {config.attention}, linear {config.linear}, sampler "
        f"{config.sampler}) in mode {config.mode}: "
        f"at most {config.max_batch_size} rows, {kv}",
        file=sys.stderr,
    )
    if config.host == "127.0.0.1":
        print(
            "listening to this machine alone; --host 0.0.0.0 listens to others too", file=sys.stderr
        )
    _allow_files(config)
    root = Path(__file__).resolve().parent
    os.environ[HANDOFF] = config.handoff()
    command = [sys.executable, "-m", "gunicorn", "--config", str(root / "gunicorn_conf.py"), entry]
    os.chdir(root)
    os.execv(sys.executable, command)


def _allow_files(config: Config) -> None:
    """Every connection is an open file; many systems allow 1,024 unless asked, and some no more
    even then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.http_connections + SPARE_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if allowed < wanted:
        print(
            f"warning: this system allows {hard:,} open files, so "
            f"{config.connections_within(hard):,} connections are open at "
            f"once at most instead of {config.http_connections:,}; raise `ulimit -n` to {wanted:,}",
            file=sys.stderr,
        )
    more = wanted + DOOMED_FILES
    allowed = more if hard == resource.RLIM_INFINITY else min(hard, more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _check_port(config: Config) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another "
                f"--port or --host"
            ) from None


def _check_files(config: Config) -> None:
    """Raises ConfigError if what the server appends to cannot be written."""
    for path, what, setting in (
        (config.request_log, "request log", "--request-log"),
        (config.record, "recording", "--record"),
    ):
        if path is None:
            continue
        try:
            file = open_log(path)
        except OSError as error:
            raise ConfigError(
                f"the {what} {path} cannot be written ({error.strerror}); choose another {setting}"
            ) from None
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            # gunicorn's master holds it: a close would be the end to the pipe's reader
            os.set_inheritable(file, True)
        else:
            os.close(file)


if __name__ == "__main__":
    main(sys.argv[1:])
