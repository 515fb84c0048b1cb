"""Swapping beside recomputing: what a preempted request costs either way, by its length, on the
real engine. (What either costs a whole trace: studies/memory.py.)
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from compare.report.tables import formatted
from config import Config, build
from generate import load_generator
from generate.swap import SwappingGenerator
from scheduling.inference import Inference, Iteration, Row
from simulate.costs import Costs, load
from simulate.time import PS
from studies.runner import FinishedRuns
from studies.study import Case, Cases, Study, Table, grid, mean, only
from weights import locate

LARGER = {"model": "gpt2", "weights": "random", "tokenizer": "bytes", "dtype": "bfloat16"}
MODELS = {"demo": {"model": "demo"}, "GPT-2 124M": LARGER}
COSTS = {"demo": "demo", "GPT-2 124M": "gpt2"}
TOKENS = (16, 64, 256, 1000)
SWAP = {"kv_reservation": "demand", "preemption": "swap", "kv_cache": "512blocks"}
REPEATS = 5  # of each run, of which the median counts


@functools.cache
def engine(model: str) -> tuple[Config, SwappingGenerator, Costs]:
    config = build("dynamic", MODELS[model] | SWAP, {})
    generator = load_generator(config, locate(config), 257)
    assert isinstance(generator, SwappingGenerator)
    every = [(block, block) for block in range(config.n_blocks)]
    generator.host.copy(every, every)  # memory is there once it was written
    return config, generator, load(COSTS[model])


def chunks(n: int, config: Config, blocks: list[int]) -> Iterator[Iteration]:
    """Yield the iterations that recompute n tokens and compute the one after them."""
    inference = Inference([7] * n, 2, tokens=[7])
    for start in range(0, n + 1, config.token_budget):
        tokens = min(config.token_budget, n + 1 - start)
        yield alone(Row(inference, start, tokens, blocks, start + tokens > n, False))


def alone(row: Row) -> Iteration:
    return Iteration([row], running=1, waiting=0, blocks_used=0)


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return milliseconds of a request's copies and of its recomputation, without the step that
    follows either; and the GB a second of the copies, and those with which both would take as long.
    """
    config, generator, costs = engine(case["model"])
    torch.set_num_threads(config.threads)
    tokens, n_blocks = case["tokens"], config.n_blocks
    used = -(-(tokens + 1) // config.block_size)
    seconds: dict[str, list[float]] = {name: [] for name in ("swapped", "recomputed", "step")}
    for k in range(REPEATS):
        # not those of the last time, which the processor's cache may hold
        blocks = [(k * used + i) % n_blocks for i in range(used)]
        copied = [(block, block) for block in blocks[: -(-tokens // config.block_size)]]
        recomputation = list(chunks(tokens, config, blocks))
        step = recomputation[-1].rows[0]._replace(start=tokens, n_tokens=1, samples=True)
        times = [time.perf_counter()]
        for iteration in recomputation:
            generator.generate(iteration)
        times.append(time.perf_counter())
        generator.host.copy(copied, copied)
        times.append(time.perf_counter())
        generator.generate(alone(step))
        times.append(time.perf_counter())
        for name, (begun, ended) in zip(
            ("recomputed", "swapped", "step"), itertools.pairwise(times)
        ):
            seconds[name].append(ended - begun)
    swapped, recomputed, one = map(statistics.median, seconds.values())
    gigabytes = 2 * len(copied) * config.block_bytes / 1e9
    by_costs = sum(map(costs.of, recomputation)) - costs.of(alone(step))
    return {
        "swapped": 1e3 * swapped,
        "recomputed": 1e3 * (recomputed - one),
        "by_costs": 1e3 * by_costs / PS,
        "times": (recomputed - one) / swapped,
        "copied": gigabytes / swapped,
        "even": gigabytes / (recomputed - one),
    }


def verdict(cases: Cases) -> str:
    """Say from which length on swapping takes less, and hold the claim against the ratio."""
    parts = []
    for model in dict.fromkeys(case["model"] for case in cases):
        of_model = only(cases, {"model": model})
        sooner = [case["tokens"] for case in of_model if mean(case, "times").mean > 1]
        first = f"from {min(sooner)} tokens on" if sooner else "at no length"
        least = min(of_model, key=lambda case: mean(case, "times").mean)
        parts.append(
            f"- {model}: swapping takes less time {first}. Recomputing takes at least "
            f"{formatted(mean(least, 'times'), '{:.1f}')} times as long."
        )
    return "\n".join(parts)


STUDY = Study(
    name="swap",
    title="Preemption: swapping or recomputing",
    question="From which length on does copying a preempted request to the host and back take less "
    "time than computing it again?",
    source="recomputing is better with small blocks, swapping with large ones, and recomputing "
    "never takes more than 20% longer than swapping (Kwon et al., SOSP 2023, section 7.3, on a "
    "GPU)",
    workload="one request at a time, {seeds} runs, blocks of 16 tokens, real engine; the device is "
    "a CPU, so both copies are made within one memory",
    requests=0,
    seeds=5,
    cases=grid(model=MODELS, tokens=TOKENS),
    run=run,
    servers=True,
    measures={
        "swapped": ("copied out and in, ms", "{:.3f}"),
        "recomputed": ("recomputed, ms", "{:.2f}"),
        "by_costs": ("recomputed in the simulator, ms", "{:.2f}"),
        "times": ("recomputed ÷ copied", "{:.1f}"),
        "copied": ("speed of copies, GB/s", "{:.1f}"),
        "even": ("speed at which both take as long, GB/s", "{:.2f}"),
    },
    text=verdict,
    tables=[Table(("model", "tokens"))],
)
