"""Step time against what the machine allows: bandwidth and arithmetic, measured around each step.

    python -m lab.benchmarks.engine --model FOLDER [--rows 1,8,64] [--contexts 64,256]
        [--sampling greedy,drawn,top] [any server setting]

A step is one iteration of decode rows of one context through the engine, sampling included.
On a GPU it is also timed in a sequence, in which each step is launched before the host has read the
ids of the previous one, as in a server that plans ahead.
It cannot be shorter than reading every weight and live key and value once, nor than its arithmetic;
the bound is the larger of the two, as if they overlapped wholly. A CPU's reading is measured with
loads like the kernels' over as many bytes as the step reads, for caches hold a part of them. Steps
and probes take turns, and each step is held against the faster probe of the two beside it.
Writes engine.md, engine.json and a figure to --out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from client.drawing import new_figure, plain_log, save, styled
from client.machine import processor
from compare.report.tables import markdown
from config.config import Config
from config.settings import ONLY_IN, ConfigError
from generate import kernels
from generate.auto import native_bfloat16
from generate.cached import CachedGenerator
from generate.linear import Int8Linear
from lab.benchmarks.harness import NO_HTTP, Benchmark, run
from lab.benchmarks.offline import decode_rows, load
from scheduling.inference import Iteration, Row
from scheduling.sampling import Sampling

GPU_BYTES = 1_000_000_000  # no cache holds as much, and a small GPU has as much to spare
PROBES = 2  # the faster one counts
SEQUENCE = 16  # steps of one
PROBE_WIDTH = {"cpu": 2048, "cuda": 8192}
SAMPLINGS = {  # by the names that --sampling takes
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0),
    "top": Sampling(temperature=1.0, top_k=50, top_p=0.9),
}
BENCHMARK = Benchmark(
    "engine",
    __doc__,
    {
        "--rows": ("1,2,4,8,16,32,64", "rows of a step"),
        "--contexts": ("64,256", "tokens of each row"),
        "--sampling": ("greedy", "greedy, drawn (temperature 1), top (and top-k 50, top-p 0.9)"),
        "--repeats": (7, "steps to time; the median counts"),
        "--out": (Path("runs/engine"), "folder"),
    },
    # neither a scheduler nor its loop
    NO_HTTP | {"mode", "order", "prefix_caching", "max_waiting", "loop_interval_ms", *ONLY_IN},
    of_engine=True,
)


def numbers(text: str) -> list[int]:
    """Positive numbers as a user types them: 1,8,64. Raises ConfigError."""
    values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise ConfigError(f"{text!r} is no list of positive numbers such as 1,8,64")
    return values


def samplings(text: str) -> list[str]:
    """Keys of SAMPLINGS as a user types them: greedy,drawn. Raises ConfigError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SAMPLINGS]:
        raise ConfigError(f"--sampling {unknown[0]}: the ways are {', '.join(SAMPLINGS)}")
    return names


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
    """Bytes read and FLOP a second that this machine allows; the best probes so far."""

    def __init__(self, config: Config, most_bytes: int, rows: int):
        """most_bytes: read by a step. rows: of the largest step."""
        self._threads = config.threads
        self._cpu = config.device == "cpu"
        # where bfloat16 is not native, the kernels multiply in float32
        native = not self._cpu or native_bfloat16()
        dtype = torch.bfloat16 if config.dtype == "bfloat16" and native else torch.float32
        int8 = config.multiplied_as == "int8"  # measured by our own kernel
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
        read = 8 * words.numel() / fastest(lambda: self._read(words), PROBES)
        multiply = max(
            operations / fastest(product, PROBES) for operations, product in self._products
        )
        self.bytes_per_s = max(self.bytes_per_s, read)
        self.flops_per_s = max(self.flops_per_s, multiply)
        return n_bytes / read, flops / multiply

    def _read(self, words: Tensor) -> None:
        if self._cpu and kernels.why_unavailable() is None:
            kernels.load().read_int64(words.data_ptr(), words.numel(), self._threads)
        else:
            words.sum()


