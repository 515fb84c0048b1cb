"""Costs of HTTP and of a front end, with an engine that takes next to no time.

A server of the fake engine, alone (`plain`) or as the one replica on Ray Serve (`ray`), on the same
machine as the clients, each of which asks again once it is answered.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from compare.deployments import Deployment
from compare.servers import ALONE, server
from config import ConfigError
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Cases, Study, Table

SETTINGS = {"model": "fake", "fake_slowdown": 0.001, "max_batch_size": 256, "live": "off"}
WARM_S, SECONDS = 1.0, 4.0  # of clients, before their answers count, and while they do
PLAIN = {"front": "plain"}
FRONTS = {"plain": ALONE, "ray": Deployment(1).start}  # Python's arguments that start a server


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


def cases(n: int, fronts: str, clients: int, tokens: int) -> list[dict[str, Any]]:
    """Return a case for each front end. Raises ConfigError for an unknown one."""
    names = fronts.split(",")
    if unknown := {*names} - {*FRONTS}:
        raise ConfigError(f"--fronts {min(unknown)}: name some of {', '.join(FRONTS)}")
    return [{"front": name, "clients": clients, "tokens": tokens} for name in names]


def cpu_s() -> float:
    """CPU time so far, user and system, of the server, which is all that this process started."""
    spent = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in spent)


async def load(url: str, traffic: Traffic) -> dict[str, float]:
    """Let clients send requests all the time; return the measures of SECONDS, after WARM_S."""
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
        await asyncio.sleep(SECONDS)
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


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return the measures of each kind of traffic, all of which one server gets."""
    front, traffics = case["front"], kinds(case["clients"], case["tokens"])
    with server("dynamic", SETTINGS, name=front, start=FRONTS[front]) as url:
        return {each.name: asyncio.run(load(url, each)) for each in traffics}


def by_traffic(by_front: Cases, **options: Any) -> list[dict[str, Any]]:
    """Return a case for each kind of traffic and front end."""
    return [
        {"traffic": name, "front": case["front"], "seeds": [seed[name] for seed in case["seeds"]]}
        for name in by_front[0]["seeds"][0]
        for case in by_front
    ]


STUDY = Study(
    name="http",
    title="What HTTP costs",
    question="How much time and CPU do HTTP and a front end take for a request, a token and a "
    "chunk?",
    workload=f"one server in mode dynamic, {SETTINGS['max_batch_size']} rows, the fake engine's "
    f"iterations at {SETTINGS['fake_slowdown']} of their time, {{seeds}} rounds of {SECONDS:g} s "
    "of each kind of traffic",
    requests=0,
    seeds=3,
    options={
        "fronts": ("plain", f"front ends: {', '.join(FRONTS)}, separated by commas"),
        "clients": (64, "connections; each kind of traffic is measured with one client, too"),
        "tokens": (64, "completion tokens of a request"),
    },
    cases=cases,
    run=run,
    servers=True,
    summarized=by_traffic,
    measures={
        "requests_per_s": ("requests/s", "{:,.0f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "chunks_per_s": ("chunks/s", "{:,.0f}"),
        "p50_ms": ("latency p50, ms", "{:.2f}"),
        "p99_ms": ("p99, ms", "{:.2f}"),
        "cpu_ms_per_request": ("CPU a request, ms", "{:.2f}"),
        "cpu_us_per_token": ("CPU a token, µs", "{:.0f}"),
        "cpu_us_per_chunk": ("CPU a chunk, µs", "{:.0f}"),
    },
    text="CPU is that of all processes of the server. Plain answers have no chunks. Nothing else "
    "should run on the machine, which clients and server share.",
    tables=[
        Table(("traffic", "front"),
              against=[Against(PLAIN, ratios=("p50_ms", "cpu_ms_per_request", "cpu_us_per_token"))])
    ],
)  # fmt: skip
