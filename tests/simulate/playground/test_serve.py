"""The static files' server: ./playground.sh's and ./docs.sh's."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.request
from pathlib import Path

import pytest

from simulate.playground.serve import Server, serve

RESET = struct.pack("ii", 1, 0)  # linger on, for no time: close() is a reset


def test_it_says_nothing_of_requests_and_of_browsers_that_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """./docs.sh printed each GET, and a traceback whenever a browser left."""
    (tmp_path / "large").write_bytes(bytes(20_000_000))
    ended = threading.Semaphore(0)

    class Watched(Server):
        def finish_request(self, *of: object) -> None:
            try:
                super().finish_request(*of)  # type: ignore[arg-type]
            except ConnectionError:
                ended.release()
                raise

    with Watched(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with socket.create_connection(("127.0.0.1", server.server_port)) as browser:
            browser.sendall(b"GET /large HTTP/1.0\r\n\r\n")
            assert browser.recv(5) == b"HTTP/"
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        assert ended.acquire(timeout=30)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
            assert b"large" in answer.read()
        server.shutdown()
        thread.join()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("port", [None, 99_999])
def test_a_port_that_cannot_be_used_is_a_sentence(port: int | None, tmp_path: Path) -> None:
    with Server(tmp_path, 0) as taken:
        port = port or taken.server_port
        with pytest.raises(SystemExit, match=rf"^error: port {port} cannot be used \("):
            serve(tmp_path, port)
