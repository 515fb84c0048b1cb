"""Costs of HTTP and a front end, with an engine that takes next to no time.

    python -m benchmarks.http [--fronts plain,proxy,ray] [--clients 64] [--out FOLDER]

A server of the fake engine, alone (plain) or as the one replica behind HAProxy or Ray Serve, on the
same machine as the clients, each of which asks again once it is answered. Rounds take turns.
Nothing else should run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from benchmarks.harness import Benchmark, Round, alternate, mean, run
from compare.deployments import Deployment
from compare.report.tables import formatted, markdown
from compare.servers import ALONE, server
from deploy.kinds import KINDS

SETTINGS = {"model": "fake", "fake_slowdown": 0.001, "max_batch_size": 256, "live": "off"}
WARM_S = 1.0  # of clients, before their answers count
COLUMNS = {  # heading and form; CPU is that of all processes of the server
    "requests_per_s": ("requests/s", "{:,.0f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "chunks_per_s": ("chunks/s", "{:,.0f}"),  # 0 for plain answers
    "p50_ms": ("latency p50, ms", "{:.2f}"),
    "p99_ms": ("p99, ms", "{:.2f}"),
    "cpu_ms_per_request": ("CPU a request, ms", "{:.2f}"),
    "cpu_us_per_token": ("CPU a token, µs", "{:.0f}"),
    "cpu_us_per_chunk": ("CPU a chunk, µs", "{:.0f}"),  # 0 for plain answers
}
COMPARED = ("p50_ms", "cpu_ms_per_request", "cpu_us_per_token")  # of front ends, as ratios
BENCHMARK = Benchmark(
    "http",
    "What HTTP and a front end cost.",
    {
        "--fronts": ("plain", f"front ends: plain, {', '.join(KINDS)}, separated by commas"),
        "--clients": (64, "connections; each kind of traffic is measured with one client, too"),
        "--tokens": (64, "completion tokens of a request"),
        "--seconds": (4.0, "seconds of each kind of traffic in a round"),
        "--rounds": (3, "rounds of each front end"),
        "--out": (Path("runs/http"), "folder"),
    },
)


class Traffic(NamedTuple):
    """Clients that all send the same request."""

    clients: int
    tokens: int
    stream: bool = False
    route: str = "/inference"

    @property
    def name(self) -> str:
        answers = f"streams of {self.tokens}" if self.stream else f"answers of {self.tokens}"
        form = " in OpenAI's form" if self.route != "/inference" else ""
        return f"{self.clients} × {answers}{form}"

    @property
    def body(self) -> dict[str, Any]:
        limit = "num_tokens" if self.route == "/inference" else "max_tokens"
        return {"prompt": "hi", "seed": 1, limit: self.tokens, "stream": self.stream}


def kinds(clients: int, tokens: int) -> list[Traffic]:
    return [
        *(Traffic(n, *of) for n in (1, clients) for of in ((1,), (tokens,), (tokens, True))),
        Traffic(clients, tokens, True, "/v1/completions"),
    ]


def cpu_s() -> float:
    """CPU time so far, user and system, of the server, which is all that this process started."""
    spent = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in spent)


async def load(url: str, traffic: Traffic, seconds: float) -> dict[str, float]:
    """Let clients send requests all the time; return the measurements of COLUMNS, after WARM_S."""
    latencies_s: list[float] = []
    chunks = 0

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal chunks
        while True:
            start = time.perf_counter()
            async with session.post(url + traffic.route, json=traffic.body) as response:
                async for data in response.content.iter_any():
                    chunks += data.count(b"data: ")
                assert response.status == 200, response.status
            latencies_s.append(time.perf_counter() - start)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(session)) for _ in range(traffic.clients)]
        await asyncio.sleep(WARM_S)
        start, spent_s = time.perf_counter(), cpu_s()
        latencies_s.clear()
        chunks = 0
        await asyncio.sleep(seconds)
        took_s, spent_s = time.perf_counter() - start, cpu_s() - spent_s
        seen, n_chunks = np.array(latencies_s), chunks
        for task in tasks:
            task.cancel()
    n, n_tokens = len(seen), traffic.tokens * len(seen)
    return {
        "requests_per_s": n / took_s, "tokens_per_s": n_tokens / took_s,
        "chunks_per_s": n_chunks / took_s, "p50_ms": 1e3 * float(np.percentile(seen, 50)),
        "p99_ms": 1e3 * float(np.percentile(seen, 99)), "cpu_ms_per_request": 1e3 * spent_s / n,
        "cpu_us_per_token": 1e6 * spent_s / n_tokens,
        "cpu_us_per_chunk": 1e6 * spent_s / n_chunks if n_chunks else 0.0,
    }  # fmt: skip


def measure(front: str, traffics: Sequence[Traffic], seconds: float) -> dict[str, dict[str, float]]:
    """One round of a front end: the measurements of each kind of traffic."""
    start = ALONE if front == "plain" else Deployment(front, 1, KINDS[front].routers[0]).start
    print(front, flush=True)
    with server("dynamic", SETTINGS, name=front, start=start) as url:
        return {each.name: asyncio.run(load(url, each, seconds)) for each in traffics}


def table(rounds: Mapping[str, Mapping[str, Sequence[Round]]]) -> str:
    """A line for each kind of traffic and front end, and one of each other front end's ratios to
    the first one's.
    """
    rows = [["traffic", "front end", *(heading for heading, _ in COLUMNS.values())]]
    [base, *_] = rounds
    for name in rounds[base]:
        for front, measured in rounds.items():
            means = [(mean(measured[name], key), form) for key, (_, form) in COLUMNS.items()]
            rows.append([name, front, *(formatted(*each) for each in means)])
            if front != base:
                ratios = {
                    key: formatted(mean(measured[name], key, rounds[base][name]), "{:.2f}")
                    for key in COMPARED
                }
                rows.append([name, f"{front} ÷ {base}", *(ratios.get(key, "") for key in COLUMNS)])
    return markdown(rows, left=2)


def main() -> None:
    options = BENCHMARK.parser().parse_args()
    traffics = kinds(options.clients, options.tokens)
    fronts = options.fronts.split(",")
    turns = alternate(fronts, lambda name: measure(name, traffics, options.seconds), options.rounds)
    rounds = {
        front: {each.name: [turn[each.name] for turn in taken] for each in traffics}
        for front, taken in turns.items()
    }
    setup = (
        f"one server in mode dynamic, {SETTINGS['max_batch_size']} rows, the fake engine's "
        f"iterations at {SETTINGS['fake_slowdown']:g} of their time; means of {options.rounds} "
        "rounds ± half of a 95% t interval; CPU is that of all processes of the server"
    )
    result = {"rounds": rounds} | BENCHMARK.record()
    BENCHMARK.write(options.out, "What HTTP costs", setup, table(rounds), result)


if __name__ == "__main__":
    run(main)
