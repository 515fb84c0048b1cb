"""A real gunicorn and real HTTP: many at once, a reader that stands still, an old client."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPResponse

from client.calls import get, post
from client.load import replay
from tests.front_door.sockets import HEAD, connect, ended, send
from tests.servers import (
    Serve,
    asks,
    assert_all_answered,
    metric,
    server,
    wait_until,
    wait_until_free,
)
from tests.sse import events


def test_256_rows_are_filled_and_1200_requests_at_once_are_all_answered() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        assert_all_answered(replay(url, asks(256, 600)))
        assert get(f"{url}/stats")["largest_batch"] == 256
        assert_all_answered(replay(url, asks(1200, 5)))
        assert get(f"{url}/stats")["refused"] == 0


def test_a_reader_that_stands_still_slows_nobody_and_gets_what_piled_up_in_few_pieces() -> None:
    fast = {"model": "fake", "fake_slowdown": 0.1, "max_batch_size": 36}
    with server("dynamic", fast) as url:
        ask = {"prompt": ["hi"] * 32, "max_tokens": 1000, "seed": 1, "stream": True}
        slow = send(url, ask, "/v1/completions")  # its answer is larger than what the sockets hold
        wait_until(lambda: get(f"{url}/stats")["largest_batch"] >= 32, every_s=0.05)
        assert_all_answered(replay(url, asks(4, 100)))
        wait_until_free(url)  # all of it is computed, and nothing read
        assert metric(url, "vllm:generation_tokens_total") == 32 * 1000 + 4 * 100
        with slow, closing(HTTPResponse(slow)) as response:
            response.begin()
            chunks = events(response.read())
        assert response.chunked and get(f"{url}/stats")["completed"] == 36
        plain = post(f"{url}/v1/completions", ask | {"stream": False})["choices"]
        texts = [""] * 32
        for [choice] in (chunk["choices"] for chunk in chunks):
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in plain]
        assert 32 <= len(chunks) < 32 * 1000


def test_a_client_of_http_1_0_gets_its_stream_without_chunks(shared_server: Serve) -> None:
    body = json.dumps({"prompt": "hi", "num_tokens": 30, "seed": 1, "stream": True}).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    with shared_server("dynamic", {"model": "fake"}) as url, connect(url) as connection:
        connection.sendall(head + body)
        head, _, raw = ended(connection).partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"chunked" not in head
        *chunks, _ = events(raw)
        plain = post(f"{url}/inference", {"prompt": "hi", "num_tokens": 30, "seed": 1})
        assert "".join(chunk["text"] for chunk in chunks) == plain["completion"]
