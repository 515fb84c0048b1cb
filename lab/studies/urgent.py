"""Urgent requests among others: latencies by order, with KV blocks reserved or on demand, and with
queue policies for the requests that wait.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import numpy as np

from client.drawing import PALETTE, Look
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from lab.studies.virtual import VIRTUAL, Settings

LENGTHS = "exponential:100:800"
ROWS = 64  # more than the pool holds, so that memory is what binds
POOL = 8  # requests of mean length that a pool has KV blocks for
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
    return virtual.pool_of(POOL, virtual.data_of(LENGTHS, virtual.CAPACITY_SEED))


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    rate = case["load"] * virtual.capacity(ROWS, LENGTHS, blocks()).requests
    drawn = virtual.data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    chosen = np.random.default_rng([seed, 7]).choice(n, round(URGENT * n), replace=False)
    requests = [r.model_copy(update={"priority": int(r.id in chosen)}) for r in drawn]
    settings = {"max_batch_size": ROWS} | virtual.pool(blocks()) | VARIANTS[case["variant"]]
    served = virtual.serve("dynamic", settings, requests)
    urgent = [i for i in served.inferences if i.priority == 1]
    others = [i for i in served.inferences if i.priority != 1]
    return {
        **virtual.mean_and_p99(urgent, "urgent_"),
        **virtual.mean_and_p99(others, "others_"),
        "wait_s": max(virtual.latencies(served.inferences)),
        "refused": 100 * statistics.mean(i.error is not None for i in served.inferences),
        "preempted_urgent": statistics.mean(i.interruptions.preemptions for i in urgent),
        "preempted_others": statistics.mean(i.interruptions.preemptions for i in others),
        "throughput": served.throughput,
    }


GAPS = ("urgent_mean_s", "others_mean_s", "wait_s")
STUDY = Study(
    name="urgent",
    title="Urgent requests",
    question="How much faster are urgent requests with a priority, and how much slower the others?",
    source="urgent requests do not wait (Triton's levels), preemption makes them faster (vLLM's "
    "priorities), and delayed requests may starve (Triton's queue policies)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, a tenth urgent, {{seeds}} seeds, KV blocks "
    f"of {POOL} requests of mean length, {VIRTUAL}",
    cases=grid(load=LOADS, variant=VARIANTS),
    run=run,
    measures={
        "urgent_mean_s": ("urgent: latency mean, s", "{:.3f}"),
        "urgent_p99_s": ("urgent: latency p99, s", "{:.2f}"),
        "others_mean_s": ("others: latency mean, s", "{:.2f}"),
        "others_p99_s": ("others: latency p99, s", "{:.2f}"),
        "wait_s": ("longest latency, s", "{:.2f}"),
        "refused": ("refused, %", "{:.1f}"),
        "preempted_urgent": ("preemptions per urgent request", "{:.2f}"),
        "preempted_others": ("preemptions per other request", "{:.2f}"),
        "throughput": ("throughput, tok/s", "{:,.0f}"),
    },
    text="Urgent requests have level 1 of `--order priority`, the others level 2. Load is the rate "
    "of requests ÷ what `fcfs` completes while requests always wait. With `demand`, requests take "
    "KV blocks as they fill; without it, all of their blocks before they run. A request of level 2 "
    f"is late once it has waited {TIMEOUT_MS} ms: it goes behind all others (`delayed`), or is "
    "refused (`rejected`). Latencies are of the requests that were answered.",
    tables=[Table(("load", "variant"), against=[Against({"variant": "fcfs"}, GAPS)])],
    figure="Latency of urgent requests and of the others by load",
    panels=[
        Panel(title, "latency, s", measure, "load", "load", log=True)
        for title, measure in zip(("urgent: mean", "others: mean", "all requests: longest"), GAPS)
    ],
    looks={
        name: Look(PALETTE[i], "--" if "fcfs" in name else "-", "o")
        for name, i in zip(VARIANTS, (0, 4, 1, 3, 5, 2))
    },
)
