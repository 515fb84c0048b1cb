"""The offline burst: n requests at once through scheduler, manager and engine, without HTTP.

    python -m benchmarks.burst --model FOLDER [--n 64] [--modes dynamic,static]
        [--neighbours 1] [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion
tokens for 64. Each mode serves the burst twice: once measured, then, on a CPU, once more with a
timer around each part. --neighbours: it serves the burst alone and beside so many busy loops
instead, three times in turn. The last line is JSON.
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

from benchmarks.common import NO_HTTP, Engine, configs, record, run
from benchmarks.phases import Phases
from benchmarks.workload import LARGEST, draw
from client.traces import Request, save_trace
from config import MODES, Config, ConfigError, Parser
from scheduling.inference import Sampling

UNUSED = NO_HTTP | {"mode"}  # the results are by mode
TURNS, MOST_LOOPS = 3, 64  # alone and beside neighbours
SETTLE_S = 2.0  # without a neighbour; the kernels then use all threads again (kernels/team.h)
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # it ends with the benchmark, however that ends
    for _ in range(1_000_000):
        pass
"""


def refuse_few_ids(config: Config) -> None:
    """Raise ConfigError for a model that has not all of the prompts' ids."""
    if config.shape.vocab_size < 50257:
        raise ConfigError(
            f"the burst's prompts are GPT-2's ids and {config.model} has too few; "
            f"name another --model"
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


def beside(
    engine: Engine, requests: Sequence[tuple[list[int], int]], sampling: Sampling, loops: int
) -> dict[str, Any]:
    """Throughputs alone and beside busy loops, in turn, and the median of what is left."""
    alone, busy = [], []
    tokens = sum(tokens for _, tokens in requests)
    for _ in range(TURNS):
        time.sleep(SETTLE_S)
        alone.append(tokens / engine.serve(requests, sampling)[0])
        with busy_loops(loops):
            busy.append(tokens / engine.serve(requests, sampling)[0])
    left = statistics.median(b / a for a, b in zip(alone, busy))
    return {"loops": loops, "alone": alone, "beside": busy, "median_left": left}


def measure(
    config: Config,
    requests: Sequence[tuple[list[int], int]],
    sampling: Sampling,
    neighbours: int = 0,
) -> dict[str, Any]:
    """Serve the burst in one mode: throughput, latency, memory, and the seconds of each part, or
    how much of the throughput is left beside neighbours.
    """
    engine = Engine(config)
    seconds, inferences = engine.serve(requests, sampling)
    tokens = sum(len(inference.tokens) for inference in inferences)
    latencies = [(inference.answered_at or 0.0) - inference.arrived_at for inference in inferences]
    most_blocks = max(record.iteration.blocks_used for record in engine.iterations)
    result: dict[str, Any] = {
        "output_throughput": tokens / seconds,
        "wall_clock_s": seconds,
        "mean_e2el_ms": 1e3 * float(np.mean(latencies)),
        "completion_tokens": tokens,
        "iterations": len(engine.iterations),
        "load_s": engine.load_s,
        "kv_blocks": engine.manager.snapshot().n_blocks,
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "weights_gb": config.shape.weight_bytes(config.dtype, config.multiplied_as) / 1e9,
        "kv_used_gb": most_blocks * config.block_bytes / 1e9,
    }
    if neighbours:
        result["neighbours"] = beside(engine, requests, sampling, neighbours)
    # a GPU computes while this thread goes on: what a timer sees are launches
    elif config.device == "cpu":
        phases = Phases()
        phases.watch(engine.scheduler, engine.generator)
        result["timed_wall_clock_s"], _ = engine.serve(requests, sampling)
        result["phases_s"] = phases.report()
    engine.manager.close()
    return result


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.burst",
        description="The offline burst, by mode.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--n", type=int, default=LARGEST, help=f"requests, at most {LARGEST} (default: {LARGEST})"
    )
    parser.add_argument(
        "--modes",
        default="dynamic",
        help=f"of {', '.join(MODES)}, separated by commas (default: dynamic)",
    )
    parser.add_argument(
        "--neighbours",
        type=int,
        default=0,
        metavar="N",
        help="measure alone and beside N busy loops, in turn (default: 0, alone)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, help="default: none")
    parser.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write the requests, for compare.sh --trace, and stop",
    )
    options, built = configs(
        parser,
        sys.argv[1:],
        lambda known: known.modes.split(","),
        UNUSED,
        max_batch_size=lambda known: max(1, known.n),
    )
    if not 1 <= options.n <= LARGEST:
        raise ConfigError(f"--n must be from 1 to {LARGEST}")
    if not 0 <= options.neighbours <= MOST_LOOPS:
        raise ConfigError(f"--neighbours must be from 0 to {MOST_LOOPS}")
    if options.temperature < 0 or not 0 < (options.top_p or 1) <= 1:
        raise ConfigError("--temperature must be 0 or more, and --top-p above 0 and at most 1")
    requests = draw(options.n)
    if options.save_trace:
        save_trace(
            options.save_trace,
            [
                Request(id=i, at=0.0, prompt_ids=ids, num_tokens=tokens)
                for i, (ids, tokens) in enumerate(requests)
            ],
        )
        return
    results = {}
    for config in built:
        refuse_few_ids(config)
        results[config.mode] = found = measure(
            config,
            requests,
            Sampling(options.temperature, top_p=options.top_p),
            options.neighbours,
        )
        print(
            f"{config.mode}: {len(requests)} requests, "
            f"{found['completion_tokens']:,} tokens in {found['wall_clock_s']:.1f} s, "
            f"{found['output_throughput']:.1f} tok/s, "
            f"mean latency {found['mean_e2el_ms'] / 1e3:.2f} s; "
            f"{found['resident_gb']:.2f} GB resident "
            f"({found['weights_gb']:.2f} weights, {found['kv_used_gb']:.2f} KV blocks)"
        )
        if turns := found.get("neighbours"):
            alone, busy = (statistics.median(turns[how]) for how in ("alone", "beside"))
            print(
                f"  beside busy loops ({turns['loops']}): {busy:.1f} tok/s of {alone:.1f} alone, "
                f"{100 * turns['median_left']:.0f}% left (median of {TURNS} pairs)"
            )
        phases = found.get("phases_s", {})
        whole = sum(phases.values())
        for name, seconds in phases.items():
            print(
                f"  {name:26} {1e3 * seconds / found['iterations']:8.2f} ms an iteration  "
                f"{100 * seconds / whole:5.1f}%"
            )
    print(json.dumps({"modes": results} | record(built, UNUSED)))


if __name__ == "__main__":
    run(main)
