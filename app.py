"""The HTTP server: a Flask app around a `Server`. `server.launch` starts it."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from flask import Flask, Response, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from config.config import BOOT_ERROR, HANDOFF, MAX_BODY_BYTES, Config
from generate.kernels import KernelUnavailable
from generate.loading import load_generator
from generate.memory import OutOfMemory
from generate.weights import WeightsUnavailable
from scheduling.errors import EngineFailed, InvalidRequest, ServingError
from server.api import about
from server.api.door import Door
from server.api.lora import AdapterRoutes
from server.api.messages import REQUEST_ID, Answer, request_id
from server.api.reader import RequestReader
from server.api.refusals import failure, too_large
from server.api.routes import Call, Route
from server.http.completions import Completions
from server.live.panel import PageRoutes
from server.serving import Load, Server

PROBED_S = 10.0  # for which /ready says why before the process ends
log = logging.getLogger("effective_batching")


class App(Flask):
    """Flask without its URL map: the door finds the route of a request, here and for replicas.

    Flask's match would fail and keep the exception, whose frames refer to the request: a cycle for
    each request, with its body and socket, that stays until the garbage collector comes.
    """

    def create_url_adapter(self, request: object) -> None:
        """Return None: Flask then matches nothing."""


def create_app(config: Config, server: Server | None = None) -> Flask:
    """Return the app of a server, by default a new one; it is `app.extensions["server"]`.

    Raises what Server does.
    """
    server = server or Server(config)
    app = App(__name__, static_folder=None)
    door = Door(config)
    app.extensions |= {"server": server, "door": door}
    # where Flask stops reading a body without a Content-Length
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES + 1
    reader = RequestReader(config, server.tokenizer, server.models)
    handlers: dict[Route, Callable[[Call], Answer | Response]] = {}
    handlers |= about.of_config(config, reader)
    handlers |= about.of_server(server, [os.getpid(), os.getppid()])
    handlers |= AdapterRoutes(server).handlers()
    handlers |= Completions(server, reader).handlers()
    if config.live != "off":
        handlers |= PageRoutes(server).handlers()

    @app.before_request
    def handle() -> Response:
        """Answer a request."""
        g.request_id = request_id(request.headers.get(REQUEST_ID, ""))
        call = door.admit(request.method, request.path, request.headers, g.request_id)
        if isinstance(call, Answer):
            return _respond(call)
        is_post = call.route.method == "POST"
        call = call._replace(body=_body()) if is_post else call._replace(query=request.args)
        return _respond(handlers[call.route](call))

    @app.after_request
    def name_request(response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        return response

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        if isinstance(error, InvalidRequest):
            server.stats.invalid()
        elif not isinstance(error, ServingError):
            log.error("unexpected error", exc_info=error)
        # its frames refer to the group, and that to the error: a cycle that nothing would free soon
        error.__traceback__ = None
        return _respond(failure(error))

    return app


def _body() -> bytes:
    """Return the current request's body, which is not kept. Raises ServingError if it cannot be
    read.
    """
    try:
        raw = request.get_data(cache=False)
        request.environ["wsgi.input"].close()
        return raw
    except RequestEntityTooLarge:
        raise too_large() from None
    except Exception as error:  # the HTTP server's: cut short, too slow, or wrongly chunked
        raise InvalidRequest(
            f"The body could not be read to its end ({type(error).__name__})."
        ) from None


def _respond(answer: Answer | Response) -> Response:
    if isinstance(answer, Response):  # a stream
        return answer
    return Response(answer.body, answer.status, answer.headers, content_type=answer.content_type)


# ---- gunicorn


def serve(load: Load = load_generator) -> Flask:
    """Return the app of the Config that the launcher handed on, with the engine of `load`. This is
    gunicorn's entry point, in the worker.
    """
    config = Config.model_validate_json(os.environ[HANDOFF])
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    # The engine's thread waits this long for another thread to release the GIL: the default, 5 ms,
    # is longer than a whole iteration. With 0.1 ms waiting threads wake each other up, and many
    # streams cost 1.7 times the CPU.
    sys.setswitchinterval(1e-3)
    server = Server(config, load)

    def say_why(error: BaseException) -> None:
        known = WeightsUnavailable, KernelUnavailable, OutOfMemory, EngineFailed
        trace = None if isinstance(error, known) else error
        log.error("the server ends: %s", server.manager.not_ready_because(), exc_info=trace)

    server.manager.on_failure(say_why)  # server/gunicorn_conf.py then ends it
    for task in (_once_loaded, end_hanging):
        threading.Thread(target=task, args=[server], daemon=True).start()
    return create_app(config, server)


def end_hanging(server: Server) -> None:
    """End the process once a plan hangs: it keeps the lock, without which nothing can be answered,
    so clients see their connections end.
    """
    while (why := server.manager.deciding.hangs_because()) is None:
        time.sleep(1.0)
    time.sleep(PROBED_S)
    log.error("the server ends: %s", why)
    server.close_files()
    os._exit(BOOT_ERROR)


def _once_loaded(server: Server) -> None:
    """Say that the server is ready, and spare it the long pauses of the garbage collector."""
    if server.manager.wait_until_loaded():
        # A full collection halts all threads, the engine's too: for 0.1 to 0.2 s, once in some 800
        # requests. So what is loaded is left out of it, and it comes a tenth as often: a request
        # that is over leaves no cycle.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        config, blocks = server.config, server.manager.snapshot().n_blocks
        where = config.mode, config.address, blocks
        log.info("ready: %s mode on http://%s, %d KV blocks", *where)
