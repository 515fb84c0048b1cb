"""What HTTP costs with an engine that computes nothing, and how soon rows of clients that leave are
free.

    python -m benchmarks.http [--clients 64] [--tokens 64] [--seconds 5]

A server in mode dynamic with `--model fake`, on the same machine as the clients. The fake engine
sleeps 1 ms + 0.06 ms a row an iteration: at most 16,667 tokens a second, whatever HTTP costs.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from typing import Any

from benchmarks.clients import load
from benchmarks.faults.tools import Served, connect, post_bytes, serving, until
from benchmarks.harness import Benchmark, Round, alternate, run, values
from compare.report.tables import markdown

REPEATS = 3
GONE = 20
COLUMNS = {  # heading and form; ms and µs are CPU time of the server, user and system
    "requests_per_s": ("requests/s", "{:,.0f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "chunks_per_s": ("chunks/s", "{:,.0f}"),  # 0 for plain answers
    "cpu_ms_per_request": ("server CPU a request, ms", "{:.2f}"),
    "cpu_us_per_token": ("a token, µs", "{:.0f}"),
    "cpu_us_per_chunk": ("a chunk, µs", "{:.0f}"),
    "server_cores": ("cores of the server", "{:.2f}"),
    "client_cores": ("of the clients", "{:.2f}"),
}
BENCHMARK = Benchmark(
    "http",
    "What HTTP costs with an engine that computes nothing.",
    {
        "--clients": (64, "connections"),
        "--tokens": (64, "completion tokens of a request"),
        "--seconds": (5.0, f"of each round; there are {REPEATS} of each kind"),
    },
)


def kinds(tokens: int) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Route, tokens and body of each kind of request."""
    native, openai, stream = "/inference", "/v1/completions", {"stream": True}
    return {
        "plain, 1 token": (native, 1, {"num_tokens": 1}),
        "plain": (native, tokens, {"num_tokens": tokens}),
        "streaming": (native, tokens, {"num_tokens": tokens} | stream),
        "streaming, OpenAI": (openai, tokens, {"max_tokens": tokens} | stream),
    }


def measure(
    url: str, route: str, tokens: int, body: dict[str, Any], clients: int, seconds: float
) -> dict[str, float]:
    """One round: the measurements of COLUMNS."""
    whole = {"prompt": "hi", "seed": 1} | body
    seen = load(url, whole, clients, seconds, route)
    answers = len(seen.latencies_s)
    return {
        "requests_per_s": seen.answers_per_s,
        "tokens_per_s": tokens * seen.answers_per_s,
        "chunks_per_s": seen.chunks / seen.seconds,
        "cpu_ms_per_request": 1e3 * seen.server_cpu_s / answers,
        "cpu_us_per_token": 1e6 * seen.server_cpu_s / (tokens * answers),
        "cpu_us_per_chunk": 1e6 * seen.server_cpu_s / seen.chunks if seen.chunks else 0.0,
        "server_cores": seen.server_cpu_s / seen.seconds,
        "client_cores": seen.client_cpu_s / seen.seconds,
    }


def freed_after_s(served: Served, stream: bool) -> float:
    """Seconds from the close of a running request's connection until nothing of it is taken."""
    body = {"prompt": "hi", "num_tokens": 1000, "stream": stream}
    connection = connect(served, post_bytes(body))
    until(lambda: not served.is_free())
    time.sleep(random.random() / 4)  # the watcher looks four times a second
    connection.close()
    return until(served.is_free, every_s=0.002) or math.inf


def table(rounds: dict[str, list[Round]]) -> str:
    """Medians of the rounds of each kind."""
    rows = [["answers", *(heading for heading, _ in COLUMNS.values())]]
    for name, measured in rounds.items():
        medians = {key: statistics.median(values(measured, key)) for key in COLUMNS}
        rows.append([name, *(form.format(medians[key]) for key, (_, form) in COLUMNS.items())])
    return markdown(rows)


def main() -> None:
    options = BENCHMARK.parse()
    of_kind = kinds(options.tokens)
    with serving({"max_batch_size": 256}) as served:

        def turn(name: str) -> Round:
            print(name, flush=True)
            return measure(served.url, *of_kind[name], options.clients, options.seconds)

        rounds = alternate(of_kind, turn, REPEATS)
        gone = alternate(
            ("plain", "streaming"), lambda name: freed_after_s(served, name == "streaming"), GONE
        )
    print(
        f"\nMedians of {REPEATS} rounds, {options.clients} clients, {options.tokens} tokens a "
        f"request:\n\n{table(rounds)}\n"
    )
    for name, seconds in gone.items():  # left alone such a request takes a second
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
