"""Who goes first: orders of `dynamic`, by row limit, load and error of predicted lengths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.drawing import PALETTE, Style
from client.traces import Request
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import CAPACITY_SEED, VIRTUAL, Settings


class Sweep(NamedTuple):
    """Servers, and the loads that they get."""

    rows: Sequence[int]
    loads: Sequence[float]  # shares of the capacity of `fcfs`
    variants: Mapping[str, Settings]
    of: int | None = None  # rows of that capacity; None: as many as the server has


EXACT = ("fcfs", "hrrn", "mlfq", "sjf", "srpt")
ORDERS: dict[str, Settings] = {
    **{order: {"order": order} for order in EXACT},
    "sjf, at most 2 s": {"order": "sjf", "max_wait_s": 2.0},
    **{
        f"{order}, σ {sigma:g}": {"order": order, "length_predictor": f"noisy:{sigma:g}"}
        for order, sigma in itertools.product(("sjf", "srpt"), (0.7, 1.5))
    },
}
LONG_TAIL = "lognormal:40:1.2:900"  # the longest tenth has 45% of the tokens
BURST = 2000  # requests that show a capacity
# more KV blocks than all requests need, since paused ones keep their blocks
POOL = virtual.pool(20_000)
SWEEPS = {
    "grid": Sweep((4, 8, 32), (0.5, 0.9, 1.2), ORDERS),
    "rows": Sweep((8, 12, 16, 24, 32), (1.2,), {order: ORDERS[order] for order in EXACT}, 8),
}


def cases(n: int) -> list[dict[str, Any]]:
    """Return the cases. `of`: row limit; the load is a share of the capacity at that limit."""
    return [
        {"table": table, "rows": rows, "of": sweep.of or rows, "load": load, "variant": variant}
        for table, sweep in SWEEPS.items()
        for rows, load, variant in itertools.product(sweep.rows, sweep.loads, sweep.variants)
    ]


def trace(seed: int, n: int, arrival: str) -> Sequence[Request]:
    return Workload(LONG_TAIL, seed=seed, prompts="ids").requests(n, arrival, scaled=True)


@functools.cache
def capacity(rows: int) -> float:
    """Return the requests per second that `fcfs` completes of a burst."""
    burst = trace(CAPACITY_SEED, BURST, "burst")
    outcomes, _ = virtual.served({"max_batch_size": rows, **POOL}, burst)
    return BURST / float(outcomes.ended["ended_at"].max())


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Serve a trace."""
    requests = trace(seed, n, f"poisson:{case['load'] * capacity(case['of']):g}")
    settings = {"max_batch_size": case["rows"], **POOL}
    settings |= SWEEPS[case["table"]].variants[case["variant"]]
    outcomes, _ = virtual.served(settings, requests)
    answers = outcomes.answers
    by_length = answers.e2e_s[np.argsort(answers["completion_tokens"], kind="stable")]
    return {
        "mean_s": float(answers.e2e_s.mean()),
        "p99_s": float(np.percentile(answers.e2e_s, 99)),
        "median_s": float(np.median(answers.e2e_s)),
        "shortest_s": float(by_length[: n // 4].mean()),
        "longest_s": float(by_length[-(n // 4) :].mean()),
        "answered": float((answers["ended_at"] <= requests[-1].at).sum()) / requests[-1].at,
        "throughput": answers["completion_tokens"].sum() / float(outcomes.ended["ended_at"].max()),
    }


def order_of(case: Case) -> str:
    return str(case["variant"]).split(", σ")[0]


def sigma_of(case: Case) -> float:
    return float(case["variant"].partition("σ ")[2] or 0)


MEASURES = {
    "mean_s": ("latency mean, s", "{:.2f}"),
    "median_s": ("latency median, s", "{:.2f}"),
    "p99_s": ("latency p99, s", "{:.2f}"),
    "shortest_s": ("shortest quarter: latency mean, s", "{:.2f}"),
    "longest_s": ("longest quarter: latency mean, s", "{:.2f}"),
    "answered": ("answers/s until the last arrival", "{:.1f}"),
    "throughput": ("throughput, tok/s", "{:,.0f}"),
}
BY = ("rows", "load", "variant")
FCFS = {"variant": "fcfs"}
VS_FCFS = [Against(FCFS, ("mean_s", "p99_s", "longest_s"), ("mean_s", "answered"))]
GRID, MORE = ({"table": table} for table in SWEEPS)
HERE = {**GRID, "rows": 8, "load": 1.2}  # where rows bind
STUDY = Study(
    name="orders",
    title="Orders of the waiting requests",
    question="Which requests does an order of the waiting requests make faster, and which slower?",
    source="the shortest request first lowers mean latency by 30 to 40% (SSJF, Qiu et al., 2024), "
    "skip-join MLFQ without knowing lengths (FastServe, arXiv 2305.05920)",
    workload=f"{{n}} requests, {{seeds}} seeds, {VIRTUAL}",
    cases=cases,
    run=run,
    measures=MEASURES,
    tables=[
        Table(BY, [*MEASURES], VS_FCFS, GRID, "By row limit and load", f"""\
`--lengths {LONG_TAIL}`, KV blocks for all. docs/policies.md explains the orders. Load is the rate
of requests ÷ what `fcfs` completes with as many rows while requests always wait. Shortest and
longest quarter: of the requests, by completion tokens. σ: lengths are predicted with a log-normal
error of this sigma; without σ they are exact. At a load above 1 the queue grows until the last
arrival, so latencies there depend on the number of requests."""),
        Table(BY, [*MEASURES], VS_FCFS, MORE, "More rows, arrivals as for 8 rows"),
    ],
    figure="Mean latency by order, load and row limit, and latency of short and long requests",
    panels=[
        *(
            Panel(f"{n} rows", "latency mean ÷ fcfs's", "mean_s", "load", "load", base=FCFS,
                  where={**GRID, "rows": n, "variant": EXACT}) for n in SWEEPS["grid"].rows
        ),
        Panel("by error of predicted lengths", "latency mean, s", "mean_s", sigma_of, "σ", order_of,
              HERE),
        Panel("latency by length", "latency, s", ("shortest_s", "longest_s", "p99_s"),
              where={**HERE, "variant": EXACT}, log=True),
        Panel("by rows, same arrivals", "latency mean, s", "mean_s", "rows", "rows", where=MORE),
    ],
    styles={
        name: Style(PALETTE[i], "--" if name == "fcfs" else "-", "o")
        for name, i in zip((*EXACT, "sjf, at most 2 s"), (0, 2, 3, 1, 5, 4))
    },
)  # fmt: skip
