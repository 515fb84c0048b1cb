"""Clients that are too many, too slow, or gone."""

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
from functools import partial

import aiohttp
import numpy as np

from client.calls import get
from client.load import replay
from config.open_files import allow_open_files
from generate.fake import ITERATION_S, ROW_S
from lab.benchmarks.faults.tools import (
    CLOSE,
    DELAY_S,
    SLACK,
    Fault,
    Finding,
    Served,
    after,
    connect,
    post_bytes,
    read_to_end,
    requests_of,
    summary,
    until,
)

REFUSED_S = 1.0  # the longest wait for a refusal
TRICKLERS = 1100  # more than a server with the default settings has HTTP threads
SILENT = 5000
DEADLINE_S = 5.0  # for headers, and for a body
DEADLINES = {"header_timeout_s": DEADLINE_S, "body_timeout_s": DEADLINE_S}
HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


def overload(served: Served, short: bool) -> Iterator[Finding]:
    seconds, rows, tokens = (2 if short else 10), 8, 400
    capacity = rows / (tokens * (ITERATION_S + rows * ROW_S))  # requests per second
    requests = requests_of(int(10 * capacity * seconds), tokens, a_second=10 * capacity)
    outcomes = replay(served.url, requests)
    stats = get(f"{served.url}/stats")
    answered = sum(outcome.answer is not None for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.error.startswith("429 ")]
    p99 = float(np.percentile([o.ended_at - o.sent_at for o in refused], 99))
    yield summary(outcomes), answered + len(refused) == len(outcomes)
    yield f"refused after {1e3 * p99:.0f} ms (p99)", p99 < REFUSED_S * (SLACK if short else 1)
    if (stats["completed"], stats["refused"]) != (answered, len(refused)):
        yield "/stats counts otherwise", False


def cut_streams(served: Served, short: bool) -> Iterator[Finding]:
    n, tokens, prompts = (60 if short else 500), 100, 10

    async def ask(session: aiohttp.ClientSession, i: int) -> str:
        body = {"prompt": f"prompt {i % prompts}", "num_tokens": tokens, "seed": 1, "stream": True}
        text = ""
        async with session.post(f"{served.url}/inference", json=body) as response:
            async for line in response.content:
                event = line.decode().removeprefix("data: ").strip()
                if event and event != "[DONE]":
                    text += json.loads(event).get("text", "")
                if i >= prompts and i % 2 and len(text) > tokens // 4:
                    response.close()
                    return ""
        return text

    async def all_at_once(n: int) -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session, i) for i in range(n)))

    alone, texts = asyncio.run(all_at_once(prompts)), asyncio.run(all_at_once(n))
    freed = until(served.is_free)
    others = [i for i in range(n) if i < prompts or i % 2 == 0]
    whole = sum(texts[i] == alone[i % prompts] for i in others)
    text = f"{whole} of the {len(others)} others got the text that they get without it"
    yield text, whole == len(others)
    yield f"rows and blocks free {after(freed)}", freed is not None


@contextlib.contextmanager
def many(served: Served, n: int, data: bytes) -> Iterator[list[socket.socket]]:
    """n connections that have sent `data`, among them those that the server closed meanwhile."""
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


def silent(served: Served, short: bool) -> Iterator[Finding]:
    n = min(SILENT, allow_open_files(SILENT + 200) - 200)
    worker = served.worker.pid
    bodies = [{"prompt": "hi", "num_tokens": 900, "seed": i} for i in range(20)]
    in_flight = [connect(served, post_bytes(body, more=CLOSE)) for body in bodies]
    with many(served, n, b""):
        answered = sum(b" 200 OK" in read_to_end(connection)[:20] for connection in in_flight)
        time.sleep(0.5 if short else 5)
    yield f"{n} connections: {answered} of 20 in flight answered", answered == 20
    lives = served.worker.pid == worker
    yield f"the process {'lives' if lives else 'was replaced'}", lives


def trickle(head: bytes, served: Served, short: bool) -> Iterator[Finding]:
    """Clients that send `head`, and then a byte now and then."""
    n = min(TRICKLERS, allow_open_files(TRICKLERS + 200) - 200)
    with many(served, n, head) as slow:
        start, remaining = time.monotonic(), set(slow)
        while remaining and time.monotonic() - start < 3 * DEADLINE_S:
            remaining = {connection for connection in remaining if _goes_on(connection)}
            time.sleep(DEADLINE_S / 10)
        dropped_s = time.monotonic() - start
    dropped = f"{n - len(remaining)} of {n} dropped within {dropped_s:.0f} s"
    yield f"{dropped} (deadline {DEADLINE_S:g} s)", not remaining


