"""Routers compared, at the same load of each replica."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from client.drawing import STYLES
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from scheduling.routers import ROUTERS
from simulate.fleet import Layout

REPLICAS = (1, 2, 4, 8, 16)
LEAST = 2000  # requests of a trace
STALE_S = 1.0  # age of what a router knows
ROWS, BLOCKS = 16, 1000  # of a replica; its cache holds few of the prefixes


class TraceKind(NamedTuple):
    """A kind of trace. rate: requests per second that a replica gets."""

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


def cases(n: int) -> list[dict[str, Any]]:
    def of(trace: str, routers: tuple[str, ...], stale_s: float) -> list[dict[str, Any]]:
        return grid(trace=[trace], replicas=REPLICAS, router=routers, stale_s=[stale_s])(n)

    fresh = [of(name, trace.routers, 0.0) for name, trace in TRACES.items()]
    return [*itertools.chain(*fresh), *of("even", STALE, STALE_S)]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the measures of n requests a replica, and of more if the replicas are few."""
    replicas, stale_s, trace = case["replicas"], case["stale_s"], TRACES[case["trace"]]
    data, rate = Workload(seed=seed, prompts="ids", **trace.data), f"{trace.rate * replicas:g}"
    requests = data.requests(max(LEAST, n * replicas), trace.arrival.format(rate), scaled=True)
    settings = {"max_batch_size": ROWS, "prefix_caching": "prefixes" in trace.data}
    layout = Layout(replicas, case["router"], stale_s, stale_s == 0, seed=seed)
    server = virtual.server({**virtual.pool(BLOCKS), **settings}, layout=layout)
    answers, stats = server.replay(requests).answers, server.report()[0]
    assert len(answers) == len(requests)
    sent = [stats["replicas"]["requests"].get(k, 0) for k in range(replicas)]
    return {
        **virtual.mean_and_p99(answers),
        "ttft_p99_s": float(np.percentile(answers.ttft_s, 99)),
        "cached": 100 * stats["cached_tokens"] / stats["total_input_tokens"],
        "uneven": max(sent) / max(1, min(sent)),
    }


def name_of(case: Case) -> str:
    return case["router"] + (f", {case['stale_s']:g} s old" if case["stale_s"] else "")


BY = ("router", "stale_s", "replicas")
RANDOM = [Against({"router": "random", "stale_s": 0.0}, ["p99_s"])]
LABELS = {"p99_s": "latency p99, s", "ttft_p99_s": "TTFT p99, s"}
OLD = {
    f"{name}, {STALE_S:g} s old": style._replace(line=":") for name, style in zip(ROUTERS, STYLES)
}
STUDY = Study(
    name="routers",
    title="Routers",
    question="How much does latency depend on the rule by which a router chooses a replica?",
    workload=f"{{n}} requests per replica, at least {LEAST:,}, {{seeds}} seeds, {ROWS} rows and "
    f"{BLOCKS:,} KV blocks per replica, {virtual.VIRTUAL}",
    requests=600,
    cases=cases,
    run=run,
    measures={
        "p99_s": ("latency p99, s", "{:.3f}"),
        "mean_s": ("latency mean, s", "{:.3f}"),
        "ttft_p99_s": ("TTFT p99, s", "{:.3f}"),
        "cached": ("cached prompt tokens, %", "{:.0f}"),
        "uneven": ("most requests of a replica ÷ fewest", "{:.2f}"),
    },
    text="Rates are requests per second per replica. A router knows the load of each replica as it "
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
    styles=dict(zip(ROUTERS, STYLES)) | OLD,
)
