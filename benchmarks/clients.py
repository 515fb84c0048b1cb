"""Clients in a closed loop, each of which asks again once it is answered, and the CPU time that the
server and they take meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from client.calls import get

WARM_S = 1.0


def processes(url: str) -> list[psutil.Process]:
    """All processes of a server that this process started."""
    [worker, *_] = get(url)["pids"]
    chain = [psutil.Process(worker), *psutil.Process(worker).parents()]
    [top] = [process for process in chain if process.ppid() == os.getpid()]
    return [top, *top.children(recursive=True)]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU time so far, user and system."""
    spent = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in spent)


@dataclass(frozen=True)
class Load:
    """Latencies of clients and CPU times, in the seconds that were measured."""

    latencies_s: list[float]  # of each answer
    chunks: int  # events of streams
    seconds: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def answers_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds


def load(
    url: str, body: Mapping[str, Any], clients: int, seconds: float, route: str = "/inference"
) -> Load:
    """Have clients ask for the same again and again; measure after WARM_S."""
    return asyncio.run(_load(url + route, body, clients, seconds, processes(url)))


async def _load(
    address: str,
    body: Mapping[str, Any],
    clients: int,
    seconds: float,
    servers: Sequence[psutil.Process],
) -> Load:
    latencies_s: list[float] = []
    chunks = 0

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal chunks
        while True:
            start = time.perf_counter()
            async with session.post(address, json=body) as response:
                async for data in response.content.iter_any():
                    chunks += data.count(b"data: ")
                assert response.status == 200, response.status
            latencies_s.append(time.perf_counter() - start)

    connector, us = aiohttp.TCPConnector(limit=0), [psutil.Process()]
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(session)) for _ in range(clients)]
        await asyncio.sleep(WARM_S)
        start, server_s, client_s = time.perf_counter(), cpu_s(servers), cpu_s(us)
        latencies_s.clear()
        chunks = 0
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - start
        measured = Load(
            [*latencies_s], chunks, took_s, cpu_s(servers) - server_s, cpu_s(us) - client_s
        )
        for task in tasks:
            task.cancel()
    return measured
