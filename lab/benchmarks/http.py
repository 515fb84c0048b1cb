"""HTTP beside the engine: a burst at a card's speed by one HTTP process and by several, in turn.

    python -m lab.benchmarks.http [--processes 3] [--pairs 5] [--requests 768] [--engine-core N]

The fake engine takes the time of a card for an iteration. Of each burst, whole and streamed: tokens
per second, CPU of the server and of this client per request, and the median time from one full
iteration to the next, over that of the same burst without HTTP. Then the mean latency of 8 tokens
with 4 clients in flight. `--engine-core 0` gives the engine that core for itself, and the others
all else.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from client.calls import get, post
from client.load import replay
from client.traces import Request
from client.wire import Plain, Streaming
from compare.servers import ALONE, launched, wait_until_ready
from config.config import Config
from config.settings import ConfigError
from generate.auto import build
from lab.benchmarks.harness import Benchmark, run
from lab.benchmarks.workload import draw
from server.engine import LocalEngine
from server.request import Request as Asked

ROWS = 256
SETTINGS = {"model": "fake", "fake_slowdown": 0.15, "max_batch_size": ROWS, "max_waiting": 4096}
IN_FLIGHT, SHORT, TIMES = 4, 8, 200  # clients, tokens and requests of the latencies
BENCHMARK = Benchmark(
    "http",
    __doc__,
    {
        "--processes": (3, "HTTP processes, beside one"),
        "--pairs": (5, "times that both are measured, each first in every other pair"),
        "--requests": (768, "requests of a burst"),
        "--engine-core": (-1, "core of the engine's process alone; -1: none"),
    },
)


def lengths(n: int) -> list[tuple[int, int]]:
    """Prompt and completion tokens of n requests, in turn those of the peers' burst."""
    drawn = [(len(prompt), tokens) for prompt, tokens in draw()]
    return [drawn[i % len(drawn)] for i in range(n)]


def step_s(iterations: Sequence[Sequence[float]]) -> float:
    """Median time from the beginning of a full iteration to that of the next one."""
    following = itertools.pairwise(iterations)
    gaps = [later[0] - one[0] for one, later in following if one[2] == later[2] == ROWS]
    return statistics.median(gaps) if gaps else 0.0


def alone_s(config: Config, n: int) -> float:
    """The same of a burst that comes without HTTP."""
    engine = LocalEngine(config)
    engine.manager.wait_until_loaded()
    groups = []
    for prompt, tokens in lengths(n):
        request = Asked([[1] * prompt], tokens)
        engine.queue(request, group := engine.group(request))
        groups.append(group)
    for group in groups:
        group[0].done.wait()
    iterations = engine.report(since=0)["iterations"]
    engine.close()
    return step_s(iterations)


def burst(url: str, n: int, streamed: bool, server: psutil.Process) -> dict[str, float]:
    """Send a burst, and say what it took."""
    requests = [
        Request(id=i, at=0, prompt="x" * prompt, num_tokens=tokens, seed=i)
        for i, (prompt, tokens) in enumerate(lengths(n))
    ]
    post(f"{url}/stats/reset")
    before, ours, start = cpu_s(server), time.process_time(), time.perf_counter()
    outcomes = replay(url, requests, Streaming() if streamed else Plain())
    seconds = time.perf_counter() - start
    after, client_s = cpu_s(server), time.process_time() - ours
    stats = get(f"{url}/stats?iterations=1")
    assert not any(outcome.error for outcome in outcomes), "a request of the burst failed"
    return {
        "output_throughput": stats["total_output_tokens"] / seconds,
        "step_s": step_s(stats["iterations"]),
        "client_ms": 1e3 * client_s / n,
        **{f"{name}_ms": 1e3 * (after[name] - before[name]) / n for name in after},
    }


def cpu_s(server: psutil.Process) -> dict[str, float]:
    """CPU seconds of a server's processes so far: the engine's own, and those that speak HTTP."""
    used = {"engine": 0.0, "http": 0.0}
    for each in server.children(recursive=True):
        kind = "engine" if "server.processes.engine" in each.cmdline() else "http"
        used[kind] += sum(each.cpu_times()[:2])
    return used


def latency_s(url: str) -> float:
    """Mean latency of SHORT tokens with IN_FLIGHT clients."""

    def ask(i: int) -> float:
        start = time.perf_counter()
        post(f"{url}/inference", {"prompt": "hi", "num_tokens": SHORT, "seed": i})
        return time.perf_counter() - start

    with ThreadPoolExecutor(IN_FLIGHT) as clients:
        return statistics.fmean(clients.map(ask, range(TIMES)))


def pin(server: psutil.Process, core: int) -> None:
    """Give the engine's process a core, and all others, this one too, the rest."""
    rest = sorted({*range(os.cpu_count() or 1)} - {core})
    for each in (psutil.Process(), *server.children(recursive=True)):
        engine = "server.processes.engine" in each.cmdline()
        for thread in each.threads():
            os.sched_setaffinity(thread.id, [core] if engine else rest)


def measure(processes: int, n: int, core: int) -> dict[str, Any]:
    """Measure a server with so many HTTP processes."""
    words = [*ALONE, "dynamic", "--http-processes", str(processes)]
    words += [word for k, v in SETTINGS.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    with launched(words) as server:
        wait_until_ready(server.process, server.url)
        started = psutil.Process(server.process.pid)
        if core >= 0 and processes > 1:
            pin(started, core)
        burst(server.url, 64, False, started)  # warm
        return {
            "processes": processes,
            "whole": burst(server.url, n, False, started),
            "streamed": burst(server.url, n, True, started),
            "latency_s": latency_s(server.url),
        }


def main() -> None:
    options = BENCHMARK.parser().parse_args()
    if options.requests < 2 * ROWS:
        raise ConfigError(f"--requests {options.requests}: {2 * ROWS} or more fill {ROWS} rows")
    config, measured = build("dynamic", SETTINGS, {}), []
    for pair in range(options.pairs):
        for processes in (1, options.processes) if pair % 2 else (options.processes, 1):
            row = measure(processes, options.requests, options.engine_core)
            row["alone_step_s"] = alone_s(config, options.requests)
            measured.append(row)
            print(in_words(row), flush=True)
    print(json.dumps({"measured": measured} | summary(measured) | BENCHMARK.record()))


def in_words(row: dict[str, Any]) -> str:
    text = f"{row['processes']} HTTP processes: latency {1e3 * row['latency_s']:.2f} ms"
    for kind in ("whole", "streamed"):
        of = row[kind]
        text += f"; {kind} {of['output_throughput']:,.0f} tok/s, per request {of['engine_ms']:.2f} "
        text += f"+ {of['http_ms']:.2f} ms CPU of engine and HTTP, {of['client_ms']:.2f} of the "
        ratio = of["step_s"] / row["alone_step_s"]
        text += f"client, iterations × {ratio:.2f}" if ratio else f"client, never {ROWS} rows"
    return text


def summary(measured: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what several processes have ÷ what one has: the median of the pairs."""
    pairs = [
        sorted(measured[i : i + 2], key=lambda row: int(row["processes"]))
        for i in range(0, len(measured), 2)
    ]
    ratios = {"latency": [several["latency_s"] / one["latency_s"] for one, several in pairs]}
    for kind in ("whole", "streamed"):
        made = [[row[kind]["output_throughput"] for row in pair] for pair in pairs]
        ratios[kind] = [several / one for one, several in made]
    return {name: statistics.median(values) for name, values in ratios.items()}


if __name__ == "__main__":
    run(main)
