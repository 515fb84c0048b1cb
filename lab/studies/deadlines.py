"""Requests with limits of their own, by order and with shedding: how many meet them, from light
load to overload.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from client.drawing import PALETTE, Look
from client.measure import judged
from client.users import read_slo_mix
from client.workloads import Workload
from config import build
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid, only, values
from lab.studies.virtual import SETTINGS, VIRTUAL, Settings
from simulate.costs import FAKE
from simulate.server import SimulatedServer

LENGTHS = "exponential:100:800"
ROWS = 8
MIX = ("0.3:interactive=ttft:200,tpot:50", "0.7:batch=ttft:2000")
CLASSES = read_slo_mix(MIX)[0]
INTERACTIVE, BATCH = CLASSES.values()
LOADS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
SHARE = 90.0  # % of the requests that meet their limits, up to a variant's capacity (DistServe's)
SHED: Settings = {"shed": True}
VARIANTS: dict[str, Settings] = {
    "fcfs": {},
    "fcfs, shed": SHED,
    "sjf": {"order": "sjf"},
    "edf": {"order": "edf"},
    "edf, shed": {"order": "edf"} | SHED,
}
POINTS, CAPACITY = {"table": "points"}, {"table": "capacity"}


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    capacity = virtual.capacity(ROWS, LENGTHS).requests
    workload = Workload(LENGTHS, seed=seed, prompts="ids", slo_mix=MIX)
    trace = workload.requests(n, f"poisson:{case['load'] * capacity:g}", scaled=True)
    settings = {**SETTINGS, "max_batch_size": ROWS, **VARIANTS[case["variant"]]}
    server = SimulatedServer("", build("dynamic", settings, {}), FAKE)
    result = judged(trace, server.replay(trace), {})
    of_class = result["by_class"]
    return {
        "good": 100 * result["goodput"] * result["wall_clock_s"] / float(trace.at[-1]) / capacity,
        "met": 100 * result["attainment"],
        **{name: 100 * each["attainment"] for name, each in of_class.items()},
        "batch_s": (of_class["batch"]["mean_e2el_ms"] or 0) / 1e3,
        "failed": 100 * result["failed"] / n,
    }


def with_capacities(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases, and one for each variant with all loads: the load at which its share within
    limits falls to SHARE, on a line between two loads.
    """
    result = list(points)
    for variant in VARIANTS:
        met = [values(case, "met") for case in only(points, {"variant": variant})]
        if len(met) == len(LOADS):
            falling = [-np.minimum.accumulate(of_seed) for of_seed in zip(*met)]
            seeds = [{"capacity": float(np.interp(-SHARE, each, LOADS))} for each in falling]
            result.append(CAPACITY | {"load": None, "variant": variant, "seeds": seeds})
    return result


FCFS = {"variant": "fcfs"}
SHOWN = ("good", "met", "interactive", "batch", "batch_s", "failed")
STUDY = Study(
    name="deadlines",
    title="Deadlines",
    question="How many requests meet their own latency limits, by order, with and without "
    "shedding?",
    source="a scheduler that plans by the limits of requests serves 2.2 times as many within them "
    "(SLOs-Serve, arXiv 2504.08784)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, `--slo-mix {' '.join(MIX)}`, {{seeds}} "
    f"seeds, {ROWS} rows, {VIRTUAL}",
    requests=3000,
    cases=grid(table=("points",), load=LOADS, variant=VARIANTS),
    run=run,
    summarized=with_capacities,
    measures={
        "good": ("goodput, % of capacity", "{:.1f}"),
        "met": ("within their limits, %", "{:.1f}"),
        "interactive": ("interactive: within their limits, %", "{:.1f}"),
        "batch": ("batch: within their limits, %", "{:.1f}"),
        "batch_s": ("batch: latency mean, s", "{:.2f}"),
        "failed": ("shed, %", "{:.1f}"),
        "capacity": (f"load up to which {SHARE:.0f}% are within their limits", "{:.2f}"),
    },
    text=f"Interactive requests have a limit of {INTERACTIVE.ttft_ms:g} ms on the first token and "
    f"of {INTERACTIVE.tpot_ms:g} ms per later token on average, batch requests of "
    f"{BATCH.ttft_ms:,g} ms on the first token. Capacity is what `fcfs` completes while requests "
    f"always wait; load is the rate of requests ÷ capacity, up to {LOADS[-1]:g}. Goodput counts "
    "the requests that met all their limits. `sjf` sorts by completion length and `edf` by "
    "deadline; `shed` refuses or ends a request that can no longer meet its limits. `sjf` and "
    "`shed` know the true lengths, and `edf` needs none.",
    tables=[
        Table(("variant",), ("capacity",), [Against(FCFS, ratios=("capacity",))], CAPACITY),
        Table(("load", "variant"), SHOWN, [Against(FCFS, gaps=("met",))], POINTS),
    ],
    figure="Goodput, and the share of each class within its limits, by load",
    panels=[
        Panel(title, label, measure, "load", "load", where=POINTS)
        for title, label, measure in (
            ("all requests", "goodput, % of capacity", "good"),
            *(
                (f"{name}: first token in {limits.ttft_ms:,g} ms", "within limits, %", name)
                for name, limits in CLASSES.items()
            ),
        )
    ],
    looks={
        name: Look(PALETTE[i], "--" if "shed" in name else "-", "o")
        for name, i in zip(VARIANTS, (0, 0, 1, 3, 3))
    },
)