def timed_steps(
    engine: CachedGenerator, rows: list[Row], repeats: int, between: Callable[[], Any]
) -> Iterator[tuple[float, Any]]:
    """Seconds of each step, and the result of `between`, called after it.

    A step that is not timed comes before each, for `between` may have filled the caches.
    """
    iteration = Iteration(rows, running=len(rows), waiting=0, blocks_used=0)
    for _ in range(repeats):
        engine.generate(iteration)
        start = time.perf_counter()
        engine.generate(iteration)
        yield time.perf_counter() - start, between()


def in_sequence(engine: CachedGenerator, rows: list[Row]) -> float:
    """Seconds per step of a sequence, each launched before the ids of the previous one are read.

    rows: with pending tokens.
    """
    iteration = Iteration(rows, running=len(rows), waiting=0, blocks_used=0)
    ids = engine.launch(iteration)
    ids()
    start = time.perf_counter()
    for _ in range(SEQUENCE):
        following = engine.launch(iteration)
        ids()
        ids = following
    ids()
    return (time.perf_counter() - start) / SEQUENCE


def against_bound(
    engine: CachedGenerator,
    machine: Machine,
    config: Config,
    n: int,
    context: int,
    sampling: str,
    repeats: int,
) -> dict[str, Any]:
    """Medians of a step of n rows, of its bound, and of the part of the bound that it reached.

    sampling: a key of SAMPLINGS. The bound knows nothing of it.
    """
    n_bytes = config.shape.step_bytes(n, context, config.multiplied_as, config.kept_as)
    probe = partial(machine.bound, n_bytes, config.shape.step_flops(n, context))
    before = probe()
    taken, bounds = [], []
    rows = decode_rows(n, context, config.block_size, SAMPLINGS[sampling])
    for seconds, after in timed_steps(engine, rows, repeats, probe):
        taken.append(seconds)
        bounds.append(tuple(map(min, before, after)))
        before = after
    of_sequence = None
    if config.ahead:
        pending = decode_rows(n, context, config.block_size, SAMPLINGS[sampling], pending=True)
        of_sequence = statistics.median(in_sequence(engine, pending) for _ in range(repeats))
    reached = sorted(max(bound) / seconds for bound, seconds in zip(bounds, taken))
    memory_s, arithmetic_s = map(statistics.median, zip(*bounds))
    return {
        "rows": n, "context": context, "sampling": sampling, "bytes": n_bytes,
        "seconds": statistics.median(taken), "of_sequence_s": of_sequence,
        "memory_s": memory_s, "arithmetic_s": arithmetic_s,
        "reached": statistics.median(reached), "reached_least": reached[0],
        "reached_most": reached[-1],
    }  # fmt: skip


