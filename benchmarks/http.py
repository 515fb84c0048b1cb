"""What HTTP costs with an engine that computes nothing, and how soon rows of clients that leave are
free; or what a reader of the live page costs.

    python -m benchmarks.http [--clients 64] [--tokens 64] [--seconds 5]
    python -m benchmarks.http --model demo --reader 20 --out DIR

Measured are requests and chunks a second and the server's CPU for each, and how long after its
client has gone a request's row and KV blocks are free. A server in mode dynamic with `--model
fake`, on the same machine as the clients. The fake engine sleeps 1 ms + 0.06 ms a row an iteration:
at most 16,667 tokens a second, whatever HTTP costs.

--reader N: throughput with and without a reader that polls /live/events as the page does, in N
pairs; and of a server without a reader against one with `--live off`. The reader is a process of
its own: on a machine of few cores it takes its share of them, as a browser there would.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import multiprocessing
import random
import statistics
import time
import urllib.parse
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clients import JSON, load
from benchmarks.harness import Benchmark, Round, alternate, ratios, run, values
from client.calls import get, get_text
from client.machine import processor
from compare.analysis import estimate
from compare.report.tables import markdown
from compare.servers import server

REPEATS = 3
GONE = 20
POLLS_S = 1 / 7  # between two of the page
SETTLED_S = 4.0  # until a server with a new reader is steady, or has forgotten one
BENCHMARK = Benchmark(
    "http",
    "What HTTP costs with an engine that computes nothing.",
    {
        "--clients": (64, "connections"),
        "--tokens": (64, "completion tokens of a request"),
        "--seconds": (5.0, f"of each round; there are {REPEATS} of each kind"),
        "--reader": (0, "pairs of rounds with and without a reader of the page, instead"),
        "--model": ("fake", "of --reader"),
        "--out": (Path("runs/live"), "folder of --reader"),
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


# ---- a reader of the live page


def poll(url: str, stop: Event) -> None:
    """Poll as a page does, until stopped."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    cursor = ""
    while not stop.wait(POLLS_S):
        connection.request("GET", f"/live/events{cursor}")
        cursor = f"?since={json.loads(connection.getresponse().read())['cursor']}"
    connection.close()


@contextlib.contextmanager
def reader(url: str) -> Iterator[None]:
    """A reader polls as long as the context lasts."""
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=poll, args=(url, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join()
        assert process.exitcode == 0, "the reader failed"


def compared(what: str, turns: dict[str, list[float]]) -> dict[str, Any]:
    """The ratio of the first throughput to the second, its interval, and that of each pair."""
    of_pairs = ratios(*turns.values())
    log = estimate([math.log(ratio) for ratio in of_pairs])
    half = log.half or 0.0
    low, mean, high = (math.exp(log.mean + side * half) for side in (-1, 0, 1))
    return {"what": what, "ratio": mean, "low": low, "high": high, "ratios": of_pairs}


def cost_of_a_reader(options: Any) -> None:
    flags, traffic = {"model": options.model}, Traffic(options.tokens, stream=False)
    with server("dynamic", flags) as live, server("dynamic", flags | {"live": "off"}) as off:

        def throughput(turn: str) -> float:
            url = off if turn == "off" else live
            with reader(url) if turn == "read" else contextlib.nullcontext():
                time.sleep(SETTLED_S)
                measured = measure(url, traffic, options.clients, options.seconds)
            return measured["tokens_per_s"]

        found = [
            compared(what, alternate(turns, throughput, options.reader))
            for what, turns in (
                ("one reader ÷ nobody looks", ("read", "unread")),
                ("nobody looks ÷ --live off", ("unread", "off")),
            )
        ]
    rows = [["throughput", "ratio", "95%", "pairs"]]
    for each in found:
        interval = f"{each['low']:.3f} to {each['high']:.3f}"
        rows.append([each["what"], f"{each['ratio']:.3f}", interval, str(options.reader)])
    result = {"comparisons": found} | BENCHMARK.record()
    setup = (
        f"{processor(result['hardware'], {})}; {options.clients} clients of {options.model}, "
        f"dynamic; a reader polls every {1e3 * POLLS_S:.0f} ms in a process of its own on the same "
        "machine"
    )
    title = "What it costs to be looked at"
    BENCHMARK.write(options.out, title, setup, markdown(rows), result, name="live")
    print(json.dumps(result))


def main() -> None:
    options = BENCHMARK.parse()
    if options.reader:
        cost_of_a_reader(options)
    else:
        cost_of_http(options)


def cost_of_http(options: Any) -> None:
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
