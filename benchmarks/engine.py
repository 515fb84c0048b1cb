"""Step time against what the machine allows: bandwidth and arithmetic, measured around each step.

    python -m benchmarks.engine --model FOLDER [--rows 1,8,64] [--contexts 64,256]
        [--prompts 16,128] [any server setting]

A step is one iteration of decode rows of one context through the engine, greedy sampling included.
It cannot be shorter than reading every weight and live key and value once, nor than its arithmetic;
the bound is the larger of the two, as if they overlapped wholly. A CPU's reading is measured with
loads like the kernels' over as many bytes as the step reads, for caches hold a part of them. The
speed of a shared machine changes by the minute, so steps and probes take turns, and each step is
held against the faster probe of the two beside it. --prompts: steps of 8 decode rows with a prompt
of so many tokens besides. Writes figure F7 to --out. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks import figures
from benchmarks.common import NO_HTTP, PREFIXES, configs, record, run
from client.machine import processor
from compare.report import drawing
from config import ONLY_IN, Config, ConfigError, Parser
from config.resolve import native_bfloat16
from generate import load_generator
from generate.cached import CachedGenerator
from generate.linear import Int8Linear
from model import KVCache
from scheduling.inference import Inference, Iteration, Row
from weights import locate

GPU_BYTES = 1_000_000_000  # no cache holds as much, and a small GPU has as much to spare
PROBES = 2  # of which the faster counts
PROBE_WIDTH = {"cpu": 2048, "cuda": 8192}
BESIDE = 8  # rows that decode beside a prompt
# neither a scheduler nor its loop
UNUSED = NO_HTTP | PREFIXES | {"mode", "max_waiting", "loop_interval_ms", *ONLY_IN}


def fastest(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


class Machine:
    """What this machine allows: bytes read, and FLOP, a second; the best probes so far."""

    def __init__(self, config: Config, most_bytes: int, rows: int):
        """most_bytes: that a step reads. rows: of the largest one."""
        self._threads = config.threads
        self._cpu = config.device == "cpu"
        # where bfloat16 is not native, the kernels multiply in float32
        native = not self._cpu or native_bfloat16()
        dtype = torch.bfloat16 if config.dtype == "bfloat16" and native else torch.float32
        int8 = config.multiplied_as == "int8"  # of which our kernel itself is the measure
        self.dtype = torch.int8 if int8 else dtype
        if not self._cpu:
            most_bytes = GPU_BYTES
        self._array = torch.ones(most_bytes // 8, dtype=torch.int64, device=config.device)
        width, inner = PROBE_WIDTH[config.device], config.shape.n_embd
        # a large product, and the largest of a step's layers
        shapes = [(width, width, width), (rows, inner, 4 * inner)]
        self._products: list[tuple[int, Callable[[], Tensor]]] = []  # operations, and doing them
        for m, k, n in shapes:
            a, b = (torch.randn(s, device=config.device).to(dtype) for s in ((m, k), (k, n)))
            product = partial(Int8Linear(b, None), a) if int8 else partial(torch.matmul, a, b)
            self._products.append((2 * m * k * n, product))
        self.bytes_per_s = self.flops_per_s = 0.0

    def bound(self, n_bytes: int, flops: int) -> tuple[float, float]:
        """Seconds to read so many bytes now, and to do the arithmetic."""
        words = self._array[: n_bytes // 8] if self._cpu else self._array
        size = 8 * words.numel()
        read = size / fastest(lambda: self._read(words), PROBES)
        multiply = max(
            operations / fastest(product, PROBES) for operations, product in self._products
        )
        self.bytes_per_s = max(self.bytes_per_s, read)
        self.flops_per_s = max(self.flops_per_s, multiply)
        return n_bytes / read, flops / multiply

    def _read(self, words: torch.Tensor) -> None:
        if self._cpu and kernels.why_unavailable() is None:
            kernels.load().read_int64(words.data_ptr(), words.numel(), self._threads)
        else:
            words.sum()


def fill(cache: KVCache) -> None:
    """Write every slot once: memory that never was written is all one page of zeros, which is read
    from a cache.
    """
    for tensor in (*cache.layers, *(cache.scales or ())):
        tensor.fill_(1)


def decode_rows(n: int, context: int, block_size: int) -> list[Row]:
    """n rows about to compute their token number `context`, each in blocks of its own."""
    each = -(-context // block_size)
    prompt = [i % 256 for i in range(context)]
    return [
        Row(
            Inference(prompt, 1),
            context - 1,
            1,
            list(range(i * each, (i + 1) * each)),
            samples=True,
            idle=False,
        )
        for i in range(n)
    ]


def prompt_row(tokens: int, first_block: int, block_size: int) -> Row:
    """A row about to compute a whole prompt, in the blocks from `first_block` on."""
    blocks = list(range(first_block, first_block + -(-tokens // block_size)))
    return Row(
        Inference([i % 256 for i in range(tokens)], 1), 0, tokens, blocks, samples=True, idle=False
    )


def step_seconds(generator: CachedGenerator, rows: list[Row], repeats: int) -> float:
    """The median step."""
    return statistics.median(seconds for seconds, _ in timed_steps(generator, rows, repeats))


def timed_steps(
    generator: CachedGenerator,
    rows: list[Row],
    repeats: int,
    between: Callable[[], Any] = lambda: None,
) -> Iterator[tuple[float, Any]]:
    """Seconds of each step, and what `between`, called after it, returned.

    A step that is not timed comes before each, for `between` may have filled the caches.
    """
    iteration = Iteration(rows, running=len(rows), waiting=0, blocks_used=0)
    for _ in range(repeats):
        generator.generate(iteration)
        start = time.perf_counter()
        generator.generate(iteration)
        yield time.perf_counter() - start, between()


def against_bound(
    generator: CachedGenerator, machine: Machine, config: Config, n: int, context: int, repeats: int
) -> dict[str, Any]:
    """Medians of a step of n rows, of its bound, and of the part of the bound that it reached, each
    step held against the faster of its two neighbours.
    """
    n_bytes = config.shape.step_bytes(n, context, config.multiplied_as, config.kept_as)
    probe = partial(machine.bound, n_bytes, config.shape.step_flops(n, context))
    before = probe()
    taken, bounds = [], []
    rows = decode_rows(n, context, config.block_size)
    for seconds, after in timed_steps(generator, rows, repeats, probe):
        taken.append(seconds)
        bounds.append(tuple(map(min, before, after)))
        before = after
    reached = sorted(max(bound) / seconds for bound, seconds in zip(bounds, taken))
    memory_s, arithmetic_s = map(statistics.median, zip(*bounds))
    return {
        "rows": n,
        "context": context,
        "bytes": n_bytes,
        "seconds": statistics.median(taken),
        "memory_s": memory_s,
        "arithmetic_s": arithmetic_s,
        "reached": statistics.median(reached),
        "reached_least": reached[0],
        "reached_most": reached[-1],
    }


def measure(
    config: Config, rows: list[int], contexts: list[int], prompts: list[int], repeats: int
) -> dict[str, Any]:
    torch.set_num_threads(config.threads)
    types = config.multiplied_as, config.kept_as
    # before the engine, which on a GPU takes what memory is left
    machine = Machine(
        config,
        config.shape.step_bytes(max(rows), max(contexts), *types),
        max(rows),
    )
    start = time.perf_counter()
    generator = load_generator(config, locate(config), config.shape.vocab_size)
    load_s = time.perf_counter() - start
    assert isinstance(generator, CachedGenerator)
    if max(rows) * -(-max(contexts) // config.block_size) > (generator.n_blocks or 0):
        raise ConfigError(
            "the KV cache does not hold that many rows of that context; raise --kv-cache"
        )
    fill(generator.attention.cache)
    points, mixed = [], []
    print("  rows  context    step, ms    tok/s  memory bound, ms  arithmetic bound, ms  reached")
    for context in contexts:
        for n in rows:
            point = against_bound(generator, machine, config, n, context, repeats)
            points.append(point)
            seconds = point["seconds"]
            print(
                f"{n:6} {context:8} {1e3 * seconds:11.2f} {n / seconds:8.1f} "
                f"{1e3 * point['memory_s']:17.2f} {1e3 * point['arithmetic_s']:21.2f} "
                f"{100 * point['reached']:7.0f}% "
                f"({100 * point['reached_least']:.0f} to {100 * point['reached_most']:.0f})",
                flush=True,
            )
    where = "this GPU" if config.device == "cuda" else f"this machine, {config.threads} threads"
    print(
        f"{where}: reads up to {machine.bytes_per_s / 1e9:,.1f} GB/s, "
        f"{machine.flops_per_s / 1e9:,.0f} GFLOP/s ({machine.dtype})"
    )
    for tokens in prompts:
        decode = decode_rows(BESIDE, contexts[0], config.block_size)
        beside = prompt_row(tokens, sum(len(row.blocks) for row in decode), config.block_size)
        mixed.append(
            {
                "prompt_tokens": tokens,
                "seconds": step_seconds(generator, [*decode, beside], repeats),
            }
        )
        print(
            f"{BESIDE} rows of context {contexts[0]} and a prompt of {tokens} tokens: "
            f"{1e3 * mixed[-1]['seconds']:.2f} ms"
        )
    found = {
        "bytes_per_s": machine.bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "flops_dtype": str(machine.dtype),
        "load_s": load_s,
    }
    return found | {"steps": points, "with_a_prompt": mixed}


def numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ConfigError(f"{text!r} is no list of positive numbers such as 1,8,64")
    return values


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.engine",
        description="Step time by rows and context.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", default="1,2,4,8,16,32,64", help="default: 1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="64,256", help="tokens of each row (default: 64,256)")
    parser.add_argument(
        "--prompts", help=f"tokens of a prompt beside {BESIDE} rows (default: none)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="steps, of which the median counts (default: 7)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/engine"),
        help="folder for the figure (default: runs/engine)",
    )
    options, [config] = configs(
        parser,
        sys.argv[1:],
        lambda known: ["dynamic"],
        UNUSED,
        max_batch_size=lambda known: max(numbers(known.rows)),
    )
    rows, contexts = numbers(options.rows), numbers(options.contexts)
    prompts = numbers(options.prompts) if options.prompts else []
    if max(contexts + prompts) > config.max_model_len:
        raise ConfigError(
            f"this model's rows hold at most {config.max_model_len} tokens; "
            f"lower --contexts or --prompts"
        )
    if max(rows) > config.max_batch_size:
        raise ConfigError(
            f"--rows {options.rows}: "
            f"the engine is built for --max-batch-size {config.max_batch_size} at most"
        )
    if prompts and (config.max_batch_size <= BESIDE or max(prompts) > config.token_budget):
        raise ConfigError(
            f"--prompts needs a --max-batch-size over {BESIDE} and a --token-budget of its largest"
        )
    result = measure(config, rows, contexts, prompts, max(1, options.repeats)) | record(
        [config], UNUSED
    )
    options.out.mkdir(parents=True, exist_ok=True)
    caption = (
        f"{Path(config.model).name}, {config.dtype} · "
        f"{processor(result['hardware'], result['config'])}: "
        f"{result['bytes_per_s'] / 1e9:,.1f} GB/s, {result['flops_per_s'] / 1e9:,.0f} GFLOP/s · "
        f"commit {result['commit']}"
    )
    drawing.save(figures.step_time(result["steps"], caption), options.out / "step_time.png")
    print(f"figure: {options.out / 'step_time.png'}")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
