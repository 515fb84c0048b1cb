"""The HTTP server: a Flask app around an engine. `server.launch` starts it."""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Callable

from flask import Flask, Response, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from config.config import HANDOFF, LOADER, MAX_BODY_BYTES, Config
from scheduling.errors import InvalidRequest, ServingError
from server.api import about
from server.api.door import Door
from server.api.messages import REQUEST_ID, Answer, request_id
from server.api.reader import RequestReader
from server.api.refusals import failure, too_large
from server.api.routes import DESCRIPTION, Call, Route
from server.engine import SWITCH_S, Engine, LocalEngine, start
from server.http.completions import Completions
from server.serving import Load

log = logging.getLogger("effective_batching")


class App(Flask):
    """Flask without its URL map: the door finds the route of a request, here and for replicas.

    Flask's match would fail and keep the exception, whose frames refer to the request: a cycle for
    each request, with its body and socket, that stays until the garbage collector comes.
    """

    def create_url_adapter(self, request: object) -> None:
        """Return None: Flask then matches nothing."""


def create_app(config: Config, engine: Engine | None = None) -> Flask:
    """Return the app of an engine, by default a new one here; it is `app.extensions["engine"]`.

    Raises what Server does.
    """
    engine = engine or LocalEngine(config)
    app = App(__name__, static_folder=None)
    door = Door(config)
    app.extensions |= {"engine": engine, "door": door}
    # where Flask stops reading a body without a Content-Length
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES + 1
    reader = RequestReader(config, engine.tokenizer, engine.models)
    handlers: dict[Route, Callable[[Call], Answer | Response]] = {}
    handlers |= about.of_config(config, reader)
    pids = [os.getpid(), os.getppid()]
    handlers[DESCRIPTION] = lambda call: about.description(config, pids)
    handlers |= Completions(engine, reader).handlers()

    @app.before_request
    def handle() -> Response:
        """Answer a request."""
        g.request_id = request_id(request.headers.get(REQUEST_ID, ""))
        call = door.admit(request.method, request.path, request.headers, g.request_id)
        if isinstance(call, Answer):
            return _respond(call)
        is_post = call.route.method == "POST"
        call = call._replace(body=_body()) if is_post else call._replace(query=request.args)
        return _respond(handlers.get(call.route, engine.ask)(call))

    @app.after_request
    def name_request(response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        return response

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        """Answer a request that no engine has."""
        if isinstance(error, ServingError):
            engine.refused(error)
        else:
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


def serve() -> Flask:
    """Return the app of the Config that the launcher handed on. This is gunicorn's entry point."""
    config = Config.model_validate_json(os.environ[HANDOFF])
    load: Load = pkgutil.resolve_name(os.environ[LOADER])
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    # The engine's thread waits this long for another thread to release the GIL: the default, 5 ms,
    # is longer than a whole iteration. With 0.1 ms waiting threads wake each other up, and many
    # streams cost 1.7 times the CPU.
    sys.setswitchinterval(SWITCH_S)
    if config.http_processes > 1:
        from server.processes.twin import connected

        return create_app(config, connected(config))
    return create_app(config, start(config, load))
