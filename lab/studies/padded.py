"""Rectangles beside a ragged kernel: what padding costs, by how far apart lengths are.

A burst is served until nothing waits any more, so every row is taken, and all engines compute the
same iterations.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from client.draws import lengths
from lab.studies.engines import MODELS, engine, iterate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from scheduling.building import build_scheduler
from scheduling.inference import Inference

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


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return tokens per second; padding's share of computed tokens; and the share that decode rows
    lack of a tight rectangle of their keys and values.
    """
    model, variant = case["model"], VARIANTS[case["variant"]]
    config, generator = engine(**MODELS[model], **variant, max_batch_size=ROWS)
    mean, rng = MEAN[model], np.random.default_rng(seed)
    draw = lengths(SPREADS[case["lengths"]].format(mean, 2 * mean - 1, mean / 2, 7 * mean))
    drawn = draw(rng, n // PART[model]), draw(rng, n // PART[model])
    scheduler = build_scheduler(config)
    scheduler.enqueue([Inference([7] * p, k) for p, k in zip(*drawn)], 0.0)
    tokens = padding = filled = area = 0
    start = time.perf_counter()
    while scheduler.waiting:
        iteration = iterate(scheduler, generator)
        ends = [row.start + 1 for row in iteration.rows if row.decodes]
        filled, area = filled + sum(ends), area + len(ends) * max(ends, default=0)
        tokens += sum(row.n_tokens for row in iteration.rows)
        padding += iteration.padding
    throughput = scheduler.completion_tokens / (time.perf_counter() - start)
    while scheduler.has_work:  # rows that never end would keep their lines of the rectangle
        iterate(scheduler, generator)
    return {
        "output_throughput": throughput,
        "padding": 100 * padding / (tokens + padding),
        "lacking": 100 * (1 - filled / area),
    }


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
    text="""\
- `padded, together`: prompts and decode rows are one rectangle, as wide as the longest chunk.
- `padded, apart`: prompts are a rectangle of their own.
- `cached`: one call of a C++ kernel reads rows of different lengths, without padding.
- `cached, a call a row`: PyTorch computes attention, a row at a time; `cached, plain`: all of it.

Keys and values: the share of padding in a rectangle that holds those of all decode rows.""",
    tables=[
        Table(("model", "lengths", "variant"), (),
              [Against({"variant": base}, ratios=TOKENS) for base in (TOGETHER, APART)])
    ],
    figure="Throughput of padded and ragged engines, by the spread of lengths",
    panels=[
        Panel(m, "throughput ÷ padded, together's", TOKENS[0], "lengths", where={"model": m},
              base={"variant": TOGETHER}) for m in MODELS
    ],
)  # fmt: skip
