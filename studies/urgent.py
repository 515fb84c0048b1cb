"""Urgent requests among others: what a priority is worth, with KV blocks reserved or on demand, and
what a queue policy does to the requests that wait.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from compare.report.drawing import PALETTE, Look
from scheduling.inference import Inference
from studies.study import Against, Case, Panel, Study, Table
from studies.virtual import (
    BLOCK,
    CAPACITY_SEED,
    LONGEST,
    Settings,
    capacity,
    data_of,
    inferences_of,
    latencies,
    pool,
    pool_of,
    serve,
    throughput,
)

LENGTHS = "exponential:100:800"
ROWS = 64  # more than the pool holds, so that memory is what binds
POOL = 8  # requests of mean length, at their whole lives
URGENT = 0.1  # of the requests
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5)
TIMEOUT_MS = 500
DEMAND: Settings = {"kv_reservation": "demand"}
LEVELS: Settings = {"order": "priority", "priority_levels": 2, "default_priority_level": 2}
LATE = f"2:timeout_ms={TIMEOUT_MS},action="
VARIANTS: dict[str, Settings] = {
    "fcfs": {},
    "fcfs, demand": DEMAND,
    "priority": LEVELS,
    "priority, demand": LEVELS | DEMAND,
    "priority, late ones delayed": LEVELS | {"queue_policy": f"{LATE}delay"},
    "priority, late ones rejected": LEVELS | {"queue_policy": f"{LATE}reject"},
}


@functools.cache
def blocks() -> int:
    """KV blocks of so many requests of mean length, and at least of the longest."""
    return max(pool_of(POOL, data_of(LENGTHS, CAPACITY_SEED)), LONGEST // BLOCK)


def cases(n: int) -> list[dict[str, Any]]:
    return [{"load": load, "variant": v} for load, v in itertools.product(LOADS, VARIANTS)]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    rate = case["load"] * capacity(ROWS, LENGTHS, blocks()).requests
    requests = data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    inferences = inferences_of(requests)
    rng = np.random.default_rng([seed, 7])
    for chosen in rng.choice(n, round(URGENT * n), replace=False):
        inferences[chosen].priority = 1
    urgent = [i for i in inferences if i.priority == 1]
    others = [i for i in inferences if i.priority != 1]
    settings = {"max_batch_size": ROWS, **pool(blocks()), **VARIANTS[case["variant"]]}
    end = serve("dynamic", settings, requests, inferences)
    return {
        **_latency("urgent", urgent),
        **_latency("others", others),
        "wait_s": max(latencies(inferences)),
        "refused": 100 * statistics.mean(i.error is not None for i in inferences),
        "preempted_urgent": statistics.mean(i.interruptions.preemptions for i in urgent),
        "preempted_others": statistics.mean(i.interruptions.preemptions for i in others),
        "throughput": throughput(inferences, end),
    }


def _latency(name: str, inferences: Sequence[Inference]) -> dict[str, float]:
    seconds = latencies(inferences)
    p99 = float(np.percentile(seconds, 99))
    return {f"{name}_s": statistics.mean(seconds), f"{name}_p99_s": p99}


TITLES = {
    "urgent_s": ("a tenth is urgent: it hardly waits", "mean latency, s"),
    "others_s": ("the others pay little", "mean latency, s"),
    "wait_s": ("delayed requests may starve", "longest latency, s"),
}
STUDY = Study(
    name="urgent",
    title="Urgent requests",
    question="What is a priority worth, and what do the other requests pay?",
    source="urgent requests do not wait (Triton's levels), and preemption makes them faster "
    "(vLLM's priorities); delayed ones may starve (Triton's queue policies)",
    workload=f"{{n}} requests of lengths {LENGTHS}, a tenth urgent, a pool of {POOL} mean "
    "requests, {seeds} seeds; virtual time at the cost of --model fake",
    cases=cases,
    run=run,
    measures={
        "urgent_s": ("latency of urgent ones, mean, s", "{:.3f}"),
        "urgent_p99_s": ("p99, s", "{:.2f}"),
        "others_s": ("latency of the others, mean, s", "{:.2f}"),
        "others_p99_s": ("p99, s", "{:.2f}"),
        "wait_s": ("longest of all, s", "{:.2f}"),
        "refused": ("refused, %", "{:.1f}"),
        "preempted_urgent": ("preemptions of an urgent one", "{:.2f}"),
        "preempted_others": ("of another one", "{:.2f}"),
        "throughput": ("tok/s", "{:,.0f}"),
    },
    text=f"A tenth of the requests is urgent (level 1 of 2). The pool holds {POOL} mean requests; "
    "load: of what `fcfs` with `whole` completes on it. `demand` takes KV blocks as they fill. "
    f"Late: a request of level 2 that has waited {TIMEOUT_MS} ms goes behind all others, or is "
    "refused; latencies are of those that were answered.",
    tables=[
        Table(
            ("load", "variant"),
            against=[Against("fcfs", {"variant": "fcfs"}, gaps=("urgent_s", "others_s", "wait_s"))],
        )
    ],
    figure="Latency of urgent requests and of the others over load",
    panels=[
        Panel(title, label, measure, "load", "load, of what fcfs completes", log=True)
        for measure, (title, label) in TITLES.items()
    ],
    looks={
        name: Look(PALETTE[colour], "--" if "fcfs" in name else "-", "s" if "fcfs" in name else "o")
        for name, colour in zip(VARIANTS, (0, 4, 1, 3, 5, 2))
    },
    settings={"variants": VARIANTS, "lengths": LENGTHS, "rows": ROWS},
)
