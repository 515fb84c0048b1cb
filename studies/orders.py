"""Where an order by length helps, where it cannot, and which requests pay: every order of `dynamic`
over row limits, loads and errors of the predicted lengths.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np

from compare.report.drawing import PALETTE, Look
from studies.study import Against, Case, Panel, Study, Table
from studies.virtual import (
    Settings,
    capacity,
    data_of,
    inferences_of,
    latencies,
    pool,
    serve,
    throughput,
)

LENGTHS = "lognormal:40:1.2:900"  # a long tail: the longest tenth has 45% of the tokens
BLOCKS = 20_000  # more than all requests need, since paused ones keep theirs
ROWS, LOADS, SIGMAS = (4, 8, 32), (0.5, 0.9, 1.2), (0.0, 0.7, 1.5)
BINDING = {"rows": 8, "load": 1.2}  # where rows bind: what noise costs is drawn, and who pays
MORE_ROWS = (8, 12, 16, 24, 32)  # that serve the same arrivals


def predicted(order: str, sigma: float) -> tuple[str, Settings]:
    """Return the name and settings of an order whose predicted lengths have this error."""
    if sigma == 0:
        return order, {"order": order}
    return f"{order}, σ {sigma:g}", {"order": order, "length_predictor": f"noisy:{sigma:g}"}


VARIANTS: dict[str, Settings] = {
    "fcfs": {},
    "hrrn": {"order": "hrrn"},
    **dict(predicted("sjf", sigma) for sigma in SIGMAS),
    "sjf, at most 2 s": {"order": "sjf", "max_wait_s": 2.0},
    **dict(predicted("srpt", sigma) for sigma in SIGMAS),
    "mlfq": {"order": "mlfq"},
}
GREY, ORANGE, PURPLE, GREEN, _, PINK = PALETTE
LOOKS = {
    "fcfs": Look(GREY, "--", "s"),
    "hrrn": Look(PURPLE, "-", "o"),
    "mlfq": Look(GREEN, "-", "o"),
    "sjf": Look(ORANGE, "-", "o"),
    "srpt": Look(PINK, "-", "o"),
}
EXACT = tuple(LOOKS)


def cases(n: int) -> list[dict[str, Any]]:
    """`of`: the row limit of whose capacity the load is a share."""
    grid = [
        {"table": "grid", "rows": rows, "of": rows, "load": load, "variant": variant}
        for rows, load, variant in itertools.product(ROWS, LOADS, VARIANTS)
    ]
    more = [
        {"table": "rows", "rows": rows, "of": BINDING["rows"], "load": BINDING["load"]}
        | {"variant": variant}
        for rows, variant in itertools.product(MORE_ROWS, LOOKS)
    ]
    return grid + more


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    rate = case["load"] * capacity(case["of"], LENGTHS).requests
    requests = data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    inferences = inferences_of(requests)
    settings = {"max_batch_size": case["rows"], **pool(BLOCKS), **VARIANTS[case["variant"]]}
    end = serve("dynamic", settings, requests, inferences)
    times_s = latencies(inferences)
    by_length = np.array(times_s)[np.argsort([r.num_tokens for r in requests], kind="stable")]
    last = requests[-1].at
    return {
        "mean_s": statistics.mean(times_s),
        "median_s": statistics.median(times_s),
        "p99_s": float(np.percentile(times_s, 99)),
        "shortest_s": float(by_length[: n // 4].mean()),
        "longest_s": float(by_length[-(n // 4) :].mean()),
        "answered": sum((i.answered_at or end) <= last for i in inferences) / last,
        "throughput": throughput(inferences, end),
    }


def order_of(case: Case) -> str:
    return str(case["variant"]).split(", σ")[0]


def sigma_of(case: Case) -> float:
    return float(case["variant"].partition("σ ")[2] or 0)


FCFS = {"variant": "fcfs"}
COMPARED = Against(
    "fcfs", FCFS, gaps=("mean_s", "p99_s", "longest_s"), ratios=("mean_s", "answered")
)
BY = ("rows", "load", "variant")
BOUND = ", ".join(f"{name} {value:g}" for name, value in BINDING.items())
STUDY = Study(
    name="orders",
    title="Every order of `dynamic`",
    question="Where does an order by length help, and which requests pay for it?",
    source="the shortest first takes 30 to 40% off the mean (SSJF, Qiu et al., 2024); skip-join "
    "MLFQ does without lengths (FastServe, arXiv 2305.05920)",
    workload=f"{{n}} requests of lengths {LENGTHS}, KV blocks for all, {{seeds}} seeds; "
    "virtual time at the cost of --model fake",
    cases=cases,
    run=run,
    measures={
        "mean_s": ("latency mean, s", "{:.2f}"),
        "median_s": ("median, s", "{:.2f}"),
        "p99_s": ("p99, s", "{:.2f}"),
        "shortest_s": ("mean of the shortest quarter, s", "{:.2f}"),
        "longest_s": ("mean of the longest quarter, s", "{:.2f}"),
        "answered": ("answers/s while requests come", "{:.1f}"),
        "throughput": ("tok/s", "{:,.0f}"),
    },
    text="Quarters are by completion tokens. σ is the error of a predicted length: its true one "
    "times a log-normal of that sigma; without it lengths are exact. At a load above 1 the queue "
    "grows until the last request came, so that latencies there are of this trace's length.",
    tables=[
        Table(
            BY,
            against=[COMPARED],
            where={"table": "grid"},
            title="By row limit and load",
            text="Load: of what `dynamic` with `fcfs` completes at that row limit.",
        ),
        Table(
            BY,
            against=[COMPARED],
            where={"table": "rows"},
            title="More rows, the same arrivals",
            text=f"Load: of what `fcfs` completes with {BINDING['rows']} rows, for all row limits.",
        ),
    ],
    figure="Mean latency by order over load and row limit, and what it costs whom",
    panels=[
        *(
            Panel(
                f"{rows} rows",
                "mean latency ÷ fcfs's",
                "mean_s",
                "load",
                "load, of what fcfs completes",
                where={"table": "grid", "rows": rows, "variant": EXACT},
                base=FCFS,
            )
            for rows in ROWS
        ),
        Panel(
            "wrong predictions cost part of it",
            "mean latency, s",
            "mean_s",
            sigma_of,
            f"σ of a predicted length's error; {BOUND}",
            order_of,
            where={"table": "grid", **BINDING, "variant": (*EXACT, *VARIANTS)},
        ),
        Panel(
            "the slowest hundredth pays",
            "latency, s",
            ("shortest_s", "longest_s", "p99_s"),
            where={"table": "grid", **BINDING, "variant": EXACT},
            log=True,
        ),
        Panel(
            "with more rows nothing waits",
            "mean latency, s",
            "mean_s",
            "rows",
            "row limit; the same arrivals",
            where={"table": "rows"},
        ),
    ],
    looks=LOOKS,
    settings={"variants": VARIANTS, "lengths": LENGTHS, "kv_blocks": BLOCKS},
)
