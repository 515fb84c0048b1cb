"""What HTTP costs with an engine that computes nothing, and how soon rows of clients that leave are
free.

    python -m benchmarks.http [--clients 64] [--tokens 64] [--seconds 5]

Measured are requests and chunks a second and the server's CPU for each, and how long after its
client has gone a request's row and KV blocks are free. A server in mode dynamic with `--model
fake`, on the same machine as the clients. The fake engine sleeps 1 ms + 0.06 ms a row an iteration:
at most 16,667 tokens a second, whatever HTTP costs.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import statistics
import time
import urllib.parse
from typing import NamedTuple

from benchmarks.clients import JSON, load
from benchmarks.harness import Benchmark, Round, alternate, run, values
from client.calls import get, get_text
from compare.servers import server

REPEATS = 3
GONE = 20
BENCHMARK = Benchmark(
    "http",
    "What HTTP costs with an engine that computes nothing.",
    {
        "--clients": (64, "connections"),
        "--tokens": (64, "completion tokens of a request"),
        "--seconds": (5.0, f"of each round; there are {REPEATS} of each kind"),
    },
)


class Traffic(NamedTuple):
    """Requests of one kind."""

    tokens: int
    stream: bool
    route: str = "/inference"
    length: str = "num_tokens"  # the route's name of the number of tokens


def measure(url: str, traffic: Traffic, clients: int, seconds: float) -> Round:
    """One round; ms and µs are CPU time of the server, user and system, of all its threads."""
    body = {"prompt": "hi", traffic.length: traffic.tokens, "stream": traffic.stream, "seed": 1}
    seen = load(url, lambda: itertools.repeat(body), clients, seconds, route=traffic.route)
    tokens = traffic.tokens * len(seen.latencies_s)
    return {
        "requests_per_s": seen.answers_per_s,
        "tokens_per_s": tokens / seen.seconds,
        "chunks_per_s": seen.chunks / seen.seconds,  # 0 for plain answers
        "cpu_ms_per_request": 1e3 * seen.server_cpu_s / len(seen.latencies_s),
        "cpu_us_per_token": 1e6 * seen.server_cpu_s / tokens,
        "cpu_us_per_chunk": 1e6 * seen.server_cpu_s / seen.chunks if seen.chunks else 0.0,
        "server_cores": seen.server_cpu_s / seen.seconds,
        "client_cores": seen.client_cpu_s / seen.seconds,
    }


def show(name: str, measured: Round) -> None:
    print(
        f"{name:18} {measured['requests_per_s']:5,.0f} requests/s "
        f"{measured['tokens_per_s']:6,.0f} tokens/s {measured['chunks_per_s']:6,.0f} chunks/s  "
        f"CPU {measured['cpu_ms_per_request']:5.2f} ms a request, "
        f"{measured['cpu_us_per_token']:5.0f} µs a token  "
        f"(cores: server {measured['server_cores']:.2f}, clients {measured['client_cores']:.2f})",
        flush=True,
    )


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
    body = json.dumps({"prompt": "hi", "num_tokens": 1000, "stream": stream})
    connection.request("POST", "/inference", body, JSON)
    while not taken():
        pass
    time.sleep(random.random() / 4)  # the watcher looks four times a second
    connection.close()
    start = time.perf_counter()
    while taken():
        time.sleep(0.002)
    return time.perf_counter() - start


def main() -> None:
    options = BENCHMARK.parse()
    kinds = {
        "plain, 1 token": Traffic(1, stream=False),
        "plain": Traffic(options.tokens, stream=False),
        "streaming": Traffic(options.tokens, stream=True),
        "streaming, OpenAI": Traffic(options.tokens, True, "/v1/completions", "max_tokens"),
    }
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:

        def measured(name: str) -> Round:
            round_ = measure(url, kinds[name], options.clients, options.seconds)
            show(name, round_)
            return round_

        rounds = alternate(kinds, measured, REPEATS)
        gone = alternate(
            ("plain", "streaming"), lambda name: freed_after_s(url, name == "streaming"), GONE
        )
        cancelled = get(f"{url}/stats")["cancelled"]
    medians = {
        name: {key: statistics.median(values(several, key)) for key in several[0]}
        for name, several in rounds.items()
    }
    print(
        f"\nmedians of {REPEATS} rounds, {options.clients} clients, "
        f"{options.tokens} tokens a request:"
    )
    for name, median in medians.items():
        show(name, median)
    for name in ("streaming", "streaming, OpenAI"):
        more = medians[name]["cpu_us_per_token"] - medians["plain"]["cpu_us_per_token"]
        print(
            f"{name}: {medians[name]['cpu_us_per_chunk']:.0f} µs of CPU a chunk; "
            f"{more:.0f} µs a token more than a plain answer"
        )
    if cancelled < 2 * GONE:  # left alone such a request takes a second
        print(
            f"{2 * GONE - cancelled} requests ended by themselves before the server could notice: "
            f"this machine is very busy"
        )
    for name, seconds in gone.items():
        print(
            f"a {name} client goes away: its row and blocks are free after "
            f"{1e3 * statistics.median(seconds):.0f} ms "
            f"(median of {GONE}; longest {1e3 * max(seconds):.0f} ms)"
        )
    settings = {name: vars(options)[name] for name in ("clients", "tokens", "seconds")}
    result = {**settings, "rounds": rounds, "freed_after_s": gone}
    print(json.dumps(result | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
