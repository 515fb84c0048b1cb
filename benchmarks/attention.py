"""How fast attention streams live keys and values, beside this machine's reading of the same bytes.

    python -m benchmarks.attention --model gpt2 [--dtype bfloat16] [--rows 1,8,32,64]
        [--contexts 128,256,1024] [--block-size 16] [--threads 2] [--kv-dtype int8]

Decode rows of one context attend to blocks in order (consecutive) and in none (scattered, as prefix
caching and blocks on demand leave them), one layer after another, of as many layers as no cache
holds. The three take turns, for the speed of a shared machine changes by the minute; medians count.
No weights are needed. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import kernels
from benchmarks.common import configs, record, run
from benchmarks.engine import decode_rows, fill, numbers
from config import Config, ConfigError, Parser
from generate.attention import KernelAttention
from model import KVCache
from scheduling.inference import Row

BYTES = 400_000_000  # of a turn at least
UNUSED = {*Config.model_fields} - {"model", "device", "dtype", "threads", "block_size", "kv_dtype"}


def scattered(rows: list[Row], n_blocks: int) -> list[Row]:
    """The same rows in blocks anywhere in the pool."""
    order = random.Random(0).sample(range(n_blocks), n_blocks)
    return [row._replace(blocks=[order[block] for block in row.blocks]) for row in rows]


def measure(config: Config, n: int, context: int, repeats: int) -> dict[str, Any]:
    """Bytes a second of each kind of turn."""
    live = n * context * config.shape.kv_bytes_per_token(config.kept_as) // config.shape.n_layer
    shape = replace(config.shape, n_layer=max(2, -(-BYTES // live)))
    rows = decode_rows(n, context, config.block_size)
    n_blocks = sum(len(row.blocks) for row in rows)
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
        "scattered": attention.prepare(scattered(rows, n_blocks)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(1 + repeats):  # one to warm up
        for name, turn in turns.items():
            start = time.perf_counter()
            for index in range(shape.n_layer):
                turn(index, qkv)
            seconds[name].append(time.perf_counter() - start)
    rates = {
        name: shape.n_layer * live / statistics.median(taken[1:]) for name, taken in seconds.items()
    }
    return {"rows": n, "context": context, "bytes": live, "bytes_per_s": rates}


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.attention",
        description="How fast attention streams keys and values on a CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", default="1,8,32,64", help="default: 1,8,32,64")
    parser.add_argument(
        "--contexts", default="128,256,1024", help="tokens of each row (default: 128,256,1024)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="turns, of which the median counts (default: 7)"
    )
    options, [config] = configs(
        parser, sys.argv[1:], lambda known: ["dynamic"], UNUSED, device=lambda known: "cpu"
    )
    if config.attention != "kernel":
        raise ConfigError("this benchmark measures the CPU's kernel; use --device cpu and g++")
    torch.set_num_threads(config.threads)
    points = []
    print("  rows  context     read  consecutive  scattered, GB/s   of consecutive  of read")
    for context in numbers(options.contexts):
        for n in numbers(options.rows):
            points.append(measure(config, n, context, max(1, options.repeats)))
            read, consecutive, found = points[-1]["bytes_per_s"].values()
            print(
                f"{n:6} {context:8} {read / 1e9:8.1f} {consecutive / 1e9:12.1f} {found / 1e9:10.1f}"
                f" {100 * found / consecutive:21.0f}% {100 * found / read:7.0f}%",
                flush=True,
            )
    print(json.dumps({"points": points} | record([config], UNUSED)))


if __name__ == "__main__":
    run(main)
