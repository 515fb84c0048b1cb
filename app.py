"""The HTTP server. `create_app` parses, validates, tokenizes, enqueues, waits and answers; nothing
else.

    python app.py MODE [settings]    checks the settings, fetches what is missing, becomes gunicorn

The launcher resolves the Config once and hands it on; a bad setting ends with exit 2 before any
worker boots.
"""

from __future__ import annotations

import logging
import os
import resource
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from config import DOOMED_FILES, HANDOFF, MAX_BODY_BYTES, SPARE_FILES, Config, ConfigError, parse
from config.ports import check_port
from generate import OutOfMemory, load_generator
from kernels import KernelUnavailable
from observers.line_writer import open_log
from routes import completions, live, metrics
from routes.guard import guard, guard_hosts, wants_page
from routes.responses import respond, respond_json
from scheduling.errors import EngineFailed, InvalidRequest, ServingError
from serving import Load, Server
from tokenizer import TokenizerUnavailable, load_tokenizer
from weights import WeightsUnavailable, locate
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
    guard(app, config.users_of_keys, server.live is not None)
    guard_hosts(app, config.hosts)
    app.config["MAX_CONTENT_LENGTH"] = (
        MAX_BODY_BYTES + 1
    )  # where Flask stops reading a body without a Content-Length
    app.extensions["server"] = server
    manager, stats = server.manager, server.stats
    has_page = server.live is not None
    app.register_blueprint(completions.blueprint(server))
    app.register_blueprint(metrics.blueprint(server.metrics.registry))
    if server.live is not None:
        app.register_blueprint(live.blueprint(server, server.live))

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


def main(argv: Sequence[str], entry: str = "app:serve()") -> None:
    """`entry`: what gunicorn's worker calls."""
    try:
        config = parse(argv)
        load_tokenizer(config.tokenizer)
        locate(config)
        check_port(config)
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
    _clear_gunicorns_own()
    root = Path(__file__).resolve().parent
    os.environ[HANDOFF] = config.handoff()
    command = [sys.executable, "-m", "gunicorn", "--config", str(root / "gunicorn_conf.py"), entry]
    os.chdir(root)
    os.execv(sys.executable, command)


def _clear_gunicorns_own() -> None:
    """gunicorn_conf.py follows from the Config, and gunicorn lets its variables go before it: a
    second worker would be a second engine.
    """
    for name in sorted(os.environ):
        if name.startswith("GUNICORN_") or name in ("WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS"):
            print(
                f"warning: {name} is gunicorn's own and is ignored here; the settings are flags or "
                "EB_… (--help)",
                file=sys.stderr,
            )
            del os.environ[name]


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
