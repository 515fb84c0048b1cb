"""Every front end answers as an app in this process does, to the byte, and as a server should: each
of tests/server/fronts.py, over real HTTP.

What differs from answer to answer (times, ids, pids, ports) is masked. Tokens that piled up come as
one event, so those of a completion are joined before streams are compared.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import monotonic
from typing import Any

import pytest
from flask.testing import FlaskClient

from client.calls import get
from scheduling.inference import Inference
from server.api.messages import to_json
from tests.server.fronts import (
    COMPARED,
    EVERY_FRONT,
    FRONTS,
    JSON,
    Front,
    Response,
    connected,
    fetch,
    send,
    servers_of,
)
from tests.servers import ClientOf, events, metric, wait_until

KEY = "sk-Sesame~42"
FAST: dict[str, Any] = {"model": "fake", "max_batch_size": 64}
# an iteration takes 20 ms, and a server holds four requests
SLOW = FAST | {"max_batch_size": 2, "max_waiting": 2, "loop_interval_ms": 20}
WITH_KEY = JSON | {"Authorization": f"Bearer {KEY}"}
ASK = {"prompt": "If the file", "num_tokens": 8, "seed": 3}
OPENAI = {"prompt": "If the file", "max_tokens": 8, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
LONG = {"prompt": "hi", "num_tokens": 1000, "seed": 3}  # 20 s on a slow server
INFERENCE, COMPLETIONS, CHATS = "/inference", "/v1/completions", "/v1/chat/completions"


def reference(
    client: FlaskClient, method: str, path: str, body: Any = None, headers: Any = JSON
) -> Response:
    """Return the answer of an app in this process."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    response = client.open(path, method=method, data=raw, headers=headers)
    compared = {name: response.headers.get(name) for name in COMPARED}
    return Response(response.status_code, compared, response.data)


@pytest.fixture(scope="module", params=EVERY_FRONT)
def front(request: pytest.FixtureRequest) -> Front:
    return FRONTS[request.param]


@pytest.fixture(scope="module")
def fast(front: Front) -> Iterator[str]:
    with front("dynamic", FAST, KEY) as url:
        yield url


@pytest.fixture(scope="module")
def slow(front: Front) -> Iterator[str]:
    with front("dynamic", SLOW, None) as url:
        yield url


ANSWERED: list[tuple[str, Any]] = [
    (INFERENCE, ASK | {"prompt": ["hi", "there"], "temperature": 0.5, "n": 2}),
    (INFERENCE, {"prompt_ids": [104, 105], "num_tokens": 8, "seed": 3, "echo": True}),
    (COMPLETIONS, OPENAI | {"model": "fake", "echo": True}),
    (COMPLETIONS, OPENAI | {"max_tokens": 100, "stop": ["s", "h"]}),
    (COMPLETIONS, OPENAI | {"max_tokens": 0, "echo": True}), (CHATS, CHAT | {"n": 2, "stop": "e"}),
    ("/tokenize", {"prompt": "If the file", "add_special_tokens": False}), ("/v1/models", None),
    ("/v1/models/fake", None), ("/health", None), ("/ready", None), ("/openapi.json", None),
    ("/", None),
]  # fmt: skip


def named(value: Any) -> str | None:
    return json.dumps(value)[:60] if isinstance(value, dict) else None


@pytest.mark.parametrize(("path", "body"), ANSWERED, ids=named)
def test_an_answer_is_the_reference_s(fast: str, client_of: ClientOf, path: str, body: Any) -> None:
    client, method = client_of(**FAST, api_key=KEY), "POST" if body else "GET"
    wait_until(lambda: reference(client, "GET", "/ready").status == 200)
    response = fetch(fast, method, path, body, WITH_KEY)
    assert response.status == 200
    assert response.masked == reference(client, method, path, body, WITH_KEY).masked


def test_what_watches_a_process_needs_no_key_and_a_head_has_no_body(fast: str) -> None:
    assert [fetch(fast, "GET", path).status for path in ("/health", "/ready")] == [200, 200]
    response = fetch(fast, "HEAD", "/health")
    assert (response.status, response.body) == (200, b"")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_request_s_id_comes_back_once_and_one_without_gets_one(fast: str, stream: bool) -> None:
    def id_of(headers: Any) -> str:
        with closing(connected(fast)) as connection:
            send(connection, "POST", INFERENCE, ASK | {"stream": stream}, headers)
            response = connection.getresponse()
            assert response.status == (200 if "Authorization" in headers else 401)
            assert response.read()
            [id_] = response.headers.get_all("X-Request-Id") or []
            return str(id_)

    assert id_of(WITH_KEY | {"X-Request-Id": "trace-7"}) == "trace-7"
    assert id_of(JSON | {"X-Request-Id": "trace-8"}) == "trace-8"
    assert id_of(WITH_KEY) != id_of(WITH_KEY)
    for unfit in ("", "two words", "x" * 129, "caf\xe9"):
        assert id_of(WITH_KEY | {"X-Request-Id": unfit}) not in ("", unfit)


