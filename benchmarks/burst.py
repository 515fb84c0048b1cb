"""The offline burst: n requests at once through scheduler, manager and engine, without HTTP.

    python -m benchmarks.burst --model FOLDER [--n 64] [--modes dynamic,static]
        [--neighbours 1] [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion
tokens for 64. Each mode serves the burst twice: once measured, then, on a CPU, once more with a
timer around each part. --neighbours: it serves the burst alone and beside so many busy loops
instead, three times in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import NO_HTTP, Benchmark, alternate, ratios, run
from benchmarks.offline import OfflineServer, burst, refuse_few_ids
from benchmarks.phases import Phases
from benchmarks.workload import LARGEST, Prompted
from client.traces import Request, save_trace
from config import MODES, Config, ConfigError
from scheduling.sampling import Sampling

TURNS, MOST_LOOPS = 3, 64  # alone and beside busy loops
SETTLE_S = 2.0  # without busy loops; the kernels then use all threads again (kernels/team.h)
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # it ends with the benchmark, however that ends
    for _ in range(1_000_000):
        pass
"""
BENCHMARK = Benchmark(
    "burst",
    "The offline burst, by mode.",
    {
        "--n": (LARGEST, f"requests, at most {LARGEST}"),
        "--modes": ("dynamic", f"of {', '.join(MODES)}, separated by commas"),
        "--neighbours": (0, "measure alone and beside so many busy loops, in turn"),
        "--temperature": (0.0, "0 is greedy"),
        "--top-p": (float, "as of a request"),
        "--save-trace": (Path, "write the requests to this file, for compare.sh --trace, and stop"),
    },
    NO_HTTP | {"mode"},  # the results are by mode
)


@contextlib.contextmanager
def busy_loops(n: int) -> Iterator[None]:
    """Keep n cores busy, as a program in another terminal does.

    Each loop has a session of its own, since Linux may share out the cores by session first.
    """
    with contextlib.ExitStack() as running:
        for _ in range(n):
            loop = [sys.executable, "-c", LOOP, str(os.getpid())]
            process = running.enter_context(subprocess.Popen(loop, start_new_session=True))
            running.callback(process.kill)
        yield


def beside_loops(
    server: OfflineServer, requests: Sequence[Prompted], sampling: Sampling, loops: int
) -> dict[str, Any]:
    """Throughputs alone and beside busy loops, in turn, and the median part that remains."""
    tokens = sum(tokens for _, tokens in requests)

    def throughput(turn: str) -> float:
        with busy_loops(loops if turn == "beside" else 0):
            if turn == "alone":
                time.sleep(SETTLE_S)
            return tokens / server.serve(requests, sampling)[0]

    turns = alternate(("alone", "beside"), throughput, TURNS)
    remaining = statistics.median(ratios(turns["beside"], turns["alone"]))
    return {"loops": loops, **turns, "median_left": remaining}


def measure(
    config: Config, requests: Sequence[Prompted], sampling: Sampling, loops: int = 0
) -> dict[str, Any]:
    """Serve the burst in one mode: throughput, latency, memory, and the seconds of each part, or
    the throughput beside busy loops.
    """
    server = OfflineServer(config)
    seconds, inferences = server.serve(requests, sampling)
    tokens = sum(len(inference.tokens) for inference in inferences)
    latencies = [(inference.answered_at or 0.0) - inference.arrived_at for inference in inferences]
    most_blocks = max(record.iteration.blocks_used for record in server.iterations)
    result: dict[str, Any] = {
        "output_throughput": tokens / seconds,
        "wall_clock_s": seconds,
        "mean_e2el_ms": 1e3 * float(np.mean(latencies)),
        "completion_tokens": tokens,
        "iterations": len(server.iterations),
        "load_s": server.load_s,
        "kv_blocks": server.manager.snapshot().n_blocks,
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "weights_gb": config.shape.weight_bytes(config.dtype, config.multiplied_as) / 1e9,
        "kv_used_gb": most_blocks * config.block_bytes / 1e9,
    }
    if loops:
        result["neighbours"] = beside_loops(server, requests, sampling, loops)
    # a GPU computes while this thread goes on: timers would see launches
    elif config.device == "cpu":
        phases = Phases(server.scheduler, server.engine)
        result["timed_wall_clock_s"], _ = server.serve(requests, sampling)
        result["phases_s"] = phases.report()
    server.manager.close()
    return result


def show(mode: str, requests: int, result: dict[str, Any]) -> None:
    print(
        f"{mode}: {requests} requests, {result['completion_tokens']:,} tokens in "
        f"{result['wall_clock_s']:.1f} s, {result['output_throughput']:.1f} tok/s, "
        f"mean latency {result['mean_e2el_ms'] / 1e3:.2f} s; "
        f"{result['resident_gb']:.2f} GB resident "
        f"({result['weights_gb']:.2f} weights, {result['kv_used_gb']:.2f} KV blocks)"
    )
    if turns := result.get("neighbours"):
        alone, beside = (statistics.median(turns[name]) for name in ("alone", "beside"))
        print(
            f"  beside busy loops ({turns['loops']}): {beside:.1f} tok/s of {alone:.1f} alone, "
            f"{100 * turns['median_left']:.0f}% left (median of {TURNS} pairs)"
        )
    phases = result.get("phases_s", {})
    for name, seconds in phases.items():
        print(
            f"  {name:26} {1e3 * seconds / result['iterations']:8.2f} ms an iteration  "
            f"{100 * seconds / sum(phases.values()):5.1f}%"
        )


def main() -> None:
    options, configs = BENCHMARK.engine_configs(
        lambda options: options.modes.split(","), max_batch_size=lambda options: max(1, options.n)
    )
    requests = burst(options.n)
    if not 0 <= options.neighbours <= MOST_LOOPS:
        raise ConfigError(f"--neighbours must be from 0 to {MOST_LOOPS}")
    if options.temperature < 0 or not 0 < (options.top_p or 1) <= 1:
        raise ConfigError("--temperature must be 0 or more, and --top-p above 0 and at most 1")
    if options.save_trace:
        trace = [
            Request(id=i, at=0.0, prompt_ids=ids, num_tokens=tokens)
            for i, (ids, tokens) in enumerate(requests)
        ]
        save_trace(options.save_trace, trace)
        return
    sampling = Sampling(options.temperature, top_p=options.top_p)
    results = {}
    for config in configs:
        refuse_few_ids(config)
        results[config.mode] = measure(config, requests, sampling, options.neighbours)
        show(config.mode, len(requests), results[config.mode])
    print(json.dumps({"modes": results} | BENCHMARK.record(configs)))


if __name__ == "__main__":
    run(main)
