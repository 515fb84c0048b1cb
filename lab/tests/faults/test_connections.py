"""Clients that are too many, too slow, or gone, done to real servers in a few seconds each. In full
size: results/faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import numpy as np
import pytest

from client.calls import get
from client.load import replay
from config.open_files import allow_open_files
from generate.fake import ITERATION_S, ROW_S
from lab.tests.faults.served import (
    CLOSE,
    Served,
    beside_a_client,
    connect,
    errors,
    post_bytes,
    requests_of,
    serving,
)
from tests.servers import read_to_end, wait_until, wait_until_free

TRICKLERS = 1100  # more than a server with the default settings has HTTP threads
SILENT = 5000
DEADLINE_S = 5.0  # for headers, and for a body
HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.nightly
def test_ten_times_more_requests_than_it_can_serve() -> None:
    """Accepted requests are answered; the others get 429 soon."""
    rows, tokens = 8, 400
    a_second = 10 * rows / (tokens * (ITERATION_S + rows * ROW_S))
    with serving(max_batch_size=rows, max_waiting=32) as served:
        outcomes = replay(served.url, requests_of(int(2 * a_second), tokens, a_second))
        stats = get(f"{served.url}/stats")
    refused = [outcome for outcome in outcomes if outcome.error]
    assert all(error.startswith("429 ") for error in errors(outcomes))
    assert float(np.percentile([o.ended_at - o.sent_at for o in refused], 99)) < 5
    assert stats["completed"] == len(outcomes) - len(refused) and stats["refused"] == len(refused)


def test_half_of_many_streams_are_cut() -> None:
    """The others get their texts; rows and blocks are free again."""
    n, tokens, prompts = 60, 100, 10

    async def ask(session: aiohttp.ClientSession, url: str, i: int) -> str:
        body = {"prompt": f"prompt {i % prompts}", "num_tokens": tokens, "seed": 1, "stream": True}
        text = ""
        async with session.post(f"{url}/inference", json=body) as response:
            async for line in response.content:
                event = line.decode().removeprefix("data: ").strip()
                if event and event != "[DONE]":
                    text += json.loads(event).get("text", "")
                if i >= prompts and i % 2 and len(text) > tokens // 4:
                    response.close()
                    return ""
        return text

    async def all_at_once(url: str, n: int) -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session, url, i) for i in range(n)))

    with serving() as served:
        alone, texts = (asyncio.run(all_at_once(served.url, count)) for count in (prompts, n))
        wait_until_free(served.url)
    others = [i for i in range(n) if i < prompts or i % 2 == 0]
    assert [texts[i] for i in others] == [alone[i % prompts] for i in others]


@contextlib.contextmanager
def many(served: Served, n: int, data: bytes) -> Iterator[list[socket.socket]]:
    """n connections that have sent `data`, among them those that the server closed meanwhile."""
    n = min(n, allow_open_files(n + 200) - 200)
    made: list[socket.socket] = []
    try:
        with selectors.DefaultSelector() as connecting:
            for _ in range(n):
                made.append(connection := socket.socket())
                connection.setblocking(False)
                connection.connect_ex(served.address())
                connecting.register(connection, selectors.EVENT_WRITE, connection)
            # a connection that finds no place in the backlog tries again, and may take longer
            end = time.monotonic() + 5
            while connecting.get_map() and time.monotonic() < end:
                for key, _ in connecting.select(0.1):
                    connecting.unregister(key.data)
                    with contextlib.suppress(OSError):
                        key.data.send(data)
        yield made
    finally:
        for connection in made:
            connection.close()


@pytest.mark.nightly
def test_5000_silent_connections_at_once() -> None:
    """Requests in flight are answered, and the process lives."""
    with beside_a_client() as served:
        workers = served.workers
        bodies = [{"prompt": "hi", "num_tokens": 900, "seed": i} for i in range(20)]
        flying = [connect(served, post_bytes(body, more=CLOSE)) for body in bodies]
        with many(served, SILENT, b""):
            assert all(b" 200 OK" in read_to_end(connection)[:20] for connection in flying)
            time.sleep(0.5)
        assert served.workers == workers


@pytest.mark.nightly
@pytest.mark.parametrize("head", [HEAD, BODY], ids=["headers", "body"])
def test_1100_clients_send_a_byte_now_and_then(head: bytes) -> None:
    """Each is dropped after the deadline."""
    limits = {"header_timeout_s": DEADLINE_S, "body_timeout_s": DEADLINE_S}
    with beside_a_client(**limits) as served, many(served, TRICKLERS, head) as slow:
        remaining, end = {*slow}, time.monotonic() + 3 * DEADLINE_S
        while remaining and time.monotonic() < end:
            remaining = {connection for connection in remaining if goes_on(connection)}
            time.sleep(DEADLINE_S / 10)
    assert not remaining


def goes_on(connection: socket.socket) -> bool:
    """Send one more byte; return whether the server still waits for the rest."""
    try:
        connection.send(b"x")
        connection.recv(1000)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@pytest.mark.nightly
def test_40_clients_send_their_bodies_in_chunks_of_one_byte() -> None:
    """They are refused."""
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000
    answers: Counter[bytes] = Counter()

    def send(_: int) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            connection = connect(served)
            with contextlib.suppress(OSError):  # it is refused before all of it is sent
                connection.sendall(raw)
            answers[read_to_end(connection)[9:12]] += 1

    with beside_a_client() as served, ThreadPoolExecutor(40) as clients:
        list(clients.map(send, range(40)))
    assert {*answers} <= {b"400", b""} and answers[b"400"]


@pytest.mark.nightly
def test_20_clients_of_http_1_0_do_not_close() -> None:
    request = post_bytes({"prompt": "hi", "num_tokens": 1}, version="1.0")
    with beside_a_client() as served, contextlib.ExitStack() as opened:
        connections = [opened.enter_context(connect(served, request)) for _ in range(20)]
        assert all(b" 200 OK" in connection.recv(1000) for connection in connections)
        time.sleep(0.5)


@pytest.mark.nightly
def test_4_readers_of_8_streams_each_stand_still() -> None:
    """Their rows are computed and freed."""
    body = {"prompt": ["hi"] * 8, "max_tokens": 1000, "seed": 1, "stream": True}
    with beside_a_client(max_batch_size=64) as served, contextlib.ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(connect(served, post_bytes(body, "/v1/completions")))
        wait_until(lambda: served.running >= 32)
        wait_until(lambda: served.running < 32)


@pytest.mark.nightly
def test_a_client_closes_its_own_direction_and_waits() -> None:
    """It counts as gone: its row and blocks, which its answer would take for 20 s, are free."""
    request = post_bytes({"prompt": "hi", "num_tokens": 1000})
    with serving(loop_interval_ms=20) as served, connect(served, request) as connection:
        wait_until(lambda: served.running == 1)
        connection.shutdown(socket.SHUT_WR)
        wait_until_free(served.url, 10)


def test_50_requests_in_one_packet() -> None:
    """All are answered, in their order."""
    bodies = [{"prompt": f"prompt {i}", "num_tokens": 5, "seed": i} for i in range(50)]
    last = [post_bytes(body, more=CLOSE) for body in bodies]
    packet = b"".join(post_bytes(body) for body in bodies[:-1]) + last[-1]
    with serving() as served:
        alone = [completions(read_to_end(connect(served, request)))[0] for request in last]
        assert completions(read_to_end(connect(served, packet))) == alone


def completions(raw: bytes) -> list[bytes]:
    return [part.split(b'"', 1)[0] for part in raw.split(b'"completion":"')[1:]]
