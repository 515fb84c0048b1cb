"""A real gunicorn and real HTTP: many at once, shutdown in the middle, clients that die, bodies
that are too large.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from contextlib import closing
from http.client import HTTPResponse
from typing import Any

import aiohttp
import pytest

from client.calls import get, post
from client.load import replay
from client.outcomes import Outcome
from config import MODES
from tests.counts import nightly_but
from tests.front_door.sockets import HEAD, connect, ended, send
from tests.servers import (
    PATIENCE_S,
    Serve,
    asks,
    assert_all_answered,
    metric,
    server,
    started,
    wait_until,
    wait_until_free,
)
from tests.sse import events, text_of


@pytest.mark.parametrize("mode", nightly_but(["static"], MODES))
def test_300_requests_at_once_are_all_answered(mode: str, shared_server: Serve) -> None:
    with shared_server(mode, {"model": "fake"}) as url:
        n = 3 if mode == "nobatch" else 10  # so many that the others wait for the first batch
        outcomes = replay(url, asks(300, n))
        assert_all_answered(outcomes)
        assert all(outcome.answer and outcome.answer.completion_tokens == n for outcome in outcomes)
        stats = get(f"{url}/stats")
        assert stats["completed"] == 300 and stats["total-tokens-handled"] == 300 * n
        assert stats["largest_batch"] == (1 if mode == "nobatch" else 32)


def test_256_rows_are_filled_and_1200_requests_at_once_are_all_answered() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        assert_all_answered(replay(url, asks(256, 200)))
        assert get(f"{url}/stats")["largest_batch"] == 256
        assert_all_answered(replay(url, asks(1200, 5)))
        assert get(f"{url}/stats")["refused"] == 0


def wait_until_running(url: str, n: int) -> None:
    wait_until(lambda: get(f"{url}/stats")["largest_batch"] >= n, every_s=0.05)


def test_ctrl_c_ends_at_once_and_notifies_those_in_flight() -> None:
    """It waited for an hour for the rest of half a request."""
    with started() as (url, process), connect(url) as half:
        half.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.extend(replay(url, asks(3, 1000))))
        thread.start()
        stream = send(url, {"prompt": "hi", "num_tokens": 1000, "stream": True})
        wait_until_running(url, 4)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        thread.join(PATIENCE_S)
        assert len(outcomes) == 3 and all(outcome.error for outcome in outcomes)
        *_, last, done = ended(stream).split(b"data: ")
        assert b'"code":"draining"' in last and done.startswith(b"[DONE]")
        assert "serving fake" in output and f"ready: dynamic mode on {url}" in output
        assert "--host 0.0.0.0" in output and "Traceback" not in output


@pytest.mark.parametrize("mode", nightly_but(["dynamic"], MODES))
def test_clients_that_go_away_waiting_plain_or_streaming_are_noticed_and_their_rows_and_blocks_free(
    mode: str,
) -> None:
    # an iteration takes 20 ms, so left alone each of these would run for 20 s; the first two run
    # and the others wait
    with server(mode, {"model": "fake", "max_batch_size": 2, "loop_interval_ms": 20}) as url:
        native, openai = {"prompt": "hi", "num_tokens": 1000}, {"prompt": "hi", "max_tokens": 1000}
        going = [
            send(url, native),
            send(url, openai | {"stream": True}, "/v1/completions"),
            send(url, native | {"stream": True}),
            send(url, openai, "/v1/completions"),
        ]
        in_flight = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_until(lambda: sum(metric(url, name) for name in in_flight) == 4)
        going[0].sendall(b"GET /stats")  # bytes that nobody reads must not hide the end behind them
        # the last by RST instead of FIN, as of a client that is killed
        going[3].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        for connection in going:
            connection.close()
        wait_until_free(url, patience_s=2.5)  # a second is promised
        stats = get(f"{url}/stats")
        assert stats["cancelled"] == 4 and stats["completed"] == 0
        assert metric(url, "vllm:generation_tokens_total") < 1000
        assert_all_answered(replay(url, asks(3, 3)))


GREEDY = {"num_tokens": 60, "temperature": 0}
SMALL_POOL = {
    "kv_reservation": "demand",
    "kv_cache": "70blocks",
    "prefix_caching": True,
    "order": "prefix",
}


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, SMALL_POOL], ids=["plain", "preempted and cached"])
def test_500_streaming_clients_of_which_half_go_away_leave_nothing_behind_and_the_others_their_text(
    shared_server: Serve, settings: dict[str, Any]
) -> None:
    prompts = [
        f"{'one two three ' * 5}{words} {n}"
        for n in range(5)
        for words in ("If the", "Return", "a list of", "The", "class")
    ]

    async def ask(session: aiohttp.ClientSession, url: str, n: int, enough: int) -> str:
        body = GREEDY | {"prompt": prompts[n % len(prompts)], "stream": True}
        text, tokens = "", 0
        async with session.post(f"{url}/inference", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                event = line.decode().removeprefix("data: ").strip()
                if event and event != "[DONE]" and "text" in (chunk := json.loads(event)):
                    text, tokens = text + chunk["text"], tokens + chunk["tokens"]
                    if tokens >= enough:
                        response.close()
                        return ""
        return text

    async def all_at_once(url: str) -> list[str]:
        timeout = aiohttp.ClientTimeout(total=4 * PATIENCE_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        ) as session:
            return await asyncio.gather(
                *(ask(session, url, n, 5 if n % 2 else 1000) for n in range(500))
            )

    with shared_server("dynamic", {"model": "demo"} | settings) as url:
        plain = [GREEDY | {"prompt": prompt} for prompt in prompts]
        alone = [post(f"{url}/inference", body)["completion"] for body in plain]
        assert len(set(alone)) > 15
        texts = asyncio.run(all_at_once(url))
        assert all(texts[n] == alone[n % len(prompts)] for n in range(0, 500, 2))
        wait_until_free(url)
        stats = get(f"{url}/stats")
        assert stats["cancelled"] + stats["completed"] == 500 + len(prompts)
        assert stats["cancelled"] > 100, "the others had their last token before that was noticed"
        assert stats["failed"] == stats["expired"] == stats["refused"] == 0
        assert min(stats["preemptions"], stats["cached_tokens"]) > 50 or not settings


def test_a_reader_that_stands_still_slows_nobody_and_gets_what_piled_up_in_few_pieces() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 36}) as url:
        ask = {"prompt": ["hi"] * 32, "max_tokens": 1000, "seed": 1, "stream": True}
        slow = send(url, ask, "/v1/completions")  # its answer is larger than what the sockets hold
        wait_until_running(url, 32)
        assert_all_answered(replay(url, asks(4, 100)))
        wait_until_free(url)  # all of it is computed, and nothing read
        assert metric(url, "vllm:generation_tokens_total") == 32 * 1000 + 4 * 100
        with slow, closing(HTTPResponse(slow)) as response:
            response.begin()
            chunks = events(response.read())
        assert response.chunked and get(f"{url}/stats")["completed"] == 36
        plain = post(f"{url}/v1/completions", ask | {"stream": False})["choices"]
        assert [text_of(chunks, i) for i in range(32)] == [choice["text"] for choice in plain]
        ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"] == "length"]
        assert len(ends) == 32 <= len(chunks) < 32 * 1000


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
