"""Clients that are too many, too slow, or gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import numpy as np

from benchmarks.faults.tools import (
    CLOSE,
    DELAY_S,
    REFUSED_S,
    SLACK,
    Neighbour,
    Seen,
    Served,
    allow_open_files,
    asks,
    connect,
    fault,
    post_bytes,
    read_to_end,
    serving,
    until,
)  # fmt: skip
from client.calls import get
from client.load import replay
from generate.fake import ITERATION_S, ROW_S

TRICKLERS = 1100  # more than a server with the default settings has HTTP threads
SILENT = 5000
HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\n"
DELAY = f"nobody else is delayed by over {1e3 * DELAY_S:g} ms"


@fault(
    "ten times more requests than it can serve",
    f"what is accepted is answered; the others get 429 within {REFUSED_S:g} s (p99)",
)
def overload(short: bool) -> Seen:
    seconds, rows, tokens = (2 if short else 10), 8, 400
    capacity = rows / (tokens * (ITERATION_S + rows * ROW_S))  # requests a second
    requests = asks(int(10 * capacity * seconds), tokens, a_second=10 * capacity)
    with serving({"max_batch_size": rows, "max_waiting": 32}) as served:
        outcomes = replay(served.url, requests)
        stats = get(f"{served.url}/stats")
    answered = [outcome for outcome in outcomes if outcome.answer]
    refused = [outcome for outcome in outcomes if outcome.error.startswith("429 ")]
    p99 = float(np.percentile([o.ended_at - o.sent_at for o in refused], 99))
    counted = stats["completed"] == len(answered) and stats["refused"] == len(refused)
    text = (
        f"{len(outcomes)} sent, {len(answered)} answered, "
        f"{len(refused)} refused (p99 {1e3 * p99:.0f} ms)"
    )
    if len(answered) + len(refused) < len(outcomes):
        text += f"; {Counter(o.error for o in outcomes if o not in answered and o not in refused)}"
    kept = (
        counted
        and len(answered) + len(refused) == len(outcomes)
        and p99 < REFUSED_S * (SLACK if short else 1)
    )
    return Seen(text if counted else f"{text}; /stats counts otherwise", kept)


@fault("half of 500 streams are cut", "the others get their texts; rows and blocks are free again")
def cut_streams(short: bool) -> Seen:
    n, tokens, prompts = (60 if short else 500), 100, 10

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

    with serving({}) as served:
        alone = asyncio.run(all_at_once(served.url, prompts))
        texts = asyncio.run(all_at_once(served.url, n))
        freed = until(served.is_free)
    rest = [i for i in range(n) if i < prompts or i % 2 == 0]
    whole = sum(texts[i] == alone[i % prompts] for i in rest)
    end = "never" if freed is None else f"{freed:.1f} s after the last"
    text = (
        f"{whole} of the {len(rest)} others got the text that they get without it; "
        f"rows and blocks free {end}"
    )
    return Seen(text, whole == len(rest) and freed is not None)


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
            # who finds no place in the backlog tries again, and may wait longer
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


@fault(
    "5,000 silent connections at once", f"who is in flight is answered; the process lives; {DELAY}"
)
def silent(short: bool) -> Seen:
    n = min(SILENT, allow_open_files(SILENT + 200) - 200)
    with serving({}) as served, Neighbour(served) as neighbour:
        worker = served.worker.pid
        ask = [
            post_bytes({"prompt": "hi", "num_tokens": 900, "seed": i}, more=CLOSE)
            for i in range(20)
        ]
        flying = [connect(served, data) for data in ask]
        with many(served, n, b""):
            answered = sum(b" 200 OK" in read_to_end(connection)[:20] for connection in flying)
            time.sleep(0.5 if short else 5)
        lives = served.worker.pid == worker
    end = "lives" if lives else "was replaced"
    text = (
        f"{n} connections: {answered} of 20 in flight answered; the process {end}; {neighbour.said}"
    )
    return Seen(text, answered == 20 and lives and neighbour.fared_well(short))


def trickle(head: bytes) -> Callable[[bool], Seen]:
    """Clients that send `head`, and then a byte now and then."""

    def run(short: bool) -> Seen:
        n = min(TRICKLERS, allow_open_files(TRICKLERS + 200) - 200)
        deadline_s = 1 if short else 10
        settings = {"header_timeout_s": deadline_s, "body_timeout_s": deadline_s}
        with (
            serving(settings) as served,
            Neighbour(served) as neighbour,
            many(served, n, head) as slow,
        ):
            start, left = time.monotonic(), set(slow)
            while left and time.monotonic() - start < 3 * deadline_s:
                left = {connection for connection in left if _goes_on(connection)}
                time.sleep(deadline_s / 10)
            dropped_s = time.monotonic() - start
        text = (
            f"{n - len(left)} of {n} dropped within {dropped_s:.0f} s "
            f"(deadline {deadline_s} s); {neighbour.said}"
        )
        return Seen(text, not left and neighbour.fared_well(short))

    return run


def _goes_on(connection: socket.socket) -> bool:
    """Send one more byte; whether the server still waits for the rest."""
    try:
        connection.send(b"x")
        connection.recv(1000)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


dropped = f"each is dropped after the deadline; {DELAY}"
fault("1,100 clients send their headers a byte now and then", dropped)(trickle(HEAD))
JSON = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
fault("1,100 clients send their body a byte now and then", dropped)(trickle(HEAD + JSON))


@fault("40 clients send their bodies in chunks of one byte", f"they are refused; {DELAY}")
def tiny_chunks(short: bool) -> Seen:
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000
    answers: Counter[bytes] = Counter()

    def send(served: Served) -> None:
        end = time.monotonic() + (2 if short else 10)
        while time.monotonic() < end:
            connection = connect(served)
            with contextlib.suppress(OSError):  # it is refused before all of it is sent
                connection.sendall(raw)
            answers[read_to_end(connection)[9:12]] += 1

    with (
        serving({}) as served,
        Neighbour(served) as neighbour,
        ThreadPoolExecutor(40) as clients,
    ):
        list(clients.map(send, [served] * 40))
    kinds = ", ".join(f"{n} × {kind.decode() or 'closed'}" for kind, n in answers.items())
    kept = {*answers} <= {b"400", b""} and answers[b"400"] > 0 and neighbour.fared_well(short)
    return Seen(f"{kinds}; {neighbour.said}", kept)


@fault("20 HTTP/1.0 clients that do not close", DELAY)
def slow_closers(short: bool) -> Seen:
    with serving({}) as served, Neighbour(served) as neighbour:
        ask = post_bytes({"prompt": "hi", "num_tokens": 1}, version="1.0")
        kept = [connect(served, ask) for _ in range(20)]
        answered = sum(b" 200 OK" in connection.recv(1000) for connection in kept)
        time.sleep(0.5 if short else 5)
        for connection in kept:
            connection.close()
    return Seen(
        f"{answered} of 20 answered; {neighbour.said}",
        answered == 20 and neighbour.fared_well(short),
    )


@fault(
    "4 readers of 8 streams each that stand still", f"their rows are computed and freed; {DELAY}"
)
def still_readers(short: bool) -> Seen:
    ask = {"prompt": ["hi"] * 8, "max_tokens": 1000, "seed": 1, "stream": True}
    with serving({"max_batch_size": 64}) as served, Neighbour(served) as neighbour:
        still = [connect(served, post_bytes(ask, "/v1/completions")) for _ in range(4)]
        begun = until(lambda: served.metric("vllm:num_requests_running") >= 32)
        freed = until(lambda: served.metric("vllm:num_requests_running") < 32)
        for connection in still:
            connection.close()
    done = (
        "their rows are not free"
        if freed is None
        else f"all 32 rows were computed and free after {freed:.1f} s"
    )
    kept = begun is not None and freed is not None and neighbour.fared_well(short)
    return Seen(f"{done}; {neighbour.said}", kept)


@fault(
    "a client closes its own direction and waits", "it counts as gone: its row and blocks are free"
)
def half_close(short: bool) -> Seen:
    with serving({"loop_interval_ms": 20}) as served:
        connection = connect(served, post_bytes({"prompt": "hi", "num_tokens": 1000}))
        until(lambda: served.metric("vllm:num_requests_running") == 1)
        connection.shutdown(socket.SHUT_WR)
        freed = until(served.is_free, 10)
        connection.close()
    if freed is None:
        return Seen("it kept its row", False)
    return Seen(
        f"its row and blocks were free after {freed:.2f} s of the 20 s that its answer takes", True
    )


@fault("50 requests in one packet", "all are answered, in their order")
def pipeline(short: bool) -> Seen:
    n = 50
    bodies = [{"prompt": f"prompt {i}", "num_tokens": 5, "seed": i} for i in range(n)]
    with serving({}) as served:
        alone = [read_to_end(connect(served, post_bytes(body, more=CLOSE))) for body in bodies]
        packet = b"".join(post_bytes(body) for body in bodies[:-1]) + post_bytes(
            bodies[-1], more=CLOSE
        )
        together = read_to_end(connect(served, packet))
    texts = [_completions(raw)[0] for raw in alone]
    found = _completions(together)
    in_place = sum(a == b for a, b in zip(found, texts))
    return Seen(f"{len(found)} of {n} answered, {in_place} of them in their place", found == texts)


def _completions(raw: bytes) -> list[bytes]:
    return [part.split(b'"', 1)[0] for part in raw.split(b'"completion":"')[1:]]
