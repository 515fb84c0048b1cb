"""A server of OpenAI's streamed /v1/completions and /v1/chat/completions, at known instants, for
the client's tests.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Stub(ThreadingHTTPServer):
    """Answers every request with its max_tokens, two a chunk, `gap_s` apart after `first_s`. ids:
    whether it takes token ids; else it refuses them as TGI does. secret: its X-Api-Key, which it
    repeats if it is another. certificate: of https, a file with its key.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        first_s: float = 0,
        gap_s: float = 0,
        usage: bool = True,
        models: Any = ("stub",),
        ids: bool = True,
        secret: str | None = None,
        certificate: Path | None = None,
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.first_s, self.gap_s, self.usage, self.models = first_s, gap_s, usage, models
        self.ids, self.secret, self.scheme = ids, secret, "https" if certificate else "http"
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if (key := self.headers.get("X-Api-Key")) == self.server.secret:
            return True
        self._whole(401, {"error": {"message": f"{key} is wrong"}})
        self.close_connection = True
        return False

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._whole(200, {"data": [{"id": model} for model in self.server.models]})
        else:
            self._whole(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.bodies.append(body)
            stub.in_flight += 1
            stub.most_in_flight = max(stub.most_in_flight, stub.in_flight)
        try:
            if body["model"] not in stub.models:
                # as vLLM once said it
                self._whole(404, {"object": "error", "message": "no such model", "code": 404})
            elif isinstance(body.get("prompt"), list) and not stub.ids:
                self._whole(422, {"error": "invalid type: integer, expected a string"})
            else:
                self._stream(stub, body["max_tokens"])
        except ConnectionError:  # the client gave up
            self.close_connection = True
        finally:
            with stub.lock:
                stub.in_flight -= 1

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, stub: Stub, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = self.path == "/v1/chat/completions"
        time.sleep(stub.first_s)
        for i in range(0, tokens, 2):
            if i:
                time.sleep(stub.gap_s)
            text = "ab"[: tokens - i]
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            self._event({"choices": [said | {"index": 0, "finish_reason": None}]})
        said = {"delta": {}} if chat else {"text": ""}
        self._event({"choices": [said | {"index": 0, "finish_reason": "length"}]})
        if stub.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(event)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@contextlib.contextmanager
def stub(kind: type[Stub] = Stub, **how: Any) -> Iterator[Stub]:
    server = kind(**how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
