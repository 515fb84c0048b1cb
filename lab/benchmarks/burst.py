"""The offline burst: n greedy requests at once through scheduler, manager and engine, without HTTP.

    python -m lab.benchmarks.burst --model FOLDER [--n 64] [--modes dynamic,static]
        [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion
tokens for 64.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from config import MODES, Config
from lab.benchmarks.harness import NO_HTTP, Benchmark, run
from lab.benchmarks.offline import burst, inference
from lab.benchmarks.workload import LARGEST, Prompted
from scheduling.inference import Inference
from scheduling.records import IterationRecord
from scheduling.sampling import Sampling
from server.serving import Server

BENCHMARK = Benchmark(
    "burst",
    __doc__,
    {
        "--n": (LARGEST, f"requests, at most {LARGEST}"),
        "--modes": ("dynamic", f"modes: {', '.join(MODES)}, separated by commas"),
    },
    NO_HTTP | {"mode"},  # the results are by mode
    of_engine=True,
)


class Iterations:
    """An observer that keeps every iteration."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def answered(self, inference: Inference) -> None:
        pass


def measure(config: Config, requests: Sequence[Prompted]) -> dict[str, Any]:
    """Serve the burst in one mode: throughput, latency and memory."""
    start = time.perf_counter()
    manager, seen = Server(config).manager, Iterations()
    manager.observe(seen)
    if not manager.wait_until_loaded():
        raise manager.failure or RuntimeError("the engine did not load")
    load_s = time.perf_counter() - start
    inferences = [inference(config, *request, Sampling()) for request in requests]
    start = time.perf_counter()
    manager.enqueue(inferences)
    for each in inferences:
        each.done.wait()
        if each.error:
            raise each.error
    seconds = time.perf_counter() - start
    tokens = sum(len(inference.tokens) for inference in inferences)
    latencies = [(inference.answered_at or 0.0) - inference.arrived_at for inference in inferences]
    most_blocks = max(record.iteration.blocks_used for record in seen.records)
    result = {
        "output_throughput": tokens / seconds, "wall_clock_s": seconds,
        "mean_e2el_ms": 1e3 * float(np.mean(latencies)), "completion_tokens": tokens,
        "iterations": len(seen.records), "load_s": load_s,
        "kv_blocks": manager.snapshot().n_blocks,
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "weights_gb": config.shape.weight_bytes(config.dtype, config.multiplied_as) / 1e9,
        "kv_used_gb": most_blocks * config.block_bytes / 1e9,
    }  # fmt: skip
    manager.close()
    print(
        f"{config.mode}: {len(requests)} requests, {tokens:,} tokens in {seconds:.1f} s, "
        f"{result['output_throughput']:.1f} tok/s, "
        f"mean latency {result['mean_e2el_ms'] / 1e3:.2f} s; "
        f"{result['resident_gb']:.2f} GB resident "
        f"({result['weights_gb']:.2f} weights, {result['kv_used_gb']:.2f} KV blocks), "
        f"loaded in {load_s:.1f} s"
    )
    return result


def main() -> None:
    options, configs = BENCHMARK.configs(
        lambda options: options.modes.split(","), max_batch_size=lambda options: max(1, options.n)
    )
    results = {config.mode: measure(config, burst(config, options.n)) for config in configs}
    print(json.dumps({"modes": results} | BENCHMARK.record(configs)))


if __name__ == "__main__":
    run(main)