@pytest.mark.parametrize("header", [
    {"X-Request-Timeout-Seconds": "0.1"},
    {"X-Session-Id": "caf\xe9"},
    {"serve-multiplexed-model-id": "caf\xe9"},
    {"serve_multiplexed_model_id": "caf\xe9"},
], ids=str)  # fmt: skip
def test_headers_that_ray_s_proxy_obeys_have_no_effect(slow: str, header: dict[str, str]) -> None:
    assert fetch(slow, "POST", INFERENCE, ASK | {"num_tokens": 20}, JSON | header).status == 200


REFUSED: list[tuple[int, str, str, Any]] = [  # with a key, in JSON
    (400, "POST", INFERENCE, ASK | {"num_tokens": 0, "stream": True}),
    (400, "POST", INFERENCE, ASK | {"max_tokens": 5}),
    (400, "POST", INFERENCE, ASK | {"num_tokens": 2000}),  # longer than the context
    (400, "POST", INFERENCE, ASK | {"queue_timeout_s": 1}),  # refused by the scheduler
    (400, "POST", COMPLETIONS, b'{"prompt": "\xff"}'),
    (404, "POST", COMPLETIONS, OPENAI | {"model": "another"}),
    (404, "GET", "/v1/models/another", None),
    (404, "POST", "/v1/nope?x=1", {}),
    (405, "GET", INFERENCE, None),
    (405, "POST", "/health", {}),
    (413, "POST", INFERENCE, b"x" * 1_000_001),
    (413, "POST", CHATS, b" " * 3_000_000),
]


REFUSED_HEADERS: list[tuple[int, str, dict[str, str]]] = [
    (415, INFERENCE, WITH_KEY | {"Content-Type": "text/plain"}),  # as a web page could post
    (415, INFERENCE, WITH_KEY | {"Content-Encoding": "gzip"}),
    (401, INFERENCE, JSON),
    (401, "/nope", JSON | {"Authorization": f"Bearer {KEY}x"}),
]
ALL_REFUSED = [(status, "POST", path, ASK, headers) for status, path, headers in REFUSED_HEADERS]
ALL_REFUSED += [(*asked, WITH_KEY) for asked in REFUSED]


@pytest.mark.parametrize(("status", "method", "path", "body", "headers"), ALL_REFUSED)
def test_a_refusal_is_the_reference_s_and_names_the_same_field(
    fast: str, client_of: ClientOf, status: int, method: str, path: str, body: Any, headers: Any
) -> None:
    ours = reference(client_of(**FAST, api_key=KEY), method, path, body, headers)
    response = fetch(fast, method, path, body, headers)
    assert response.status == status and response.headers == ours.headers
    # refusals that no app sees have no end of the line
    assert response.body.rstrip(b"\n") == ours.body.rstrip(b"\n")
    assert set(json.loads(response.body)["error"]) == {"message", "type", "param", "code"}
    assert bool(response.headers["Allow"]) == (status == 405)
    assert response.headers["WWW-Authenticate"] == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_beyond_the_queue_it_is_a_429(slow: str, client_of: ClientOf, stream: bool) -> None:
    client = client_of(**SLOW)
    full = [Inference([0], 300) for _ in range(4)]
    client.application.extensions["engine"].manager.enqueue(full)
    ours = reference(client, "POST", INFERENCE, ASK)
    servers = servers_of(slow)

    def counted() -> list[int]:
        stats = [get(f"{each}/stats") for each in servers]
        return [sum(of[name] for of in stats) for name in ("completed", "refused", "cancelled")]

    held = 4 * len(servers)
    completed, refusals, cancelled = counted()
    with ThreadPoolExecutor(held + 4) as pool:
        body = ASK | {"num_tokens": 100, "stream": stream}
        response = list(pool.map(lambda _: fetch(slow, "POST", INFERENCE, body), range(held + 4)))
    refused = [each for each in response if each.status != 200]
    assert len(refused) == 4, "all servers were filled, and none beyond what it holds"
    assert counted() == [completed + held, refusals + 4, cancelled], "each of them once"
    for each in refused:
        assert each.status == 429 and each.headers == ours.headers
        assert each.headers["Retry-After"] == "1"
        # how many of those that are held have been admitted is a matter of the moment
        assert re.sub(rb"\d", b"", each.body) == re.sub(rb"\d", b"", ours.body)


