"""What HTTP costs with an engine that computes nothing, and how soon what clients leave is free.

    python -m benchmarks.http [--clients 64] [--tokens 64] [--seconds 5]

Measured are requests and chunks a second and the server's CPU for each, and how long after its
client has gone a request's row and KV blocks are free. A server in mode dynamic with `--model
fake`, on the same machine as the clients of this program, which ask as soon as they are answered.
The fake engine sleeps 1 ms + 0.06 ms a row an iteration: at most 16,667 tokens a second, whatever
HTTP costs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import time
import urllib.parse
from dataclasses import asdict, astuple, dataclass

import aiohttp
import psutil

from client.calls import get, get_text
from client.machine import stamp
from compare.servers import server

REPEATS = 3
GONE = 20


@dataclass
class Found:
    """One round; ms and µs are CPU time of the server, user and system, of all its threads."""

    requests_per_s: float
    tokens_per_s: float
    chunks_per_s: float  # 0 for plain answers
    cpu_ms_per_request: float
    cpu_us_per_token: float
    cpu_us_per_chunk: float  # 0 for plain answers
    server_cores: float
    client_cores: float


@dataclass(frozen=True)
class Case:
    name: str
    route: str
    length: str  # what the route calls the number of tokens
    tokens: int
    stream: bool


async def ask(url: str, case: Case, clients: int, seconds: float) -> tuple[int, int]:
    """Have `clients` ask, each again when it has its answer; return requests and chunks."""
    body = {"prompt": "hi", case.length: case.tokens, "stream": case.stream, "seed": 1}
    requests = chunks = 0
    end = time.perf_counter() + seconds

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal requests, chunks
        while time.perf_counter() < end:
            async with session.post(url + case.route, json=body) as response:
                async for data in response.content.iter_any():
                    chunks += data.count(b"data: ")
                assert response.status == 200, f"{case.name}: {response.status}"
            requests += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(clients)))
    return requests, chunks


def measure(url: str, worker: psutil.Process, case: Case, clients: int, seconds: float) -> Found:
    def used(process: psutil.Process) -> float:
        times = process.cpu_times()
        return times.user + times.system

    ours = psutil.Process()
    start, served, spent = time.perf_counter(), used(worker), used(ours)
    requests, chunks = asyncio.run(ask(url, case, clients, seconds))
    wall, cpu, client_cpu = time.perf_counter() - start, used(worker) - served, used(ours) - spent
    tokens = requests * case.tokens
    return Found(
        requests / wall, tokens / wall, chunks / wall, 1e3 * cpu / requests, 1e6 * cpu / tokens,
        1e6 * cpu / chunks if chunks else 0.0, cpu / wall, client_cpu / wall,
    )  # fmt: skip


JSON = {"Content-Type": "application/json"}


def freed_after_s(url: str, stream: bool) -> float:
    """Seconds from the close of a running request's connection until nothing of it is taken."""

    def taken() -> bool:
        return any(
            float(line.split()[-1])
            for line in get_text(f"{url}/metrics").splitlines()
            if line.startswith(("vllm:num_requests_r", "vllm:kv_cache"))
        )

    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request(
        "POST",
        "/inference",
        json.dumps({"prompt": "hi", "num_tokens": 1000, "stream": stream}),
        JSON,
    )
    while not taken():
        pass
    time.sleep(random.random() / 4)  # the watcher looks four times a second
    connection.close()
    start = time.perf_counter()
    while taken():
        time.sleep(0.002)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="What HTTP costs with an engine that computes nothing.",
    )
    parser.add_argument("--clients", type=int, default=64, help="connections (default: 64)")
    parser.add_argument(
        "--tokens", type=int, default=64, help="completion tokens of a request (default: 64)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5,
        help="of each round; there are three of each kind (default: 5)",
    )
    options = parser.parse_args()
    cases = [
        Case("plain, 1 token", "/inference", "num_tokens", 1, stream=False),
        Case("plain", "/inference", "num_tokens", options.tokens, stream=False),
        Case("streaming", "/inference", "num_tokens", options.tokens, stream=True),
        Case("streaming, OpenAI", "/v1/completions", "max_tokens", options.tokens, stream=True),
    ]
    rounds: dict[str, list[Found]] = {case.name: [] for case in cases}
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        worker = psutil.Process(get(url)["pids"][0])
        asyncio.run(ask(url, cases[2], options.clients, 1.0))  # every thread has been started
        for _ in range(REPEATS):
            for case in cases:
                rounds[case.name].append(
                    found := measure(url, worker, case, options.clients, options.seconds)
                )
                print(f"{case.name:18} {show(found)}", flush=True)
        gone = {
            kind: [freed_after_s(url, kind == "streaming") for _ in range(GONE)]
            for kind in ("plain", "streaming")
        }
        cancelled = get(f"{url}/stats")["cancelled"]
    medians = {
        name: Found(*(statistics.median(values) for values in zip(*map(astuple, found))))
        for name, found in rounds.items()
    }
    print(
        f"\nmedians of {REPEATS} rounds, {options.clients} clients, "
        f"{options.tokens} tokens a request:"
    )
    for name, found in medians.items():
        print(f"{name:18} {show(found)}")
    if cancelled < 2 * GONE:  # left alone it takes a second
        print(
            f"{2 * GONE - cancelled} requests ended by themselves before the server could notice: "
            f"this machine is very busy"
        )
    for name in ("streaming", "streaming, OpenAI"):
        more = medians[name].cpu_us_per_token - medians["plain"].cpu_us_per_token
        print(
            f"{name}: {medians[name].cpu_us_per_chunk:.0f} µs of CPU a chunk; "
            f"{more:.0f} µs a token more than a plain answer"
        )
    for kind, seconds in gone.items():
        print(
            f"a {kind} client goes away: its row and blocks are free after "
            f"{1e3 * statistics.median(seconds):.0f} ms "
            f"(median of {GONE}; longest {1e3 * max(seconds):.0f} ms)"
        )
    record: dict[str, object] = {
        "clients": options.clients,
        "tokens": options.tokens,
        "seconds": options.seconds,
    }
    record |= {
        "rounds": {name: [asdict(found) for found in several] for name, several in rounds.items()},
        "freed_after_s": gone,
    }
    print(json.dumps(record | stamp()))


def show(found: Found) -> str:
    return (
        f"{found.requests_per_s:5,.0f} requests/s {found.tokens_per_s:6,.0f} tokens/s "
        f"{found.chunks_per_s:6,.0f} chunks/s  "
        f"CPU {found.cpu_ms_per_request:5.2f} ms a request, "
        f"{found.cpu_us_per_token:5.0f} µs a token  "
        f"(cores: server {found.server_cores:.2f}, clients {found.client_cores:.2f})"
    )


if __name__ == "__main__":
    main()
