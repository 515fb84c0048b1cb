"""The offline burst: n greedy requests at once through scheduler, manager and engine, without HTTP.

    python -m lab.benchmarks.burst --model FOLDER [--n 64] [--pairs 0] [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion
tokens for 64. `--pairs 5` serves it ten times, in turn with and without `--ahead`, and says how
many times faster that is; both engines are loaded, so `--kv-cache` must leave room for two.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil

from config.config import Config
from config.settings import ConfigError
from lab.benchmarks.harness import NO_HTTP, Benchmark, run
from lab.benchmarks.offline import burst, inference
from lab.benchmarks.workload import DRAWN, LARGEST, Prompted
from scheduling.sampling import Sampling
from server.serving import Server

BENCHMARK = Benchmark(
    "burst",
    __doc__,
    {
        "--n": (DRAWN, f"requests, at most {LARGEST}"),
        "--pairs": (0, "bursts with and as many without --ahead, instead of one"),
    },
    NO_HTTP,
    of_engine=True,
)


def loaded(config: Config) -> Server:
    server = Server(config)
    if not server.manager.wait_until_loaded():
        raise server.manager.failure or RuntimeError("the engine did not load")
    return server


def serve(server: Server, requests: Sequence[Prompted]) -> float:
    """Serve the burst; return the seconds until its last answer."""
    inferences = [inference(server.config, *request, Sampling()) for request in requests]
    start = time.perf_counter()
    server.manager.enqueue(inferences)
    for each in inferences:
        each.done.wait()
        if each.error:
            raise each.error
    return time.perf_counter() - start


def measure(config: Config, requests: Sequence[Prompted]) -> dict[str, Any]:
    """Serve the burst: throughput, latency and memory."""
    start = time.perf_counter()
    server = loaded(config)
    load_s = time.perf_counter() - start
    seconds = serve(server, requests)
    report = server.report(since=0)
    server.close()
    tokens = report["total_output_tokens"]
    result = {
        "output_throughput": tokens / seconds, "wall_clock_s": seconds,
        "mean_e2el_ms": report["mean_e2el_ms"], "completion_tokens": tokens,
        "iterations": len(report["iterations"]), "load_s": load_s,
        "kv_blocks": report["kv_blocks"],
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "weights_gb": config.shape.weight_bytes(config.dtype, config.multiplied_as) / 1e9,
    }  # fmt: skip
    print(
        f"{config.mode}: {len(requests)} requests, {tokens:,} tokens in {seconds:.1f} s, "
        f"{result['output_throughput']:.1f} tok/s, "
        f"mean latency {result['mean_e2el_ms'] / 1e3:.2f} s; "
        f"{result['resident_gb']:.2f} GB resident ({result['weights_gb']:.2f} weights), "
        f"loaded in {load_s:.1f} s"
    )
    return result


def in_pairs(config: Config, requests: Sequence[Prompted], pairs: int) -> dict[str, Any]:
    """Serve the burst with and without plans ahead, each first in every other pair; return the
    seconds, and how many times faster plans ahead are: the median of the pairs, and all.
    """
    settings = config.model_dump()
    servers = {ahead: loaded(Config(**settings | {"ahead": ahead})) for ahead in (False, True)}
    seconds: dict[bool, list[float]] = {ahead: [] for ahead in servers}
    for server in servers.values():
        serve(server, requests)  # warm
    for i in range(pairs):
        for ahead in (False, True) if i % 2 else (True, False):
            seconds[ahead].append(serve(servers[ahead], requests))
    for server in servers.values():
        server.close()
    times = [in_turn / ahead for in_turn, ahead in zip(seconds[False], seconds[True])]
    print(
        f"{len(requests)} requests: --ahead is {statistics.median(times):.3f} times as fast "
        f"({min(times):.3f} to {max(times):.3f} in {pairs} pairs)"
    )
    named = {"in_turn_s": seconds[False], "ahead_s": seconds[True]}
    return named | {"times_as_fast": statistics.median(times), "of_pairs": times}


def main() -> None:
    options, [config] = BENCHMARK.configs(max_batch_size=lambda options: max(1, options.n))
    requests = burst(config, options.n)
    longest = max(len(prompt) + tokens for prompt, tokens in requests)
    if longest > config.max_model_len:
        raise ConfigError(
            f"the burst's longest request has {longest} tokens, and the context holds "
            f"{config.max_model_len}; raise --max-model-len, or choose another --model"
        )
    if options.pairs > 0:
        result = in_pairs(config, requests, options.pairs)
    else:
        result = measure(config, requests)
    print(json.dumps(result | BENCHMARK.record([config])))


if __name__ == "__main__":
    run(main)
