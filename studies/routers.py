"""What a router is worth: p99 of latency against replicas, for even, bursty and shared-prefix
traces, in virtual time.

    python -m studies.routers [--costs fake] [--seeds 5] [--requests 600] [--out DIR]

The load of each replica stays the same: with twice the replicas twice as much comes. All routers of
a case serve the same traces, so differences are paired by seed.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.load import Watch
from client.workloads import Workload
from compare.report.drawing import LOOKS, STYLE, Look, caption_of, plain_log
from compare.report.tables import formatted, markdown
from config import build
from deploy.routers import ROUTERS
from simulate.costs import load
from simulate.fleet import Layout
from simulate.simulated import Simulated
from studies.runner import Case, Cases, Study, apart, only, over_seeds, parser_of, shown, write

STUDY = Study(
    "studies.routers", "routers", "What a router is worth",
    "p99 of latency and of the first token against replicas, by router, for three kinds of trace",
)  # fmt: skip
REPLICAS = (1, 2, 4, 8, 16)
BASE = "random"
LEAST = 2000  # requests of a trace
STALE_S = 1.0
ROWS, BLOCKS = 16, 1000  # of a replica; its cache holds few of the prefixes


class Trace(NamedTuple):
    """A kind of trace, and how many requests a second of it a replica gets."""

    told: str
    rate: float
    arrival: str
    data: dict[str, Any]
    routers: tuple[str, ...]


PLAIN = ("random", "round_robin", "power_of_two", "least_requests", "least_tokens")
LONG_TAIL = {"lengths": "lognormal:60:1:600"}
SHARED = {"lengths": "uniform:5:40", "prefixes": "64:512:0.8"}
TRACES = {
    "even": Trace("Poisson arrivals", 62, "poisson:{}", LONG_TAIL, PLAIN),
    "bursty": Trace("gamma arrivals, cv 3", 50, "gamma:{}:3", LONG_TAIL, PLAIN),
    "prefixes": Trace(
        "64 shared prefixes of 512 tokens",
        90,
        "poisson:{}",
        SHARED,
        ("random", "round_robin", "power_of_two", "least_tokens", "prefix"),
    ),
}
STALE = ("least_requests", "power_of_two")  # shown with old knowledge, too
MEASURES = {  # heading, format
    "p99_s": ("latency p99, s", "{:.3f}"),
    "mean_s": ("latency mean, s", "{:.3f}"),
    "ttft_p99_s": ("first token p99, s", "{:.3f}"),
    "cached": ("prompt tokens found cached, %", "{:.0f}"),
    "uneven": ("most requests ÷ fewest", "{:.2f}"),
}

DRAWN = {"p99_s": "latency, p99, s", "ttft_p99_s": "first token, p99, s"}


def cases() -> list[dict[str, Any]]:
    found = [
        {"trace": name, "replicas": n, "router": router, "stale_s": 0.0}
        for name, trace in TRACES.items()
        for n, router in itertools.product(REPLICAS, trace.routers)
    ]
    return found + [
        {"trace": "even", "replicas": n, "router": router, "stale_s": STALE_S}
        for n, router in itertools.product(REPLICAS, STALE)
    ]


def serve(case: dict[str, Any], each: int, costs: str, seed: int) -> dict[str, Any]:
    """What became of one trace. each: requests a replica, of few replicas more."""
    n = max(LEAST, each * case["replicas"])
    trace = TRACES[case["trace"]]
    settings = {
        "model": "fake",
        "max_batch_size": ROWS,
        "kv_cache": f"{BLOCKS}blocks",
        "max_waiting": 10**6,
    }
    config = build("dynamic", settings | {"prefix_caching": "prefixes" in trace.data}, {})
    data = Workload(seed=seed, prompts="ids", **trace.data)
    arrival = trace.arrival.format(f"{trace.rate * case['replicas']:g}")
    requests = data.requests(n, arrival, scaled=True)
    own = case["stale_s"] == 0
    layout = Layout(case["replicas"], case["router"], case["stale_s"], own, seed=seed)
    server = Simulated("dynamic", config, load(costs), layout)
    outcomes = server.replay(requests, math.inf, Watch())
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    assert len(answers) == n
    stats, _, _ = server.report()
    sent = [stats["replicas"]["requests"].get(k, 0) for k in range(case["replicas"])]
    return {
        "p99_s": float(np.percentile([a.e2e_s for a in answers], 99)),
        "mean_s": float(np.mean([a.e2e_s for a in answers])),
        "ttft_p99_s": float(np.percentile([a.ttft_s for a in answers], 99)),
        "cached": 100 * stats["cached_tokens"] / stats["total_input_tokens"],
        "uneven": max(sent) / max(1, min(sent)),
    }


def name_of(case: Case) -> str:
    old = f", {case['stale_s']:g} s old, own uncounted" if case["stale_s"] else ""
    return case["router"] + old


def tables(found: Cases) -> str:
    parts = []
    for name, trace in TRACES.items():
        rows = [["router", "replicas", *(heading for heading, _ in MEASURES.values())]]
        rows[0].append(f"p99 − {BASE}'s, s")
        for case in only(found, trace=name):
            [base] = only(found, trace=name, replicas=case["replicas"], router=BASE, stale_s=0.0)
            cells = [formatted(shown(case, m), form) for m, (_, form) in MEASURES.items()]
            gap = "–" if case is base else apart(base, case, "p99_s", "{:.3f}")
            rows.append([name_of(case), str(case["replicas"]), *cells, gap])
        parts.append(f"## {trace.told}, {trace.rate:g} requests a second and replica")
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def figure(found: Cases, caption: str) -> Figure:
    """A column a kind of trace; of latency and of the first token."""
    looks = dict(zip(ROUTERS, LOOKS))
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 8.4), layout="constrained")
        all_axes = fig.subplots(len(DRAWN), len(TRACES), sharex=True)
        for axes_of, (name, trace) in zip(all_axes.T, TRACES.items()):
            mine = only(found, trace=name)
            for axes, measure in zip(axes_of, DRAWN):
                for label in dict.fromkeys(map(name_of, mine)):
                    own = [case for case in mine if name_of(case) == label]
                    _line(axes, own, looks[own[0]["router"]], label, measure)
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:g}")
                axes.set_yscale("log")
                plain_log(axes.yaxis)
                axes.grid(alpha=0.25)
            axes_of[0].set_title(f"{trace.told}")
            axes_of[-1].set_xlabel(f"replicas, each with {trace.rate:g} requests a second")
            axes_of[-1].legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        for axes, heading in zip(all_axes[:, 0], DRAWN.values()):
            axes.set_ylabel(heading)
        caption_of(fig, caption)
    return fig


def _line(axes: Axes, mine: Cases, look: Look, label: str, measure: str) -> None:
    values = [shown(case, measure) for case in mine]
    means = [value.mean for value in values]
    halves = [value.half or 0.0 for value in values]
    below = [min(half, 0.9 * mean) for half, mean in zip(halves, means)]  # on a log axis
    axes.errorbar(
        [case["replicas"] for case in mine],
        means,
        yerr=[below, halves],
        color=look.colour,
        ls=":" if mine[0]["stale_s"] else "-",
        marker=look.marker,
        capsize=3,
        label=label,
    )


def main() -> None:
    parser = parser_of(STUDY, "What a router is worth, in virtual time.")
    parser.add_argument("--costs", default="fake", help="of iterations, as simulate.sh's")
    parser.add_argument(
        "--requests", type=int, default=600, help=f"a replica, {LEAST} at least (default: 600)"
    )
    options = parser.parse_args()
    asked = cases()
    with multiprocessing.Pool(options.processes) as workers:
        tasks = [(case, options.requests, options.costs) for case in asked]
        results = over_seeds(workers, serve, tasks, options.seeds)
    found: list[Case] = [case | {"seeds": mine} for case, mine in zip(asked, results)]
    told_of = (
        f"simulated, costs {options.costs}: dynamic, {ROWS} rows and {BLOCKS} KV blocks a replica; "
        f"{options.requests} requests a replica, {LEAST} at least, {options.seeds} seeds"
    )
    result = {"cases": found, "requests": options.requests, "costs": options.costs}
    write(STUDY, options.out, told_of, tables(found), figure(found, told_of), result)


if __name__ == "__main__":
    main()
