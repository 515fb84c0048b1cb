"""A request that is over leaves no cycle: its body, its socket and its tokens are free at once. A
cycle stays until the garbage collector comes, which halts the engine while it looks.
"""

from __future__ import annotations

import gc
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import EnvironBuilder, run_wsgi_app

from generate.fake import FakeGenerator
from generate.tokenizer import load_tokenizer
from scheduling.inference import Inference, Iteration, TokenEvent
from server.api.rendering import InferenceRenderer
from server.http.completions import Stream
from server.request import Request
from tests.servers import ClientOf, wait_until

ASK = {"prompt": "hi", "num_tokens": 4}
OPENAI = {"prompt": "hi", "max_tokens": 4}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"
ENDED = {
    "plain": ("/inference", ASK),
    "a group": ("/inference", ASK | {"n": 3}),
    "log-probabilities": ("/v1/completions", OPENAI | {"logprobs": 2, "echo": True}),
    "stop strings": ("/v1/completions", OPENAI | {"stop": ["e", "t", " "], "max_tokens": 64}),
    "chat": (CHAT, MESSAGES),
    "a stream": ("/inference", ASK | {"stream": True}),
    "a stream of a group": ("/v1/completions", OPENAI | {"stream": True, "n": 2}),
    "a chat's stream": (CHAT, MESSAGES | {"stream": True, "stop": ["e", "t"]}),
}
REFUSED = {
    "no JSON": ("/inference", "no JSON"),
    "a bad value": ("/inference", ASK | {"num_tokens": -1}),
    "another model": ("/v1/completions", OPENAI | {"model": "another"}),
    "a prompt that is too long": ("/inference", ASK | {"num_tokens": 10_000}),
    "no route": ("/nothing", ASK),
    "a method that the route lacks": ("/stats", ASK),
    "a user's limit": ("/inference", ASK | {"user": "eve"}),
    "a user's limit, for a stream": ("/inference", ASK | {"user": "eve", "stream": True}),
    "no time": ("/inference", ASK | {"num_tokens": 500, "timeout_s": 1e-6}),
    "no time for a stream": (
        "/inference",
        ASK | {"num_tokens": 500, "timeout_s": 1e-6, "stream": True},
    ),
}
READ = ("/", "/stats?iterations=1", "/metrics", "/health", "/live", "/live/events", "/v1/models")


class Broken(FakeGenerator):
    def generate(self, iteration: Iteration) -> list[int]:
        raise RuntimeError("broken, as the test asks")


def garbage(call: Callable[[], object], times: int = 5) -> Mapping[str, int]:
    """Return what calls leave to the garbage collector, by type."""
    call()  # what is made once may leave something
    gc.freeze()  # what was there before, of which a collection would look at each object
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(times):
            call()
        gc.collect()
        return Counter(type(thing).__qualname__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def post(client: FlaskClient, path: str, body: Any) -> str:
    """Send a request as the HTTP server does: the test client keeps some things itself."""
    data = body if isinstance(body, str) else json.dumps(body)
    builder = EnvironBuilder(path, method="POST", data=data, content_type="application/json")
    _, status, _ = run_wsgi_app(client.application, builder.get_environ(), buffered=True)
    manager = client.application.extensions["engine"].manager
    wait_until(lambda: not manager.snapshot().running)
    return status


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDED.values(), ids=ENDED)
def test_an_answer_leaves_no_cycle(client_of: ClientOf, path: str, body: Any, ahead: bool) -> None:
    engine = {"model": "demo"} if "logprobs" in body else {"fake_slowdown": 0.01}
    client = client_of(**engine, ahead=ahead)
    assert post(client, path, body) == "200 OK"
    assert not garbage(lambda: post(client, path, body))


@pytest.mark.parametrize(("path", "body"), REFUSED.values(), ids=REFUSED)
def test_an_error_leaves_no_cycle(client_of: ClientOf, path: str, body: Any) -> None:
    client = client_of(user_requests_per_minute=1 if "user" in body else None)
    post(client, path, body)
    assert post(client, path, body)[0] in "45"
    assert not garbage(lambda: post(client, path, body))


def test_a_broken_engine_leaves_no_cycle(client_of: ClientOf) -> None:
    client = client_of(engine=Broken)
    assert post(client, "/inference", ASK)[0] == "5"
    assert not garbage(lambda: post(client, "/inference", ASK))


def test_a_stream_whose_client_left_leaves_no_cycle() -> None:
    def cut() -> None:
        inference = Inference([1], 3, tokens=list(b"abc"))
        request, tokenizer = Request([[1]], 3), load_tokenizer("bytes")
        renderer = InferenceRenderer(request, [inference], tokenizer, "model", 0.0)
        ours, theirs = socket.socketpair()
        theirs.close()
        stream, tokens = Stream(renderer, ours), count(1)

        def turn(_: object) -> None:
            stream.advance({id(inference): TokenEvent(inference, next(tokens), False)})

        body = stream.body(turn)
        next(body)
        with pytest.raises(BrokenPipeError):
            next(body)
        ours.close()

    assert not garbage(cut)


@pytest.mark.parametrize("path", READ)
def test_what_is_read_leaves_no_cycle(client_of: ClientOf, path: str) -> None:
    client = client_of(fake_slowdown=0.01)
    post(client, "/inference", ASK)
    environ = EnvironBuilder(path).get_environ
    assert not garbage(lambda: run_wsgi_app(client.application, environ(), buffered=True))