def _goes_on(connection: socket.socket) -> bool:
    """Send one more byte; return whether the server still waits for the rest."""
    try:
        connection.send(b"x")
        connection.recv(1000)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def tiny_chunks(served: Served, short: bool) -> Iterator[Finding]:
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000
    answers: Counter[str] = Counter()

    def send(_: int) -> None:
        end = time.monotonic() + (2 if short else 10)
        while time.monotonic() < end:
            connection = connect(served)
            with contextlib.suppress(OSError):  # it is refused before all of it is sent
                connection.sendall(raw)
            answers[read_to_end(connection)[9:12].decode() or "closed"] += 1

    with ThreadPoolExecutor(40) as clients:
        list(clients.map(send, range(40)))
    text = ", ".join(f"{n} × {answer}" for answer, n in answers.items())
    yield text, {*answers} <= {"400", "closed"} and answers["400"] > 0


def slow_closers(served: Served, short: bool) -> Iterator[Finding]:
    request = post_bytes({"prompt": "hi", "num_tokens": 1}, version="1.0")
    connections = [connect(served, request) for _ in range(20)]
    answered = sum(b" 200 OK" in connection.recv(1000) for connection in connections)
    time.sleep(0.5 if short else 5)
    for connection in connections:
        connection.close()
    yield f"{answered} of 20 answered", answered == 20


def still_readers(served: Served, short: bool) -> Iterator[Finding]:
    body = {"prompt": ["hi"] * 8, "max_tokens": 1000, "seed": 1, "stream": True}
    still = [connect(served, post_bytes(body, "/v1/completions")) for _ in range(4)]
    begun = until(lambda: served.running >= 32)
    freed = until(lambda: served.running < 32)
    for connection in still:
        connection.close()
    yield f"all 32 rows were computed {after(begun)}", begun is not None
    yield f"and free {after(freed)}", freed is not None


def half_close(served: Served, short: bool) -> Iterator[Finding]:
    connection = connect(served, post_bytes({"prompt": "hi", "num_tokens": 1000}))
    until(lambda: served.running == 1)
    connection.shutdown(socket.SHUT_WR)
    freed = until(served.is_free, 10)
    connection.close()
    text = f"its row and blocks, taken for 20 s by its answer, are free {after(freed)}"
    yield text, freed is not None


def pipeline(served: Served, short: bool) -> Iterator[Finding]:
    n = 50
    bodies = [{"prompt": f"prompt {i}", "num_tokens": 5, "seed": i} for i in range(n)]
    last = [post_bytes(body, more=CLOSE) for body in bodies]
    alone = [_completions(read_to_end(connect(served, request)))[0] for request in last]
    packet = b"".join(post_bytes(body) for body in bodies[:-1]) + last[-1]
    together = _completions(read_to_end(connect(served, packet)))
    in_place = sum(a == b for a, b in zip(together, alone))
    yield f"{len(together)} of {n} answered, {in_place} of them in their place", together == alone


def _completions(raw: bytes) -> list[bytes]:
    return [part.split(b'"', 1)[0] for part in raw.split(b'"completion":"')[1:]]


DELAY = f"no other client is delayed by over {1e3 * DELAY_S:g} ms"
DROPPED = f"each is dropped after the deadline; {DELAY}"


FAULTS = [
    Fault("ten times more requests than it can serve",
          f"accepted requests are answered; the others get 429 within {REFUSED_S:g} s (p99)",
          overload, {"max_batch_size": 8, "max_waiting": 32}),
    Fault("half of 500 streams are cut",
          "the others get their texts; rows and blocks are free again",
          cut_streams),
    Fault("5,000 silent connections at once",
          f"requests in flight are answered; the process lives; {DELAY}",
          silent, background=True),
    Fault("1,100 clients send their headers a byte now and then", DROPPED,
          partial(trickle, HEAD), DEADLINES, background=True),
    Fault("1,100 clients send their body a byte now and then", DROPPED,
          partial(trickle, BODY), DEADLINES, background=True),
    Fault("40 clients send their bodies in chunks of one byte", f"they are refused; {DELAY}",
          tiny_chunks, background=True),
    Fault("20 HTTP/1.0 clients that do not close", DELAY,
          slow_closers, background=True),
    Fault("4 readers of 8 streams each that stand still",
          f"their rows are computed and freed; {DELAY}",
          still_readers, {"max_batch_size": 64}, background=True),
    Fault("a client closes its own direction and waits",
          "it counts as gone: its row and blocks are free",
          half_close, {"loop_interval_ms": 20}),
    Fault("50 requests in one packet", "all are answered, in their order",
          pipeline),
]  # fmt: skip
