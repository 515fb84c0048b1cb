"""The load's connections: when an answer is over, when they are kept, and when one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import calls, load
from client.load import replay
from client.wire import wire
from client.workloads import Workload
from tests.programs import output
from tests.servers import assert_all_answered
from tests.stub import Handler, Stub, stub

STUB = wire("openai", "stub")
REQUESTS = Workload("fixed:4").requests(6, "closed:1")


class Counted(Handler):
    """Counts connections, and requests of each of them."""

    server: CountingStub

    def setup(self) -> None:
        super().setup()
        self.posts = 0
        self.server.connections += 1

    def do_POST(self) -> None:
        self.posts += 1
        self.server.posts += 1
        super().do_POST()


class CountingStub(Stub):
    connections = posts = 0


@contextlib.contextmanager
def serving(kind: type[Counted]) -> Iterator[CountingStub]:
    with stub(CountingStub) as server:
        assert isinstance(server, CountingStub)
        server.RequestHandlerClass = kind
        yield server


class HeldOpen(Counted):
    """Ends no answer after [DONE]; the client may."""

    def _write(self, data: bytes) -> None:
        if data:
            super()._write(data)
        else:
            self.rfile.read(1)


def test_a_load_goes_on_at_done_and_does_not_wait_for_the_end_of_an_answer() -> None:
    """A server was silent after [DONE] for an hour, as were its answers to a closed loop."""
    with serving(HeldOpen) as server:
        assert_all_answered(replay(server.url, REQUESTS, STUB, timeout_s=20))
        assert server.connections == len(REQUESTS), "a connection that is held is dropped"
        calls.stream(server.url, {"model": "stub", "max_tokens": 2}, 20, lambda _: None)


class Unframed(Counted):
    """Ends a stream by closing the connection alone, if the client does not."""

    def send_header(self, name: str, value: str) -> None:
        if name != "Transfer-Encoding":
            super().send_header(name, value)

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        if not data:
            self.rfile.read(1)
            self.close_connection = True


def test_one_prompt_ends_at_done_however_its_stream_is_framed() -> None:
    """The library waits for 512 bytes where an answer has no chunks."""
    with serving(Unframed) as server:
        calls.stream(server.url, {"model": "stub", "max_tokens": 2}, 20, lambda _: None)
        assert_all_answered(replay(server.url, REQUESTS, STUB, timeout_s=20))


def test_a_connection_is_kept_where_an_answer_ends_soon_after_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "LINGER_S", 60.0)
    with serving(Counted) as server:
        assert_all_answered(replay(server.url, REQUESTS, STUB))
        assert (server.connections, server.posts) == (1, len(REQUESTS))


class Racy(Counted):
    """Closes each connection when its second request comes, without an answer."""

    begun = b""

    def do_POST(self) -> None:
        super().do_POST() if not self.posts else self._close()

    def _close(self) -> None:
        self.server.posts += 1
        self.wfile.write(self.begun)
        self.close_connection = True


@pytest.mark.usefixtures("undrawn")
def test_a_request_that_a_kept_connection_lost_is_sent_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of three requests one failed where a server closes kept connections without saying so."""
    monkeypatch.setattr(load, "LINGER_S", 60.0)
    with serving(Racy) as server:
        outcomes = replay(server.url, REQUESTS, STUB)
        assert_all_answered(outcomes)
        assert [outcome.resent for outcome in outcomes] == [False, True] * 3
        assert len(server.bodies) == len(REQUESTS) and server.posts == len(REQUESTS) + 3
        files = f"--out {tmp_path} --figure {tmp_path}/f.png"
        load_of = f"--api openai --numsamples 6 --arrival closed:1 --quiet {files}"
        shown = output("client.client", f"--url {server.url} {load_of}")
    sentence = "3 requests were sent again on a fresh connection (3 of stub)"
    assert "6 answered, 0 failed" in shown and sentence in " ".join(shown.split())
    assert sentence in (tmp_path / "report.md").read_text()


class Begun(Racy):
    """Closes it in the middle of an answer's head."""

    begun = b"HTTP/1.1 200 OK\r\nContent-"


class Fresh(Racy):
    """Closes each connection when its first request comes."""

    def do_POST(self) -> None:
        self._close()


@pytest.mark.parametrize(("kind", "failed"), [(Begun, 3), (Fresh, 6)])
def test_nothing_is_sent_again_after_a_part_of_an_answer_or_on_a_fresh_connection(
    kind: type[Counted], failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "LINGER_S", 60.0)
    with serving(kind) as server:
        outcomes = replay(server.url, REQUESTS, STUB)
        assert server.posts == len(REQUESTS)
    assert sum(bool(outcome.error) for outcome in outcomes) == failed
    assert not any(outcome.resent for outcome in outcomes)
