"""Routers compared: p99 of latency against replicas, for even, bursty and shared-prefix traces, in
virtual time.

The load of each replica stays the same: with twice the replicas twice as many requests come.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from client.drawing import LOOKS
from client.load import Watch
from client.workloads import Workload
from config import build
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import SETTINGS, pool
from scheduling.routers import ROUTERS
from simulate.costs import load
from simulate.fleet import Layout
from simulate.server import SimulatedServer

REPLICAS = (1, 2, 4, 8, 16)
LEAST = 2000  # requests of a trace
STALE_S = 1.0  # age of what a router knows
ROWS, BLOCKS = 16, 1000  # of a replica; its cache holds few of the prefixes


class TraceKind(NamedTuple):
    """A kind of trace. rate: requests a second that a replica gets."""

    words: str
    rate: float
    arrival: str
    data: dict[str, Any]
    routers: tuple[str, ...]


PLAIN = ("random", "round_robin", "power_of_two", "least_requests", "least_tokens")
BY_PREFIX = ("random", "round_robin", "power_of_two", "least_tokens", "prefix")
STALE = ("least_requests", "power_of_two")  # shown with old knowledge, too
LONG_TAIL = {"lengths": "lognormal:60:1:600"}
SHARED = {"lengths": "uniform:5:40", "prefixes": "64:512:0.8"}
TRACES = {
    "even": TraceKind("Poisson arrivals", 62, "poisson:{}", LONG_TAIL, PLAIN),
    "bursty": TraceKind("gamma arrivals, cv 3", 50, "gamma:{}:3", LONG_TAIL, PLAIN),
    "prefixes": TraceKind("64 shared prefixes of 512 tokens", 90, "poisson:{}", SHARED, BY_PREFIX),
}


def cases(n: int, costs: str) -> list[dict[str, Any]]:
    load(costs)  # an error before anything is run
    fresh = [
        {"trace": name, "replicas": replicas, "router": router, "stale_s": 0.0, "costs": costs}
        for name, trace in TRACES.items()
        for replicas, router in itertools.product(REPLICAS, trace.routers)
    ]
    stale = {"trace": "even", "stale_s": STALE_S, "costs": costs}
    return fresh + [
        stale | {"replicas": replicas, "router": router}
        for replicas, router in itertools.product(REPLICAS, STALE)
    ]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the measures of n requests a replica, and of more if the replicas are few."""
    replicas, trace = case["replicas"], TRACES[case["trace"]]
    n = max(LEAST, n * replicas)
    settings = {"max_batch_size": ROWS, "prefix_caching": "prefixes" in trace.data}
    config = build("dynamic", SETTINGS | pool(BLOCKS) | settings, {})
    data = Workload(seed=seed, prompts="ids", **trace.data)
    requests = data.requests(n, trace.arrival.format(f"{trace.rate * replicas:g}"), scaled=True)
    layout = Layout(replicas, case["router"], case["stale_s"], case["stale_s"] == 0, seed=seed)
    server = SimulatedServer("dynamic", config, load(case["costs"]), layout)
    outcomes = server.replay(requests, math.inf, Watch())
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    assert len(answers) == n
    stats, _, _ = server.report()
    sent = [stats["replicas"]["requests"].get(k, 0) for k in range(replicas)]
    return {
        "p99_s": float(np.percentile([a.e2e_s for a in answers], 99)),
        "mean_s": float(np.mean([a.e2e_s for a in answers])),
        "ttft_p99_s": float(np.percentile([a.ttft_s for a in answers], 99)),
        "cached": 100 * stats["cached_tokens"] / stats["total_input_tokens"],
        "uneven": max(sent) / max(1, min(sent)),
    }


def name_of(case: Case) -> str:
    return case["router"] + (f", {case['stale_s']:g} s old" if case["stale_s"] else "")


BY = ("router", "stale_s", "replicas")
RANDOM = [Against({"router": "random", "stale_s": 0.0}, ["p99_s"])]
LABELS = {"p99_s": "latency p99, s", "ttft_p99_s": "TTFT p99, s"}
OLD = {f"{name}, {STALE_S:g} s old": look._replace(line=":") for name, look in zip(ROUTERS, LOOKS)}
STUDY = Study(
    name="routers",
    title="Routers",
    question="How much does latency depend on the rule by which a router chooses a replica?",
    workload=f"{{n}} requests per replica, at least {LEAST:,}, {{seeds}} seeds, `dynamic` in "
    f"virtual time with `--costs {{costs}}`, {ROWS} rows and {BLOCKS:,} KV blocks per replica",
    requests=600,
    options={"costs": ("fake", "iteration times, as simulate.sh's")},
    cases=cases,
    run=run,
    measures={
        "p99_s": ("latency p99, s", "{:.3f}"),
        "mean_s": ("latency mean, s", "{:.3f}"),
        "ttft_p99_s": ("TTFT p99, s", "{:.3f}"),
        "cached": ("cached prompt tokens, %", "{:.0f}"),
        "uneven": ("most requests of a replica ÷ fewest", "{:.2f}"),
    },
    text="Rates are requests a second per replica. A router knows the load of each replica as it "
    "was at the last report, which is up to `stale s` seconds old, without the requests that it "
    "has sent since. With 0 it knows the load of the moment.",
    tables=[
        Table(
            BY, (), RANDOM, {"trace": name}, f"{trace.words}, {trace.rate:g} requests/s per replica"
        )
        for name, trace in TRACES.items()
    ],
    figure="p99 of latency and of TTFT against the number of replicas, by router and kind of trace",
    panels=[
        Panel(trace.words, label, measure, "replicas", "replicas", name_of, where, log=True)
        for measure, label in LABELS.items()
        for name, trace in TRACES.items()
        for where in [{"trace": name}]
    ],
    looks=dict(zip(ROUTERS, LOOKS)) | OLD,
)
