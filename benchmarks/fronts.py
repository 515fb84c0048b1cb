"""What a front end costs: latency and CPU time of a request and of a token, one request at a time,
and throughput of many at once.

    python -m benchmarks.fronts [--rounds 5] [--out results/replicas]

The same through Ray Serve, through HAProxy and at a plain server, each with one replica of the fake
engine, which takes next to no time; rounds take turns. The clients are on the same cores. About
six minutes; nothing else should run.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.clients import JSON, Body, cpu_s, load, processes
from benchmarks.harness import Benchmark, Round, alternate, mean, mean_ratio, run
from compare.deployments import Deployment
from compare.report.tables import formatted, markdown
from compare.servers import ALONE, server
from deploy.kinds import KINDS

ROWS = 8
PROMPT, PROMPT_TOKENS = "hi", 2
NO_TIME = 0.001  # slowdown of an engine that takes next to no time
TOKENS = 100  # of a stream
PLAIN, STREAMS = 150, 15  # requests of a round
IDLE_S = 3.0
CLIENTS = (1, 4, 16, 64)  # at once
STREAMING = 16  # clients of streams
COSTS = {  # heading and form
    "request_ms": ("1 token, ms", "{:.2f}"),
    "stream_ms": (f"stream of {TOKENS}, ms", "{:.1f}"),
    "token_ms": ("a token of it, ms", "{:.3f}"),
    "request_cpu_ms": ("CPU of 1 token, ms", "{:.2f}"),
    "stream_cpu_ms": (f"CPU of {TOKENS}, ms", "{:.1f}"),
    "token_cpu_ms": ("CPU of a token, ms", "{:.3f}"),
}
BENCHMARK = Benchmark(
    "fronts",
    "What a front end costs.",
    {
        "--rounds": (5, "of single requests; of many at once there are two fewer"),
        "--seconds": (4.0, "of each number of clients"),
        "--fronts": ("plain,ray,proxy", "front ends, the plain server first"),
        "--out": (Path("runs/fronts"), "folder"),
    },
)


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


class OneByOne:
    """A server that gets one request at a time over one connection, and its CPU time."""

    def __init__(self, url: str):
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port)
        self._processes = processes(url)

    def close(self) -> None:
        self._connection.close()

    def once(self, tokens: int, stream: bool) -> float:
        """Seconds until the whole answer has come."""
        body = json.dumps(body_of(tokens, stream))
        start = time.perf_counter()
        self._connection.request("POST", "/inference", body, JSON)
        response = self._connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        return time.perf_counter() - start

    def many(self, n: int, tokens: int, stream: bool) -> tuple[float, float]:
        """Milliseconds of a request: the median of its latency, and its CPU time."""
        before = cpu_s(self._processes)
        seconds = [self.once(tokens, stream) for _ in range(n)]
        return 1e3 * statistics.median(seconds), 1e3 * (cpu_s(self._processes) - before) / n

    def idle_cores(self) -> float:
        before = cpu_s(self._processes)
        time.sleep(IDLE_S)
        return (cpu_s(self._processes) - before) / IDLE_S

    def cost(self, plain: int = PLAIN, streams: int = STREAMS) -> Round:
        """One round; of a token: the addition of each after the first one."""
        request_ms, request_cpu_ms = self.many(plain, 1, stream=False)
        stream_ms, stream_cpu_ms = self.many(streams, TOKENS, stream=True)
        return {
            "request_ms": request_ms,
            "stream_ms": stream_ms,
            "token_ms": (stream_ms - request_ms) / (TOKENS - 1),
            "request_cpu_ms": request_cpu_ms,
            "stream_cpu_ms": stream_cpu_ms,
            "token_cpu_ms": (stream_cpu_ms - request_cpu_ms) / (TOKENS - 1),
        }


def costs(fronts: Sequence[str], rounds: int) -> tuple[dict[str, list[Round]], dict[str, float]]:
    """The rounds of each front end, and the cores that it takes while idle."""
    with contextlib.ExitStack() as up:
        urls = {name: up.enter_context(front(name, 1, NO_TIME)) for name in fronts}
        servers = {
            name: up.enter_context(contextlib.closing(OneByOne(url))) for name, url in urls.items()
        }
        for each in servers.values():
            each.cost(PLAIN // 5, 2)  # so that connections, threads and caches are there
        idle = {name: each.idle_cores() for name, each in servers.items()}

        def cost(name: str) -> Round:
            measured = servers[name].cost()
            print(
                f"{name}: {measured['request_ms']:.2f} ms, stream {measured['stream_ms']:.1f} ms",
                flush=True,
            )
            return measured

        return alternate(fronts, cost, rounds), idle


def costs_table(found: Mapping[str, Sequence[Round]], idle: Mapping[str, float]) -> str:
    rows = [["front end", *(heading for heading, _ in COSTS.values()), "cores while idle"]]
    [base, *_] = found.values()
    for name, rounds in found.items():
        cells = [formatted(mean(rounds, key), form) for key, (_, form) in COSTS.items()]
        rows.append([name, *cells, f"{idle[name]:.3f}"])
        if rounds is not base:
            ratios = [formatted(mean_ratio(rounds, base, key), "{:.2f}") for key in COSTS]
            rows.append([f"{name} ÷ plain", *ratios, ""])
    return markdown(rows)


# ---- many at once


def pushed(url: str, seconds: float) -> Round:
    """Throughput and latency of many at once: one token each, then streams."""
    found = {}
    for clients in CLIENTS:
        seen = load(url, lambda: itertools.repeat(body_of(1, stream=False)), clients, seconds)
        found[f"answers_per_s_{clients}"] = seen.answers_per_s
        found[f"p50_ms_{clients}"] = 1e3 * float(np.percentile(seen.latencies_s, 50))
        found[f"p99_ms_{clients}"] = 1e3 * float(np.percentile(seen.latencies_s, 99))
    seen = load(url, lambda: itertools.repeat(body_of(TOKENS, stream=True)), STREAMING, seconds)
    found["streamed_per_s"] = TOKENS * seen.answers_per_s
    return found


def loads(fronts: Sequence[str], rounds: int, seconds: float) -> dict[str, list[Round]]:
    """Each alone on the machine."""

    def one(name: str) -> Round:
        with front(name, 1, NO_TIME) as url:
            measured = pushed(url, seconds)
        most = max(measured[f"answers_per_s_{n}"] for n in CLIENTS)
        print(
            f"{name}: {most:.0f} answers a second, {measured['streamed_per_s']:.0f} tokens a "
            f"second in streams",
            flush=True,
        )
        return measured

    return alternate(fronts, one, rounds)


def loads_table(found: Mapping[str, Sequence[Round]]) -> str:
    heading = ["front end", *(f"answers/s of {n}" for n in CLIENTS)]
    heading += [f"p50, p99 of {n}, ms" for n in CLIENTS]
    rows = [[*heading, f"streamed tokens/s of {STREAMING}"]]
    for name, rounds in found.items():
        cells = [formatted(mean(rounds, f"answers_per_s_{n}"), "{:.0f}") for n in CLIENTS]
        for n in CLIENTS:
            p50, p99 = (mean(rounds, f"{which}_ms_{n}").mean for which in ("p50", "p99"))
            cells.append(f"{p50:.1f}, {p99:.1f}")
        rows.append([name, *cells, formatted(mean(rounds, "streamed_per_s"), "{:.0f}")])
    return markdown(rows)


def main() -> None:
    options = BENCHMARK.parse()
    fronts = options.fronts.split(",")
    one, idle = costs(fronts, options.rounds)
    many = loads(fronts, max(1, options.rounds - 2), options.seconds)
    body = "\n\n".join([
        "## One request at a time",
        costs_table(one, idle),
        "A token is what each one after the first adds to a stream. CPU is that of all processes "
        "of the server, with what they do while idle; ratios are of the same round.",
        "## Many at once",
        loads_table(many),
        "Answers of one token, and streams of "
        f"{TOKENS}; clients ask as soon as they are answered, and take of the same cores.",
    ])  # fmt: skip
    setup = (
        f"one replica in mode dynamic, {ROWS} rows, the fake engine's iterations at {NO_TIME:g} of "
        f"their time; means of {options.rounds} rounds, of {max(1, options.rounds - 2)} where many "
        "ask, ± half of a 95% t interval"
    )
    result = {
        "costs": [
            {"front": name, "idle_cores": idle[name], "seeds": rounds}
            for name, rounds in one.items()
        ],
        "loads": [{"front": name, "seeds": rounds} for name, rounds in many.items()],
    } | BENCHMARK.record()
    BENCHMARK.write(options.out, "What a front end costs", setup, body, result)


if __name__ == "__main__":
    run(main)