def joined(raw: bytes) -> dict[str, Any]:
    """Texts, tokens and ends of a stream's completions; and each kind of event once."""
    texts: dict[int, str] = defaultdict(str)
    tokens: dict[int, int] = defaultdict(int)
    reasons: dict[int, list[str]] = defaultdict(list)
    kinds: list[Any] = []
    for event in events(raw):
        assert to_json(event).encode() in raw, "in the same form as all that this server writes"
        for part in event.get("choices", [event] if "index" in event else []):
            i, reason = part.pop("index"), part.pop("finish_reason", None)
            texts[i] += part.pop("text") if "text" in part else part["delta"].pop("content")
            tokens[i] += part.pop("tokens", 0)
            reasons[i] += [reason] if reason else []
        if event not in kinds:
            kinds.append(event)
    return {"texts": texts, "tokens": tokens, "reasons": reasons, "kinds": kinds}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STREAMED: list[tuple[str, Any]] = [
    (INFERENCE, ASK | {"stream": True}),
    (INFERENCE, ASK | {"stream": True, "prompt": ["hi", "there"], "echo": True}),
    (COMPLETIONS, OPENAI | {"stream": True}),
    (COMPLETIONS, OPENAI | USAGE | {"max_tokens": 50, "stop": ["s", "h"]}),
    (COMPLETIONS, OPENAI | USAGE | {"n": 2}), (CHATS, CHAT | USAGE),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=named)
def test_a_stream_is_the_reference_s(slow: str, client_of: ClientOf, path: str, body: Any) -> None:
    ours = reference(client_of(**SLOW), "POST", path, body)
    response = fetch(slow, "POST", path, body)
    assert response.status == 200 and response.headers == ours.headers
    assert str(response.headers["Content-Type"]).startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert joined(response.masked.body) == joined(ours.masked.body)


@pytest.mark.parametrize(("path", "body"), [(INFERENCE, ASK), (CHATS, CHAT)], ids=["own", "chat"])
def test_tokens_come_as_they_are_computed(slow: str, path: str, body: Any) -> None:
    length = {"num_tokens": 40} if path == INFERENCE else {"max_tokens": 40, "ignore_eos": True}
    with closing(connected(slow)) as connection:
        send(connection, "POST", path, body | length | {"stream": True})
        response = connection.getresponse()
        came = [monotonic() for line in response if line.startswith(b"data: {")]
    assert came[-1] - came[0] > 0.5, "39 iterations take 0.8 s, and the first did not wait for them"
    assert len(came) > 20, "few came together"


def test_a_late_answer_is_a_504_and_in_a_stream_an_event(slow: str, client_of: ClientOf) -> None:
    client, late = client_of(**SLOW), LONG | {"timeout_s": 0.6}  # time for a first token
    response = fetch(slow, "POST", INFERENCE, late)
    assert response.status == 504
    assert response.masked == reference(client, "POST", INFERENCE, late).masked
    response = fetch(slow, "POST", INFERENCE, late | {"stream": True})
    *pieces, last = events(response.body)
    assert response.status == 200 and 0 < len(pieces) < 100
    *_, ours = events(reference(client, "POST", INFERENCE, late | {"stream": True}).body)
    assert last == ours and last["error"]["code"] == "deadline_passed"


def test_clients_that_go_away_free_their_rows(slow: str) -> None:
    servers = servers_of(slow)

    def running() -> float:
        return sum(metric(each, "vllm:num_requests_running") for each in servers)

    def cancelled() -> int:
        return sum(get(f"{each}/stats")["cancelled"] for each in servers)

    before = cancelled()
    with closing(connected(slow)) as plain, closing(connected(slow)) as streaming:
        send(plain, "POST", INFERENCE, LONG, JSON | {"X-Request-Disconnect-Disabled": "?1"})
        send(streaming, "POST", INFERENCE, LONG | {"stream": True})
        with closing(streaming.getresponse()) as response:
            assert response.readline().startswith(b"data: ")
        wait_until(lambda: running() == 2, 5, 0.05)
    # left alone they would run for 20 s
    wait_until(lambda: cancelled() == before + 2 and not running(), 5, 0.05)
