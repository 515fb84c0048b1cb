"""Step time against what the machine allows: its bandwidth and arithmetic are measured first.

    python -m benchmarks.engine --model FOLDER [--rows 1,8,64] [--contexts 64,256] [--out FOLDER] [any server setting]

A step is one iteration of decode rows of one context through the engine, greedy sampling included. It cannot be
shorter than reading every weight and live key and value once, nor than its arithmetic; the bound is the larger of the two,
as if they overlapped wholly. Writes figure F7 to --out. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import configs, record, run
from client import graph
from config import Config, ConfigError, Parser
from defaults import native_bfloat16
from generate import load_generator
from generate.cached import CachedGenerator
from inference import Inference, Iteration, Row
from weights import locate

PROBE_BYTES = 1_000_000_000
PROBE_WIDTH = 2048


def fastest(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def bandwidth() -> float:
    """Bytes a second that all threads together read: the sum over an array no cache holds."""
    array = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    return PROBE_BYTES / fastest(lambda: array.sum(), 5)


def arithmetic(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product."""
    a = torch.randn(PROBE_WIDTH, PROBE_WIDTH).to(dtype)
    return 2 * PROBE_WIDTH**3 / fastest(lambda: a @ a, 5)


def decode_rows(n: int, context: int, block_size: int) -> list[Row]:
    """n rows about to compute their token number `context`, each in blocks of its own."""
    each = -(-context // block_size)
    prompt = [i % 1000 for i in range(context)]
    return [
        Row(Inference(prompt, 1), context - 1, 1, list(range(i * each, (i + 1) * each)), samples=True, idle=False)
        for i in range(n)
    ]


def step_seconds(generator: CachedGenerator, rows: list[Row], repeats: int) -> float:
    """The median step."""
    iteration = Iteration(rows, running=len(rows), waiting=0, blocks_used=0)
    generator.generate(iteration)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        generator.generate(iteration)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(config: Config, rows: list[int], contexts: list[int], repeats: int) -> dict[str, Any]:
    torch.set_num_threads(config.threads)
    # where bfloat16 is not native, the kernels multiply in float32
    probe = torch.bfloat16 if config.dtype == "bfloat16" and native_bfloat16() else torch.float32
    read, multiply = bandwidth(), arithmetic(probe)
    print(f"this machine, {config.threads} threads: reads {read / 1e9:.1f} GB/s, {multiply / 1e9:,.0f} GFLOP/s ({probe})")
    generator = load_generator(config, locate(config), config.shape.vocab_size)
    assert isinstance(generator, CachedGenerator)
    points = []
    print("  rows  context    step, ms    tok/s  memory bound, ms  arithmetic bound, ms  of the bound")
    for context in contexts:
        for n in rows:
            seconds = step_seconds(generator, decode_rows(n, context, config.block_size), repeats)
            memory_s = config.shape.step_bytes(n, context, config.dtype) / read
            arithmetic_s = config.shape.step_flops(n, context) / multiply
            points.append(
                {"rows": n, "context": context, "seconds": seconds, "memory_s": memory_s, "arithmetic_s": arithmetic_s}
            )
            print(
                f"{n:6} {context:8} {1e3 * seconds:11.2f} {n / seconds:8.1f} {1e3 * memory_s:17.2f} {1e3 * arithmetic_s:21.2f}"
                f" {100 * max(memory_s, arithmetic_s) / seconds:12.0f}%"
            )
    return {"bytes_per_s": read, "flops_per_s": multiply, "flops_dtype": str(probe), "steps": points}


def numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ConfigError(f"{text!r} is no list of positive numbers such as 1,8,64")
    return values


def main() -> None:
    parser = Parser(prog="python -m benchmarks.engine", description="Step time by rows and context.", allow_abbrev=False)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64", help="default: 1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="64,256", help="tokens of each row (default: 64,256)")
    parser.add_argument("--repeats", type=int, default=7, help="steps, of which the median counts (default: 7)")
    parser.add_argument("--out", type=Path, default=Path("runs/engine"), help="folder for the figure (default: runs/engine)")
    options, [config] = configs(
        parser, sys.argv[1:], lambda known: ["dynamic"], max_batch_size=lambda known: max(numbers(known.rows))
    )
    rows, contexts = numbers(options.rows), numbers(options.contexts)
    if max(contexts) > config.max_model_len:
        raise ConfigError(f"--contexts {options.contexts}: this model's rows hold at most {config.max_model_len} tokens")
    if max(rows) * -(-max(contexts) // config.block_size) > config.n_blocks:
        raise ConfigError("the KV cache does not hold that many rows of that context; raise --kv-cache-gb")
    result = measure(config, rows, contexts, max(1, options.repeats)) | record(config)
    options.out.mkdir(parents=True, exist_ok=True)
    caption = (
        f"{Path(config.model).name}, {config.dtype} · {result['hardware']['cpu']}, {config.threads} threads: "
        f"{result['bytes_per_s'] / 1e9:.1f} GB/s, {result['flops_per_s'] / 1e9:,.0f} GFLOP/s · commit {result['commit']}"
    )
    graph.step_time(result["steps"], options.out / "step_time.png", caption)
    print(f"figure: {options.out / 'step_time.png'}")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
