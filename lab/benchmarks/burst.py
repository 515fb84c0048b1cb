"""The offline burst: n greedy requests at once through scheduler, manager and engine, without HTTP.

    python -m lab.benchmarks.burst --model FOLDER [--n 64] [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion
tokens for 64.
"""

from __future__ import annotations

import json
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
    {"--n": (DRAWN, f"requests, at most {LARGEST}")},
    NO_HTTP,
    of_engine=True,
)


def measure(config: Config, requests: Sequence[Prompted]) -> dict[str, Any]:
    """Serve the burst: throughput, latency and memory."""
    start = time.perf_counter()
    server = Server(config)
    if not server.manager.wait_until_loaded():
        raise server.manager.failure or RuntimeError("the engine did not load")
    load_s = time.perf_counter() - start
    inferences = [inference(config, *request, Sampling()) for request in requests]
    start = time.perf_counter()
    server.manager.enqueue(inferences)
    for each in inferences:
        each.done.wait()
        if each.error:
            raise each.error
    seconds = time.perf_counter() - start
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


def main() -> None:
    options, [config] = BENCHMARK.configs(max_batch_size=lambda options: max(1, options.n))
    requests = burst(config, options.n)
    longest = max(len(prompt) + tokens for prompt, tokens in requests)
    if longest > config.max_model_len:
        raise ConfigError(
            f"the burst's longest request has {longest} tokens, and the context holds "
            f"{config.max_model_len}; raise --max-model-len, or choose another --model"
        )
    print(json.dumps(measure(config, requests) | BENCHMARK.record([config])))


if __name__ == "__main__":
    run(main)
