"""Step time against what the machine allows: bandwidth and arithmetic, measured around each step.

    python -m benchmarks.engine --model FOLDER [--rows 1,8,64] [--contexts 64,256]
        [--prompts 16,128] [any server setting]

A step is one iteration of decode rows of one context through the engine, greedy sampling included.
It cannot be shorter than reading every weight and live key and value once, nor than its arithmetic;
the bound is the larger of the two, as if they overlapped wholly. A CPU's reading is measured with
loads like the kernels' over as many bytes as the step reads, for caches hold a part of them, and of
all measurements the best counts: the speed of a shared machine changes by the minute, and a bound
that is beaten is none. --prompts: steps of 8 decode rows with a prompt of so many tokens besides.
Writes figure F7 to --out. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks import figures
from benchmarks.common import NO_HTTP, PREFIXES, configs, record, run
from client.machine import processor
from client.report import drawing
from config import ONLY_IN, Config, ConfigError, Parser
from config.resolve import native_bfloat16
from generate import load_generator
from generate.cached import CachedGenerator
from generate.linear import Int8Linear
from model import KVCache
from scheduling.inference import Inference, Iteration, Row
from weights import locate

GPU_BYTES = 1_000_000_000  # no cache holds as much, and a small GPU has as much to spare
PROBES = 5  # of which the fastest counts
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
    """What this machine allows by its best probe so far: bytes read, and FLOP, a second."""

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
        self._rates: dict[int, float] = {}  # bytes a second by bytes
        self.flops_per_s = 0.0

    def probe(self, n_bytes: int) -> None:
        """Measure reading so many bytes, and multiplying."""
        words = self._array[: n_bytes // 8] if self._cpu else self._array
        size = 8 * words.numel()
        self._rates[size] = max(
            self._rates.get(size, 0.0), size / fastest(lambda: self._read(words), PROBES)
        )
        for operations, product in self._products:
            self.flops_per_s = max(self.flops_per_s, operations / fastest(product, PROBES))

    def _read(self, words: torch.Tensor) -> None:
        if self._cpu and kernels.why_unavailable() is None:
            kernels.load().read_int64(words.data_ptr(), words.numel(), self._threads)
        else:
            words.sum()

    def bytes_per_s(self, n_bytes: int = 0) -> float:
        """How fast at least so many bytes are read: more of them are never read faster for that."""
        return max(
            rate for size, rate in self._rates.items() if not self._cpu or size >= n_bytes // 8 * 8
        )


def fill(cache: KVCache) -> None:
    """Write every slot once: memory that never was written is all one page of zeros, which is read
    from a cache.
    """
    for tensor in (*cache.layers, *(cache.scales or ())):
        tensor.fill_(1)


def decode_rows(n: int, context: int, block_size: int) -> list[Row]:
    """n rows about to compute their token number `context`, each in blocks of its own."""
    each = -(-context // block_size)
    prompt = [i % 1000 for i in range(context)]
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
        Inference([i % 1000 for i in range(tokens)], 1), 0, tokens, blocks, samples=True, idle=False
    )


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
            "the KV cache does not hold that many rows of that context; raise --kv-cache-gb"
        )
    fill(generator.attention.cache)
    points: list[dict[str, Any]] = []
    mixed = []
    for context in contexts:
        for n in rows:
            n_bytes = config.shape.step_bytes(n, context, *types)
            machine.probe(n_bytes)
            seconds = step_seconds(generator, decode_rows(n, context, config.block_size), repeats)
            machine.probe(n_bytes)
            points.append({"rows": n, "context": context, "seconds": seconds, "bytes": n_bytes})
    read, multiply = machine.bytes_per_s(), machine.flops_per_s
    where = "this GPU" if config.device == "cuda" else f"this machine, {config.threads} threads"
    print(
        f"{where}: reads up to {read / 1e9:,.1f} GB/s, "
        f"{multiply / 1e9:,.0f} GFLOP/s ({machine.dtype})"
    )
    print(
        "  rows  context    step, ms    tok/s  memory bound, ms  arithmetic bound, ms  of the bound"
    )
    for point in points:
        n, context, seconds = point["rows"], point["context"], point["seconds"]
        memory_s = point["memory_s"] = point["bytes"] / machine.bytes_per_s(point["bytes"])
        arithmetic_s = point["arithmetic_s"] = config.shape.step_flops(n, context) / multiply
        print(
            f"{n:6} {context:8} {1e3 * seconds:11.2f} {n / seconds:8.1f} "
            f"{1e3 * memory_s:17.2f} {1e3 * arithmetic_s:21.2f} "
            f"{100 * max(memory_s, arithmetic_s) / seconds:12.0f}%"
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
        "bytes_per_s": read,
        "flops_per_s": multiply,
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