def measure(
    config: Config,
    rows: Sequence[int],
    contexts: Sequence[int],
    sampled: Sequence[str],
    repeats: int,
) -> dict[str, Any]:
    torch.set_num_threads(config.threads)
    # before the engine, which on a GPU takes what memory is left
    most = config.shape.step_bytes(max(rows), max(contexts), config.multiplied_as, config.kept_as)
    machine = Machine(config, most, max(rows))
    engine = load(config)
    assert isinstance(engine, CachedGenerator)
    if max(rows) * -(-max(contexts) // config.block_size) > (engine.n_blocks or 0):
        raise ConfigError(
            "the KV cache does not hold that many rows of that context; raise --kv-cache"
        )
    kept = engine.attention.cache
    for tensor in (*kept.layers, *(kept.scales or ())):
        tensor.fill_(1)  # memory that never was written is one page of zeros, in the CPU's cache
    steps = []
    for context, sampling, n in product(contexts, sampled, rows):
        step = against_bound(engine, machine, config, n, context, sampling, repeats)
        steps.append(step)
        took = f"{1e3 * step['seconds']:.2f} ms"
        print(f"{n} rows of context {context}, {sampling}: {took}", flush=True)
    return {
        "bytes_per_s": machine.bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "flops_dtype": str(machine.dtype),
        "steps": steps,
    }


def table(result: Mapping[str, Any]) -> str:
    """A line for each kind of step; the bound is the larger of its two."""
    ahead = any(step["of_sequence_s"] for step in result["steps"])
    first = ["rows", "context", "sampling", "step, ms", "bound, ms", "reached, %", "tok/s"]
    lines = [[*first, *["in a sequence, ms"] * ahead]]
    for step in result["steps"]:
        rows, context, seconds = step["rows"], step["context"], step["seconds"]
        bound_s = max(step["memory_s"], step["arithmetic_s"])
        part, least, most = (100 * step[f"reached{end}"] for end in ("", "_least", "_most"))
        times = f"{1e3 * seconds:.2f}", f"{1e3 * bound_s:.2f}"
        reached = f"{part:.0f} ({least:.0f} to {most:.0f})"
        where = str(rows), str(context), step["sampling"]
        line = [*where, *times, reached, f"{rows / seconds:,.1f}"]
        if ahead:
            line += [f"{1e3 * step['of_sequence_s']:.2f}"]
        lines.append(line)
    return markdown(lines, left=0)


@styled
def step_time(steps: Sequence[Mapping[str, float]], caption: str) -> Figure:
    """A roofline: step time against rows, a colour a context, the bound as a dashed line."""
    contexts = sorted({int(step["context"]) for step in steps})
    shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.75, len(contexts)))
    figure = new_figure((8, 4.8), caption)
    axis = figure.subplots()
    for context, shade in zip(contexts, shades):
        line = sorted((s for s in steps if s["context"] == context), key=lambda s: s["rows"])
        rows = [step["rows"] for step in line]
        measured = [1e3 * step["seconds"] for step in line]
        bound = [1e3 * max(step["memory_s"], step["arithmetic_s"]) for step in line]
        axis.plot(rows, measured, "o-", color=shade, label=f"measured, context {context}")
        axis.plot(rows, bound, "--", color=shade, lw=1.2, label=f"bound, context {context}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks := sorted({step["rows"] for step in steps}), map(str, ticks))
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.set(xlabel="rows", ylabel="step time, ms", title="The time of an iteration")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=9.5, ncols=2)
    return figure


def main() -> None:
    options, [config] = BENCHMARK.configs(max_batch_size=lambda options: max(numbers(options.rows)))
    rows, contexts = numbers(options.rows), numbers(options.contexts)
    sampled = samplings(options.sampling)
    if max(contexts) > config.max_model_len:
        raise ConfigError(f"this model's rows hold at most {config.max_model_len} tokens")
    if options.repeats < 1:
        raise ConfigError("--repeats must be 1 or more")
    if max(rows) > config.max_batch_size:
        raise ConfigError(f"--rows {max(rows)}: raise --max-batch-size, {config.max_batch_size}")
    result = measure(config, rows, contexts, sampled, options.repeats)
    result |= BENCHMARK.record([config])
    settings = result["config"]
    caption = (
        f"{settings['model']}, {settings['dtype']} · {processor(result['hardware'], settings)} · "
        f"commit {result['commit']} · {result['bytes_per_s'] / 1e9:,.1f} GB/s, "
        f"{result['flops_per_s'] / 1e9:,.0f} GFLOP/s"
    )
    body = f"{table(result)}\n\n![Step time against the bound](step_time.png)"
    setup = f"medians of {options.repeats} steps; {caption}"
    BENCHMARK.write(options.out, "Step time against the machine's bound", setup, body, result)
    first = [step for step in result["steps"] if step["sampling"] == sampled[0]]
    save(step_time(first, caption), options.out / "step_time.png")


if __name__ == "__main__":
    run(main)
