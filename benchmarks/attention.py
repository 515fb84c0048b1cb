"""How fast attention streams live keys and values, beside this machine's reading of the same bytes.

    python -m benchmarks.attention --model gpt2 [--dtype bfloat16] [--rows 1,8,32,64]
        [--contexts 128,256,1024] [--block-size 16] [--threads 2] [--kv-dtype int8]

Decode rows of one context attend to blocks in order (consecutive) and in none (scattered, as prefix
caching and blocks on demand leave them), one layer after another, of as many layers as no cache
holds. The three take turns; medians count. No weights are needed.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import kernels
from benchmarks.engine import fill
from benchmarks.harness import Benchmark, Numbers, alternate, run
from benchmarks.offline import decode_rows
from config import Config, ConfigError
from generate.attention import KernelAttention
from model import KVCache

BYTES = 400_000_000  # of a turn at least
BENCHMARK = Benchmark(
    "attention",
    "How fast attention streams keys and values on a CPU.",
    {
        "--rows": (Numbers("1,8,32,64"), "rows of a step"),
        "--contexts": (Numbers("128,256,1024"), "tokens of each row"),
        "--repeats": (7, "turns, of which the median counts"),
    },
    {*Config.model_fields} - {"model", "device", "dtype", "threads", "block_size", "kv_dtype"},
)


def measure(config: Config, n: int, context: int, repeats: int) -> dict[str, Any]:
    """Bytes a second of each kind of turn."""
    live = n * context * config.shape.kv_bytes_per_token(config.kept_as) // config.shape.n_layer
    shape = replace(config.shape, n_layer=max(2, -(-BYTES // live)))
    rows = decode_rows(n, context, config.block_size)
    n_blocks = sum(len(row.blocks) for row in rows)
    order = random.Random(0).sample(range(n_blocks), n_blocks)
    scattered = [row._replace(blocks=[order[block] for block in row.blocks]) for row in rows]
    cache = KVCache(shape, n_blocks, config.block_size, getattr(torch, config.kept_as), "cpu")
    fill(cache)
    attention, read_int64 = KernelAttention(cache), kernels.load().read_int64
    qkv = torch.randn(n, 3, shape.n_head, shape.head_size).to(getattr(torch, config.dtype))
    memory = torch.ones(shape.n_layer * live, dtype=torch.int8)  # touched

    def read(layer: int, _: Any) -> None:
        read_int64(memory.data_ptr() + layer * live, live // 8, config.threads)

    turns: dict[str, Callable[[int, Any], Any]] = {
        "read": read,
        "consecutive": attention.prepare(rows),
        "scattered": attention.prepare(scattered),
    }

    def seconds(name: str) -> float:
        start = time.perf_counter()
        for layer in range(shape.n_layer):
            turns[name](layer, qkv)
        return time.perf_counter() - start

    rates = {
        name: shape.n_layer * live / statistics.median(taken[1:])  # the first one warms up
        for name, taken in alternate(turns, seconds, 1 + repeats).items()
    }
    return {"rows": n, "context": context, "bytes": live, "bytes_per_s": rates}


def main() -> None:
    options, [config] = BENCHMARK.engine_configs(device="cpu")
    if config.attention != "kernel":
        raise ConfigError("this benchmark measures the CPU's kernel; use --device cpu and g++")
    torch.set_num_threads(config.threads)
    points = []
    print("  rows  context     read  consecutive  scattered, GB/s   of consecutive  of read")
    for context in options.contexts:
        for n in options.rows:
            points.append(measure(config, n, context, options.repeats))
            read, consecutive, scattered = points[-1]["bytes_per_s"].values()
            print(
                f"{n:6} {context:8} {read / 1e9:8.1f} {consecutive / 1e9:12.1f} "
                f"{scattered / 1e9:10.1f} {100 * scattered / consecutive:21.0f}% "
                f"{100 * scattered / read:7.0f}%",
                flush=True,
            )
    print(json.dumps({"points": points} | BENCHMARK.record([config])))


if __name__ == "__main__":
    run(main)
