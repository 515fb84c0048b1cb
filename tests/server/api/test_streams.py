"""Streams of /inference, in process: token by token, with an end whatever happens."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from batching import BatchingManager
from generate.fake import FakeGenerator
from generate.tokenizer import Detokenizer, load_tokenizer
from scheduling.inference import Inference, Iteration, State, TokenEvent
from scheduling.policies import Dynamic
from scheduling.sampling import Score
from server.api.rendering import InferenceRenderer, Part
from server.http.completions import Stream, Watcher
from server.request import Request
from tests.server.observers.test_metrics import metrics
from tests.servers import PATIENCE_S, ClientOf, Spelling, events, wait_until
from tests.virtual import make_scheduler

ASK = {"prompt": "hi", "num_tokens": 8, "seed": 3}


@pytest.fixture
def gated(client_of: ClientOf) -> tuple[FlaskClient, Spelling]:
    gate = Spelling(gated=True)
    return client_of(engine=lambda: gate, max_batch_size=2), gate


def test_tokens_whose_bytes_are_no_whole_character_yet_are_counted_with_it() -> None:
    inference = Inference([1], 5, tokens=list("a€b".encode()))
    part = Part(0, Detokenizer(load_tokenizer("bytes")), [], 9)
    pieces = [part.read(TokenEvent(inference, n, n == 5)) for n in range(1, 6)]
    assert pieces == [("a", 1), ("", 0), ("", 0), ("€", 3), ("b", 1)]


def test_tokens_that_pile_up_come_as_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    inference = Inference([1], 6, tokens=list(b"abcdef"))
    monkeypatch.setattr(InferenceRenderer, "_end", lambda renderer: "end")
    tokenizer = load_tokenizer("bytes")
    stream = Stream(
        InferenceRenderer(Request([[1]], 6), [inference], tokenizer, "model", 0.0), None
    )
    body = stream.body(lambda turn: wait_until(turn.is_set))

    def tell(n: int) -> None:
        stream.advance({id(inference): TokenEvent(inference, n, n == 6)})

    tell(1)
    assert next(body) == b'data: {"index":0,"text":"a","tokens":1}\n\n'
    for n in (2, 3, 4):
        tell(n)
    assert next(body) == b'data: {"index":0,"text":"bcd","tokens":3}\n\n'
    tell(5)
    tell(6)
    last = b'data: {"index":0,"text":"ef","tokens":2}\n\ndata: "end"\n\ndata: [DONE]\n\n'
    assert list(body) == [last], "nothing comes after the last token's"


CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "n": 2}
SEVERAL: list[dict[str, Any]] = [{}, {"n": 2}, {"prompt": ["a", "b", "c"]}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    *(("/inference", ASK | more | {"echo": True}) for more in SEVERAL),
    *(
        ("/v1/completions", {"prompt": "hi", "max_tokens": most, "logprobs": top, "echo": True} | n)
        for most, top in ((0, 1), (4, None), (4, 0), (4, 2))
        for n in SEVERAL[:2]
    ),
]
EARLY: dict[str, tuple[int, Callable[[BatchingManager], Any]]] = {
    "deadline": (504, lambda manager: None),
    "engine": (500, lambda manager: 1 / 0),
    "cancelled": (499, lambda manager: manager.cancel(manager.inspect(lambda s: s.in_flight()))),
    "stopped": (503, lambda manager: threading.Thread(target=manager.close).start()),
}


@pytest.mark.parametrize("failure", EARLY)
def test_a_stream_without_a_token_has_its_errors_status(failure: str, client_of: ClientOf) -> None:
    """With echo the prompt was sent as the text of no token: a deadline was a 200, and with
    logprobs, which were not computed yet, an IndexError.
    """
    status, fail = EARLY[failure]

    class Failing(Spelling):
        def generate(self, iteration: Iteration) -> list[int]:
            fail(manager)
            wait_until(lambda: all(row.inference.is_over for row in iteration.rows))
            return super().generate(iteration)

    for path, body in STREAMS:
        client = client_of(model="demo", engine=Failing, max_batch_size=2)
        manager = client.application.extensions["engine"].manager
        body = body | {"stream": True} | ({"timeout_s": 0.01} if failure == "deadline" else {})
        response = client.post(path, json=body)
        assert response.status_code == status, (path, body)
        assert response.get_json()["error"]["code"]


def test_a_completion_that_fails_before_its_first_token_is_no_piece(client_of: ClientOf) -> None:
    """The second of two waits for the row of the first, and has no log-probabilities yet."""

    class Second(Spelling):
        def generate(self, iteration: Iteration) -> list[int]:
            for row in iteration.rows:
                assert row.inference.scores
                row.inference.scores.of += [Score(-1.0, [])] * row.n_tokens
            self.fails = any(row.inference.prompt_ids == [98] * 2 for row in iteration.rows)
            return super().generate(iteration)

    client = client_of(model="demo", engine=Second, max_batch_size=1)
    body = {"prompt": ["aa", "bb"], "max_tokens": 2, "echo": True, "logprobs": 0, "stream": True}
    *pieces, error = events(client.post("/v1/completions", json=body).data)
    assert {piece["choices"][0]["index"] for piece in pieces} == {0}
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "aaab"
    assert error["error"]["code"] == "generation_failed"


def test_any_deadline_is_kept(client_of: ClientOf, gated: tuple[FlaskClient, Spelling]) -> None:
    """While an iteration, or loading, takes long."""
    client, gate = gated
    loading = threading.Event()

    def load() -> Spelling:
        assert loading.wait(PATIENCE_S)
        return gate

    starting = client_of(engine=load)
    for stream in (False, True):
        for asked in (client, starting):
            response = asked.post("/inference", json=ASK | {"timeout_s": 0.05, "stream": stream})
            assert response.status_code == 504
            assert response.get_json()["error"]["code"] == "deadline_passed"
    loading.set()
    gate.go.release(100)


def test_a_group_of_which_one_fails_is_ended(gated: tuple[FlaskClient, Spelling]) -> None:
    client, gate = gated
    gate.fails = True
    gate.go.release()
    group = {"prompt": ["a", "b", "c", "d"], "num_tokens": 20}  # two rows: the first two fail
    assert client.post("/inference", json=group).status_code == 500
    assert client.get("/stats").get_json()["cancelled"] == 2
    assert metrics(client)["vllm:request_success_total/error"] == 2
    gate.fails = False
    gate.go.release(2)  # an iteration that was under way, and the next request's
    assert client.post("/inference", json={"prompt": "a", "num_tokens": 1}).status_code == 200


# ---- where the system starts no more threads the request is refused with a sentence

HI: dict[str, Any] = {"prompt": "hi", "num_tokens": 3, "timeout_s": 10}


@pytest.mark.parametrize(("name", "stream"), [
    ("streamer", True), ("watcher", True), ("watcher", False),
])  # fmt: skip
def test_a_request_without_its_thread_is_refused_and_not_computed(
    name: str, stream: bool, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stream was a 500, and later ones waited for a thread that had never run."""
    client, start = client_of(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    ours, theirs = socket.socketpair()
    connection = {"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.0"}
    watched = {"environ_overrides": connection if name == "watcher" else {}}
    with ours, theirs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                body = HI | {"stream": stream, "num_tokens": 900}
                refused = client.post("/inference", json=body, **watched)
                assert refused.status_code == 429 and refused.headers["Retry-After"]
                message = refused.get_json()["error"]["message"]
                assert f"could not start its {name} thread (can't start new thread)" in message
                assert "ulimit -u" in message
                after = client.application.extensions["engine"].manager.snapshot()
                assert (after.waiting, after.running, after.blocks_used) == (0, 0, 0)
            assert client.post("/inference", json=HI).status_code == 200, "it needs no thread"
        served = client.post("/inference", json=HI | {"stream": stream}, **watched)
        assert served.status_code == 200 and served.data
    stats = client.get("/stats").get_json()
    assert (stats["refused"], stats["cancelled"]) == (2, 0)


def test_a_connection_that_is_closed_cancels_its_request_also_where_bytes_are_unread() -> None:
    engine = FakeGenerator(lambda seconds: time.sleep(0.01))
    manager = BatchingManager(make_scheduler(Dynamic(), n_blocks=10_000), lambda: engine)
    watched, other = endless = [Inference([0], 10_000), Inference([0], 10_000)]
    manager.enqueue(endless)
    ours, theirs = socket.socketpair()
    watcher = Watcher(manager.cancel, interval_s=0.01)
    watcher.start()
    with ours, theirs, watcher.watching(ours, [watched]):
        theirs.sendall(b"\r\nGET /stats HTTP/1.1\r\n\r\n")
        assert not watched.done.wait(0.1), "more to read is no reason"
        theirs.close()
        assert watched.done.wait(PATIENCE_S) and watched.state is State.CANCELLED
        assert other.state is State.RUNNING
    manager.close()
