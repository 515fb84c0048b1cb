"""A folder of static files, served on this machine: the playground's and the documentation's."""

from __future__ import annotations

import contextlib
import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves a folder, and prints nothing of requests or of browsers that leave."""

    def __init__(self, folder: Path, port: int):
        handler = functools.partial(Handler, directory=str(folder))
        super().__init__(("127.0.0.1", port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(folder: Path, port: int) -> None:
    """Serve a folder until Ctrl-C. Exits with a sentence if the port cannot be used."""
    try:
        server = Server(folder, port)
    except (OSError, OverflowError) as error:
        sys.exit(f"error: port {port} cannot be used ({error}); choose another one")
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://localhost:{port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()
