"""What a front end costs: latency and CPU time of a request and of a token, one request at a time,
and throughput of many at once.

    python -m benchmarks.fronts [--rounds 5] [--out results/replicas]

The same through Ray Serve, through HAProxy and at a plain server, each with one replica of the fake
engine, which takes next to no time; rounds take turns. The clients are on the same cores. A quarter
of an hour; nothing else should run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.clients import Load, cpu_s, load, processes
from benchmarks.harness import Benchmark, Round, Times, alternate, mean, mean_ratio, run
from compare.deployments import Deployment
from compare.report.tables import formatted, markdown
from compare.servers import ALONE, server
from deploy.kinds import KINDS

NO_TIME = 0.001  # slowdown of an engine that takes next to no time
SETTINGS = {"model": "fake", "fake_slowdown": NO_TIME, "max_batch_size": 8, "live": "off"}
TOKENS = 100  # of a stream
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
LOADS = {
    **{f"answers_per_s_{n}": (f"answers/s of {n}", "{:.0f}") for n in CLIENTS},
    **{f"p{p}_ms_{n}": (f"p{p} of {n}, ms", "{:.1f}") for n in CLIENTS for p in (50, 99)},
    "streamed_per_s": (f"streamed tokens/s of {STREAMING}", "{:.0f}"),
    "idle_cores": ("cores while idle", "{:.3f}"),
}
BENCHMARK = Benchmark(
    "fronts",
    "What a front end costs.",
    {
        "--rounds": (Times(5), "of each front end"),
        "--seconds": (4.0, "of each number of clients"),
        "--fronts": ("plain,ray,proxy", "front ends, the plain server first"),
        "--out": (Path("runs/fronts"), "folder"),
    },
)


def served(url: str, tokens: int, clients: int, seconds: float) -> Load:
    """Answers of one token, or streams of more."""
    body = {"prompt": "hi", "num_tokens": tokens, "stream": tokens > 1}
    return load(url, body, clients, seconds)


def idle_cores(url: str) -> float:
    servers = processes(url)
    before = cpu_s(servers)
    time.sleep(IDLE_S)
    return (cpu_s(servers) - before) / IDLE_S


def costs(url: str, seconds: float) -> Iterator[tuple[str, float]]:
    """Costs of a request, one at a time, and of a token: the addition of each after the first."""
    one, stream = (served(url, tokens, 1, seconds) for tokens in (1, TOKENS))
    for cost, of_one, of_stream in (
        ("", np.median(one.latencies_s), np.median(stream.latencies_s)),
        ("cpu_", one.server_cpu_s / len(one.latencies_s),
         stream.server_cpu_s / len(stream.latencies_s)),
    ):  # fmt: skip
        yield f"request_{cost}ms", 1e3 * float(of_one)
        yield f"stream_{cost}ms", 1e3 * float(of_stream)
        yield f"token_{cost}ms", 1e3 * float(of_stream - of_one) / (TOKENS - 1)


def loads(url: str, seconds: float) -> Iterator[tuple[str, float]]:
    """Throughput and latency of many at once: one token each, then streams."""
    for clients in CLIENTS:
        seen = served(url, 1, clients, seconds)
        yield f"answers_per_s_{clients}", seen.answers_per_s
        for percentile in (50, 99):
            latency_s = float(np.percentile(seen.latencies_s, percentile))
            yield f"p{percentile}_ms_{clients}", 1e3 * latency_s
    yield "streamed_per_s", TOKENS * served(url, TOKENS, STREAMING, seconds).answers_per_s


def measure(name: str, seconds: float) -> Round:
    """One round of a front end of KINDS with a fake server behind it, or of a plain server."""
    start = ALONE if name == "plain" else Deployment(name, 1, KINDS[name].routers[0]).start
    with server("dynamic", SETTINGS, name=name, start=start) as url:
        measured = {"idle_cores": idle_cores(url), **dict(costs(url, seconds))}
        measured |= dict(loads(url, seconds))
    print(
        f"{name}: {measured['request_ms']:.2f} ms, stream {measured['stream_ms']:.1f} ms; "
        f"{max(measured[f'answers_per_s_{n}'] for n in CLIENTS):.0f} answers a second, "
        f"{measured['streamed_per_s']:.0f} tokens a second in streams",
        flush=True,
    )
    return measured


def table(
    found: Mapping[str, Sequence[Round]], columns: Mapping[str, tuple[str, str]], compared: bool
) -> str:
    """A line for each front end; compared: and one of its ratios to the first one's."""
    rows = [["front end", *(heading for heading, _ in columns.values())]]
    [base, *_] = found.values()
    for name, rounds in found.items():
        cells = (formatted(mean(rounds, key), form) for key, (_, form) in columns.items())
        rows.append([name, *cells])
        if compared and rounds is not base:
            ratios = (formatted(mean_ratio(rounds, base, key), "{:.2f}") for key in columns)
            rows.append([f"{name} ÷ plain", *ratios])
    return markdown(rows)


def main() -> None:
    options = BENCHMARK.parse()
    fronts = options.fronts.split(",")
    found = alternate(fronts, lambda name: measure(name, options.seconds), options.rounds)
    body = "\n\n".join([
        "## One request at a time",
        table(found, COSTS, compared=True),
        "A token is what each one after the first adds to a stream. CPU is that of all processes "
        "of the server, with what they do while idle; ratios are of the same round.",
        "## Many at once",
        table(found, LOADS, compared=False),
        f"Answers of one token, and streams of {TOKENS}; clients ask as soon as they are answered, "
        "and take of the same cores.",
    ])  # fmt: skip
    setup = (
        f"one replica in mode dynamic, {SETTINGS['max_batch_size']} rows, the fake engine's "
        f"iterations at {NO_TIME:g} of their time; means of {options.rounds} rounds ± half of a "
        "95% t interval"
    )
    rounds = [{"front": name, "seeds": rounds} for name, rounds in found.items()]
    result = {"costs": rounds} | BENCHMARK.record()
    BENCHMARK.write(options.out, "What a front end costs", setup, body, result)


if __name__ == "__main__":
    run(main)
