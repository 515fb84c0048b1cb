"""Costs of KV blocks that are reserved, and of KV blocks on demand."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from client.drawing import STYLES
from client.traces import Trace
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import CAPACITY_SEED, VIRTUAL, Settings
from scheduling.policies import VICTIMS

LENGTHS = "exponential:100:800"  # a long tail, so that most reserved blocks stay empty
ROWS = 64  # more than a pool holds, so that memory is what binds
POOLS, LOADS = (8, 16, 32), (0.5, 0.8, 1.0, 1.2)
VARIANTS: dict[str, Settings] = {
    "whole": {},
    **{victim: {"kv_reservation": "demand", "victim": victim} for victim in VICTIMS},
}


def cases(n: int) -> list[dict[str, Any]]:
    return [
        {"pool": pool, "kv_blocks": blocks, "load": load, "rate": rate, "variant": variant}
        for pool, load, variant in itertools.product(POOLS, LOADS, VARIANTS)
        for blocks in [virtual.pool_of(pool, Workload(LENGTHS, seed=CAPACITY_SEED))]
        for rate in [load * capacity(blocks, 4 * n)]
    ]


@functools.cache
def capacity(kv_blocks: int, n: int) -> float:
    """Return the requests per second that `whole` completes when all come at once."""
    burst = Workload(LENGTHS, seed=CAPACITY_SEED).requests(n, "burst", scaled=True)
    return measures("whole", kv_blocks, burst)["throughput"] * n / float(burst.num_tokens.sum())


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    requests = Workload(LENGTHS, seed=seed).requests(n, f"poisson:{case['rate']:g}", scaled=True)
    return measures(case["variant"], case["kv_blocks"], requests)


def measures(variant: str, kv_blocks: int, requests: Trace) -> dict[str, float]:
    """Return the measures of a trace that is served with so many KV blocks."""
    settings = {"max_batch_size": ROWS, **virtual.pool(kv_blocks), **VARIANTS[variant]}
    outcomes, seen = virtual.served(settings, requests)
    running = sum(record.iteration.running * record.seconds for record in seen.records)
    computed = sum(
        sum(row.n_tokens for row in record.iteration.rows)
        + (record.n - 1) * len(record.iteration.rows)
        for record in seen.records
    )
    times = [inference.interruptions for inference in seen.inferences]
    return {
        "rows": running / seen.busy_s,
        **virtual.mean_and_p99(outcomes.answers),
        "throughput": virtual.throughput(outcomes),
        "preemptions": sum(each.preemptions for each in times) / len(requests),
        "tax": 100 * sum(each.recomputed_tokens for each in times) / computed,
    }


LABELS = {"mean_s": "mean latency, s", "tax": "recomputed tokens, %"}
STUDY = Study(
    name="memory",
    title="KV blocks: reserved whole, or on demand",
    question="Is it better to reserve all KV blocks of a request before it runs, or to take them "
    "as they fill and preempt requests when none is free?",
    source="which request is preempted decides how much is recomputed: least with the least "
    "computed one, more with the newest, most with the most computed one (vLLM issue 54644)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, {{seeds}} seeds, at most {ROWS} rows, "
    f"{VIRTUAL}",
    requests=400,
    cases=cases,
    run=run,
    measures={
        "rows": ("mean rows", "{:.1f}"),
        "mean_s": ("latency mean, s", "{:.2f}"),
        "p99_s": ("latency p99, s", "{:.2f}"),
        "throughput": ("throughput, tok/s", "{:,.0f}"),
        "preemptions": ("preemptions per request", "{:.2f}"),
        "tax": ("recomputed, % of computed tokens", "{:.1f}"),
    },
    text="""\
A pool has the KV blocks of 8, 16 or 32 requests of mean length. Load is the rate of requests ÷ what
`whole` completes on that pool while requests always wait.

- Before a request runs, `whole` reserves the blocks of all tokens that it may come to.
- The others take blocks on demand. If none is free, they preempt a running request: the newest, the
  one with the least computed tokens, or the one with the most. It is computed again later.""",
    tables=[
        Table(("pool", "load", "variant"), against=[Against({"variant": "whole"}, ["mean_s"]),
                                                    Against({"variant": "newest"}, ["tax"])])
    ],
    figure="Mean latency and recomputed tokens by load, for three sizes of the pool",
    panels=[
        Panel(f"pool of {pool} requests", label, measure, "load", "load", where={"pool": pool})
        for (measure, label), pool in itertools.product(LABELS.items(), POOLS)
    ],
    styles=dict(zip(VARIANTS, STYLES)),
)  # fmt: skip
