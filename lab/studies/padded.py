"""Rectangles beside a ragged kernel: what padding costs, by how far apart lengths are.

A burst is served by the server's scheduler and engine without HTTP, until nothing waits any more,
so that every row is taken. All engines then compute the same iterations.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import numpy as np
import torch

from client.draws import lengths
from compare.report.tables import formatted, markdown
from config import Config, build
from generate.loading import load_generator
from generate.weights import locate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, grid, only, ratio
from scheduling.building import build_scheduler
from scheduling.inference import Generator, Inference

LARGER = {"model": "gpt2", "weights": "random", "tokenizer": "bytes"}
MODELS = {"demo": {"model": "demo"}, "GPT-2 124M": LARGER}
MEAN = {"demo": 64, "GPT-2 124M": 24}  # tokens of a prompt, and of a completion
PART = {"demo": 1, "GPT-2 124M": 2}  # one in so many of the requests
SPREADS = {"equal": "fixed:{0}", "uniform": "uniform:1:{1}", "heavy tail": "lognormal:{2}:1.18:{3}"}
APART, TOGETHER, RAGGED = "padded, apart", "padded, together", "cached"
VARIANTS: dict[str, dict[str, Any]] = {
    TOGETHER: {"generator": "padded", "padded_prefill": "together"},
    APART: {"generator": "padded"},
    RAGGED: {},
    "cached, a call a row": {"attention": "plain"},
    "cached, plain": {"kernels": "plain"},
}
ROWS = 12


@functools.cache
def engine(model: str, variant: str) -> tuple[Config, Generator]:
    config = build("dynamic", {**MODELS[model], "max_batch_size": ROWS, **VARIANTS[variant]}, {})
    return config, load_generator(config, locate(config), 257)


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return tokens a second; padding's share of computed tokens; and the share that decode rows
    lack of a tight rectangle of their keys and values.
    """
    config, generator = engine(case["model"], case["variant"])
    mean, rng = MEAN[case["model"]], np.random.default_rng(seed)
    draw = lengths(SPREADS[case["lengths"]].format(mean, 2 * mean - 1, mean / 2, 7 * mean))
    drawn = draw(rng, n // PART[case["model"]]), draw(rng, n // PART[case["model"]])
    scheduler = build_scheduler(config)
    scheduler.enqueue([Inference([7] * p, k) for p, k in zip(*drawn)], 0.0)
    tokens = padding = filled = area = 0
    torch.set_num_threads(config.threads)
    start = time.perf_counter()
    while scheduler.waiting:
        iteration, _ = scheduler.schedule(time.perf_counter())
        scheduler.apply(iteration, generator.generate(iteration), time.perf_counter())
        ends = [row.start + 1 for row in iteration.rows if row.decodes]
        filled, area = filled + sum(ends), area + len(ends) * max(ends, default=0)
        tokens += sum(row.n_tokens for row in iteration.rows)
        padding += iteration.padding
    throughput = scheduler.completion_tokens / (time.perf_counter() - start)
    while scheduler.has_work:  # rows that never end would keep their lines of the rectangle
        iteration, _ = scheduler.schedule(start)
        scheduler.apply(iteration, generator.generate(iteration), start)
    return {
        "output_throughput": throughput,
        "padding": 100 * padding / (tokens + padding),
        "lacking": 100 * (1 - filled / area),
    }


def verdict(cases: Cases) -> str:
    """Show what prompts of their own give, and what the ragged kernel gives over that."""
    rows = [["model", "lengths", f"{APART} ÷ {TOGETHER}", f"{RAGGED} ÷ {APART}"]]
    for steps in zip(*(only(cases, {"variant": each}) for each in (TOGETHER, APART, RAGGED))):
        gains = [formatted(ratio(*pair, *TOKENS), "{:.2f}") for pair in itertools.pairwise(steps)]
        rows.append([steps[0]["model"], steps[0]["lengths"], *gains])
    return f"{ENGINES}\n\nThroughput, as ratios:\n\n{markdown(rows, left=2)}\n\nAll variants:"


ENGINES = """\
- `padded, together`: prompts and decode rows are one rectangle, as wide as the longest chunk.
- `padded, apart`: prompts are a rectangle of their own.
- `cached`: one call of a C++ kernel reads rows of different lengths, without padding.
- `cached, a call a row`: PyTorch computes attention, a row at a time; `cached, plain`: all of it.

Keys and values: the share of padding in a rectangle that holds those of all decode rows."""


TOKENS = ["output_throughput"]
STUDY = Study(
    name="padded",
    title="Padded batches and a ragged kernel",
    question="How much slower is an engine that pads all rows of a batch to one length than one "
    "whose kernel reads rows of different lengths?",
    source="computing prompts in a batch of their own gives up to 1.75 times the throughput of an "
    "Orca that pads decode rows to the length of prompts (BATON, arXiv 2410.18701)",
    workload=f"a burst of {{n}} requests (half as many for GPT-2 124M), {{seeds}} seeds, {ROWS} "
    "rows, real engines on 2 cores, without HTTP",
    requests=64,
    seeds=3,
    cases=grid(model=MODELS, lengths=SPREADS, variant=VARIANTS),
    run=run,
    servers=True,
    measures={
        "output_throughput": ("throughput, tok/s", "{:,.0f}"),
        "padding": ("padding, % of computed tokens", "{:.0f}"),
        "lacking": ("keys and values: padding, %", "{:.0f}"),
    },
    text=verdict,
    tables=[
        Table(("model", "lengths", "variant"), (), [Against({"variant": TOGETHER}, ratios=TOKENS)])
    ],
    figure="Throughput of padded and ragged engines, by the spread of lengths",
    panels=[
        Panel(m, "throughput ÷ padded, together's", TOKENS[0], "lengths", where={"model": m},
              base={"variant": TOGETHER}) for m in MODELS
    ],
)  # fmt: skip
