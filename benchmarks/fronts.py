"""What a front end costs: latency and CPU time of a request and of a token, one request at a time,
and what it gives when many ask at once.

    python -m benchmarks.fronts [--rounds 5] [--out results/replicas]

The same through Ray Serve, through HAProxy and at a plain server, each with one replica of the fake
engine, which takes next to no time; rounds take turns. The clients are on the same cores. About
six minutes; nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from benchmarks.common import run
from client.calls import get
from compare.deployments import Deployment
from compare.report.tables import formatted, markdown
from compare.servers import ALONE, server
from deploy.kinds import KINDS
from studies.runner import Page, write
from studies.study import Case, mean, ratio

PAGE = Page("benchmarks.fronts", "fronts", "What a front end costs")
ROWS = 8
PROMPT, PROMPT_TOKENS = "hi", 2
NO_TIME = 0.001  # slowdown of an engine that takes next to no time
TOKENS = 100  # of a stream
PLAIN, STREAMS = 150, 15  # requests of a round
IDLE_S = 3.0
CLIENTS = (1, 4, 16, 64)  # who ask at once
STREAMING = 16  # clients of streams
WARM_S = 1.0
JSON = {"Content-Type": "application/json"}
Round = dict[str, float]
Body = dict[str, Any]


def body_of(tokens: int, stream: bool) -> Body:
    return {"prompt": PROMPT, "num_tokens": tokens, "stream": stream}


@contextlib.contextmanager
def front(name: str, replicas: int, slowdown: float, router: int = 0) -> Iterator[str]:
    """URL of a front end of KINDS with fake servers behind it, or of a plain one."""
    settings = {"model": "fake", "fake_slowdown": slowdown, "max_batch_size": ROWS, "live": "off"}
    start = ALONE
    if name != "plain":
        start = Deployment(name, replicas, KINDS[name].routers[router]).start
    with server("dynamic", settings, name=name, start=start) as url:
        yield url


# ---- one request at a time


class Asked:
    """A server, asked one request at a time over one connection, and the CPU time of all of its
    processes.
    """

    def __init__(self, url: str):
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port)
        chain = [psutil.Process(get(url)["pids"][0])]
        chain += chain[0].parents()
        [top] = [process for process in chain if process.ppid() == os.getpid()]
        self._processes = [top, *top.children(recursive=True)]

    def close(self) -> None:
        self._connection.close()

    def cpu_s(self) -> float:
        spent = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in spent)

    def once(self, tokens: int, stream: bool) -> float:
        """Seconds until the whole answer is here."""
        body = json.dumps(body_of(tokens, stream))
        start = time.perf_counter()
        self._connection.request("POST", "/inference", body, JSON)
        response = self._connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        return time.perf_counter() - start

    def many(self, n: int, tokens: int, stream: bool) -> tuple[float, float]:
        """Milliseconds of a request: the median of its latency, and its CPU time."""
        before = self.cpu_s()
        took = [self.once(tokens, stream) for _ in range(n)]
        return 1e3 * statistics.median(took), 1e3 * (self.cpu_s() - before) / n

    def idle_cores(self) -> float:
        before = self.cpu_s()
        time.sleep(IDLE_S)
        return (self.cpu_s() - before) / IDLE_S


def cost(asked: Asked, plain: int = PLAIN, streams: int = STREAMS) -> Round:
    """One round; of a token: what each after the first one adds."""
    request_ms, request_cpu_ms = asked.many(plain, 1, stream=False)
    stream_ms, stream_cpu_ms = asked.many(streams, TOKENS, stream=True)
    return {
        "request_ms": request_ms,
        "stream_ms": stream_ms,
        "token_ms": (stream_ms - request_ms) / (TOKENS - 1),
        "request_cpu_ms": request_cpu_ms,
        "stream_cpu_ms": stream_cpu_ms,
        "token_cpu_ms": (stream_cpu_ms - request_cpu_ms) / (TOKENS - 1),
    }


COSTS = {  # heading and form
    "request_ms": ("1 token, ms", "{:.2f}"),
    "stream_ms": (f"stream of {TOKENS}, ms", "{:.1f}"),
    "token_ms": ("a token of it, ms", "{:.3f}"),
    "request_cpu_ms": ("CPU of 1 token, ms", "{:.2f}"),
    "stream_cpu_ms": (f"CPU of {TOKENS}, ms", "{:.1f}"),
    "token_cpu_ms": ("CPU of a token, ms", "{:.3f}"),
}


def costs(fronts: Sequence[str], rounds: int) -> list[Case]:
    found: dict[str, list[Round]] = {name: [] for name in fronts}
    with contextlib.ExitStack() as up:
        urls = {name: up.enter_context(front(name, 1, NO_TIME)) for name in fronts}
        each = {
            name: up.enter_context(contextlib.closing(Asked(url))) for name, url in urls.items()
        }
        for asked in each.values():
            cost(asked, PLAIN // 5, 2)  # what is done once is done
        idle = {name: asked.idle_cores() for name, asked in each.items()}
        for k in range(rounds):
            for name in fronts if k % 2 == 0 else fronts[::-1]:
                found[name].append(mine := cost(each[name]))
                print(f"{name}: {mine['request_ms']:.2f} ms, stream {mine['stream_ms']:.1f} ms",
                      flush=True)  # fmt: skip
    return [
        {"front": name, "idle_cores": idle[name], "seeds": mine} for name, mine in found.items()
    ]


def costs_table(cases: Sequence[Case]) -> str:
    rows = [["front end", *(heading for heading, _ in COSTS.values()), "cores while idle"]]
    plain = cases[0]
    for case in cases:
        cells = [formatted(mean(case, key), form) for key, (_, form) in COSTS.items()]
        rows.append([case["front"], *cells, f"{case['idle_cores']:.3f}"])
        if case is not plain:
            ratios = [formatted(ratio(plain, case, key), "{:.2f}") for key in COSTS]
            rows.append([f"{case['front']} ÷ plain", *ratios, ""])
    return markdown(rows)


# ---- many at once


class Busy(NamedTuple):
    """What clients found while they asked."""

    took_s: list[float]  # of each answer
    seconds: float
    busy_percent: float  # of all cores, clients too


def asking(
    url: str,
    clients: int,
    seconds: float,
    bodies: Callable[[], Iterator[Body]],
    warm_s: float,
) -> Busy:
    """Clients that ask as soon as they are answered, each what its `bodies` give; counted is what
    is answered after `warm_s`.
    """
    return asyncio.run(_asking(url, clients, seconds, bodies, warm_s))


async def _asking(
    url: str, clients: int, seconds: float, bodies: Callable[[], Iterator[Body]], warm_s: float
) -> Busy:
    took: list[float] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        for body in bodies():
            start = time.perf_counter()
            async with session.post(f"{url}/inference", json=body) as response:
                await response.read()
                assert response.status == 200, response.status
            took.append(time.perf_counter() - start)

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(ask(session)) for _ in range(clients)]
        await asyncio.sleep(warm_s)
        psutil.cpu_percent()  # of /proc/stat, from here on
        began, before = time.perf_counter(), len(took)
        await asyncio.sleep(seconds)
        found = Busy(took[before:], time.perf_counter() - began, psutil.cpu_percent())
        for task in tasks:
            task.cancel()
    return found


def pushed(url: str, seconds: float) -> Round:
    """What comes of it if many ask at once: one token each, then streams."""
    found: Round = {}

    def one_token() -> Iterator[Body]:
        return itertools.repeat(body_of(1, stream=False))

    def streams() -> Iterator[Body]:
        return itertools.repeat(body_of(TOKENS, stream=True))

    for clients in CLIENTS:
        busy = asking(url, clients, seconds, one_token, WARM_S)
        found[f"answers_per_s_{clients}"] = len(busy.took_s) / busy.seconds
        found[f"p50_ms_{clients}"] = 1e3 * float(np.percentile(busy.took_s, 50))
        found[f"p99_ms_{clients}"] = 1e3 * float(np.percentile(busy.took_s, 99))
    busy = asking(url, STREAMING, seconds, streams, WARM_S)
    found["streamed_per_s"] = TOKENS * len(busy.took_s) / busy.seconds
    return found


def loads(fronts: Sequence[str], rounds: int, seconds: float) -> list[Case]:
    """Each alone on the machine."""
    found: dict[str, list[Round]] = {name: [] for name in fronts}
    for k in range(rounds):
        for name in fronts if k % 2 == 0 else fronts[::-1]:
            with front(name, 1, NO_TIME) as url:
                found[name].append(mine := pushed(url, seconds))
            most = max(mine[f"answers_per_s_{n}"] for n in CLIENTS)
            print(f"{name}: {most:.0f} answers a second, {mine['streamed_per_s']:.0f} tokens a "
                  "second in streams", flush=True)  # fmt: skip
    return [{"front": name, "seeds": mine} for name, mine in found.items()]


def loads_table(cases: Sequence[Case]) -> str:
    rows = [["front end", *(f"answers/s of {n}" for n in CLIENTS)]]
    rows[0] += [*(f"p50, p99 of {n}, ms" for n in CLIENTS), f"streamed tokens/s of {STREAMING}"]
    for case in cases:
        rows.append([
            case["front"],
            *(formatted(mean(case, f"answers_per_s_{n}"), "{:.0f}") for n in CLIENTS),
            *(f"{mean(case, f'p50_ms_{n}').mean:.1f}, {mean(case, f'p99_ms_{n}').mean:.1f}"
              for n in CLIENTS),
            formatted(mean(case, "streamed_per_s"), "{:.0f}"),
        ])  # fmt: skip
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PAGE.module}", description="What a front end costs."
    )
    add = parser.add_argument
    add(
        "--rounds",
        type=int,
        default=5,
        help="of single requests; of many fewer by two (default: 5)",
    )
    add("--seconds", type=float, default=4, help="of each number of clients (default: 4)")
    add("--fronts", default="plain,ray,proxy", help="(default: plain,ray,proxy)")
    add("--out", type=Path, default=Path("runs") / PAGE.name, help="folder")
    options = parser.parse_args()
    fronts = options.fronts.split(",")
    one = costs(fronts, options.rounds)
    many = loads(fronts, options.rounds - 2, options.seconds)
    body = "\n\n".join([
        "## One request at a time",
        costs_table(one),
        "A token is what each one after the first adds to a stream. CPU is that of all processes "
        "of the server, with what they do while idle; ratios are of the same round.",
        "## Many at once",
        loads_table(many),
        "Answers of one token, and streams of "
        f"{TOKENS}; clients ask as soon as they are answered, and take of the same cores.",
    ])  # fmt: skip
    told_of = (
        f"one replica in mode dynamic, {ROWS} rows, the fake engine's iterations at {NO_TIME:g} of "
        f"their time; means of {options.rounds} rounds, of {options.rounds - 2} where many ask, "
        "± half of a 95% t interval"
    )
    write(PAGE, options.out, told_of, body, None, {"costs": one, "loads": many})


if __name__ == "__main__":
    run(main)
