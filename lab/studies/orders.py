"""Every order of `dynamic` over row limits, loads and errors of the predicted lengths: where an
order by length helps, where it cannot, and which requests pay.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np

from client.drawing import PALETTE, Look
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import VIRTUAL, Settings

LENGTHS = "lognormal:40:1.2:900"  # a long tail: the longest tenth has 45% of the tokens
BLOCKS = 20_000  # more than all requests need, since paused ones keep their blocks
ROWS, LOADS, SIGMAS = (4, 8, 32), (0.5, 0.9, 1.2), (0.7, 1.5)
BINDING = {"rows": 8, "load": 1.2}  # rows bind here: panels on wrong lengths and slow requests
MORE_ROWS = (8, 12, 16, 24, 32)  # that serve the same arrivals
EXACT = ("fcfs", "hrrn", "mlfq", "sjf", "srpt")
VARIANTS: dict[str, Settings] = {
    **{order: {"order": order} for order in EXACT},
    "sjf, at most 2 s": {"order": "sjf", "max_wait_s": 2.0},
    **{
        f"{order}, σ {sigma:g}": {"order": order, "length_predictor": f"noisy:{sigma:g}"}
        for order, sigma in itertools.product(("sjf", "srpt"), SIGMAS)
    },
}


def cases(n: int) -> list[dict[str, Any]]:
    """Return the cases. `of`: row limit; the load is a share of the capacity at that limit."""
    grid = [
        {"table": "grid", "rows": rows, "of": rows, "load": load, "variant": variant}
        for rows, load, variant in itertools.product(ROWS, LOADS, VARIANTS)
    ]
    place = {"table": "rows", "of": BINDING["rows"], "load": BINDING["load"]}
    more = itertools.product(MORE_ROWS, EXACT)
    return grid + [place | {"rows": rows, "variant": variant} for rows, variant in more]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    rate = case["load"] * virtual.capacity(case["of"], LENGTHS).requests
    requests = virtual.data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    settings = {"max_batch_size": case["rows"]} | virtual.pool(BLOCKS) | VARIANTS[case["variant"]]
    served = virtual.serve("dynamic", settings, requests)
    seconds = virtual.latencies(served.inferences)
    by_length = np.array(seconds)[np.argsort([r.num_tokens for r in requests], kind="stable")]
    last = requests[-1].at
    return {
        **virtual.mean_and_p99(served.inferences),
        "median_s": statistics.median(seconds),
        "shortest_s": float(by_length[: n // 4].mean()),
        "longest_s": float(by_length[-(n // 4) :].mean()),
        "answered": sum((i.answered_at or served.end) <= last for i in served.inferences) / last,
        "throughput": served.throughput,
    }


def order_of(case: Case) -> str:
    return str(case["variant"]).split(", σ")[0]


def sigma_of(case: Case) -> float:
    return float(case["variant"].partition("σ ")[2] or 0)


BY, FCFS = ("rows", "load", "variant"), {"variant": "fcfs"}
AGAINST = [Against(FCFS, gaps=("mean_s", "p99_s", "longest_s"), ratios=("mean_s", "answered"))]
GRID, MORE = {"table": "grid"}, {"table": "rows"}
PLACE = {**GRID, **BINDING}
STUDY = Study(
    name="orders",
    title="Orders of the waiting requests",
    question="Where does sorting the waiting requests by length lower latency, and for which "
    "requests does it raise it?",
    source="the shortest request first lowers mean latency by 30 to 40% (SSJF, Qiu et al., 2024); "
    "skip-join MLFQ lowers it without knowing lengths (FastServe, arXiv 2305.05920)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, KV blocks for all, {{seeds}} seeds, "
    f"{VIRTUAL}",
    cases=cases,
    run=run,
    measures={
        "mean_s": ("latency mean, s", "{:.2f}"),
        "median_s": ("latency median, s", "{:.2f}"),
        "p99_s": ("latency p99, s", "{:.2f}"),
        "shortest_s": ("shortest quarter: latency mean, s", "{:.2f}"),
        "longest_s": ("longest quarter: latency mean, s", "{:.2f}"),
        "answered": ("answers/s until the last arrival", "{:.1f}"),
        "throughput": ("throughput, tok/s", "{:,.0f}"),
    },
    text="docs/policies.md explains the orders. Load is the rate of requests ÷ what `fcfs` "
    "completes with as many rows while requests always wait. Shortest and longest quarter: of the "
    "requests, by completion tokens. σ: lengths are predicted with a log-normal error of this "
    "sigma; without σ they are exact. At a load above 1 the queue grows until the last arrival, so "
    "latencies there depend on the number of requests.",
    tables=[
        Table(BY, against=AGAINST, where=GRID, title="By row limit and load"),
        Table(BY, against=AGAINST, where=MORE, title="More rows, arrivals as for 8 rows"),
    ],
    figure="Mean latency by order, load and row limit, and latency of short and long requests",
    panels=[
        *(
            Panel(f"{n} rows", "latency mean ÷ fcfs's", "mean_s", "load", "load", base=FCFS,
                  where={**GRID, "rows": n, "variant": EXACT}) for n in ROWS
        ),
        Panel("by error of predicted lengths", "latency mean, s", "mean_s", sigma_of, "σ", order_of,
              PLACE),
        Panel("latency by length", "latency, s", ("shortest_s", "longest_s", "p99_s"),
              where={**PLACE, "variant": EXACT}, log=True),
        Panel("by rows, same arrivals", "latency mean, s", "mean_s", "rows", "rows", where=MORE),
    ],
    looks={
        name: Look(PALETTE[i], "--" if name == "fcfs" else "-", "o")
        for name, i in zip((*EXACT, "sjf, at most 2 s"), (0, 2, 3, 1, 5, 4))
    },
)  # fmt: skip
