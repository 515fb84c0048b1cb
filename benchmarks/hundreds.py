"""Three hundred replicas and ten thousand requests a second: where the front end, a router's
knowledge and the metrics give out.

    python -m benchmarks.hundreds [--seeds 3] [--requests 40000] [--out DIR]

What a front end computes is what it takes for one request (results/replicas/fronts.json), times so
many. What a router must know is simulated, with every replica. What /stats and /metrics say is put
together for so many, from a server's own and from as many samples as each keeps. Twenty minutes, of
which the last one is timed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import generate_latest

from benchmarks.fronts import RECORD
from benchmarks.studies import Case, Cases, Study, over_seeds, parser_of, shown, write
from client.data import PromptData
from client.load import Watch
from client.report.tables import markdown, told
from client.simulated import Simulated
from config import build
from deploy.ingress import merged, one_exposition
from deploy.replica import Told
from observers.run import DISTRIBUTIONS, Run
from observers.server_stats import WINDOW
from serving import Server
from simulate.costs import load
from simulate.fleet import Layout

STUDY = Study("benchmarks.hundreds", "hundreds", "300 replicas and 10,000 requests a second", "")
REPLICAS, RATE, ROWS = 300, 10_000, 32
LENGTHS = "lognormal:210:.7:900"
OLD_S = 0.3  # of reports, as Ray's are (results/replicas/replicas.json)


class Knowledge(NamedTuple):
    """A router, and how old what it knows may be."""

    router: str
    stale_s: float = 0.0
    counts_own: bool = True

    def __str__(self) -> str:
        if not self.stale_s:
            return "what is now"
        own = "and what it sent since" if self.counts_own else "alone"
        return f"reports up to {self.stale_s:g} s old {own}"


KNOWN = (
    Knowledge("random"),
    Knowledge("round_robin"),
    Knowledge("power_of_two"),
    Knowledge("least_requests"),
    Knowledge("power_of_two", OLD_S),
    Knowledge("least_tokens", OLD_S),
    Knowledge("power_of_two", OLD_S, counts_own=False),
    Knowledge("least_requests", OLD_S, counts_own=False),
)
MEASURES = {  # heading, format
    "mean_s": ("latency mean, s", "{:.2f}"),
    "p99_s": ("latency p99, s", "{:.2f}"),
    "ttft_p99_s": ("first token p99, s", "{:.3f}"),
    "uneven": ("most requests ÷ fewest", "{:.2f}"),
}


# ---- what a router must know


def serve(known: Knowledge, n: int, seed: int) -> dict[str, Any]:
    """What became of one trace."""
    settings = {"model": "fake", "max_batch_size": ROWS, "max_waiting": 10**6}
    layout = Layout(REPLICAS, known.router, known.stale_s, known.counts_own, seed=seed)
    server = Simulated("dynamic", build("dynamic", settings, {}), load("fake"), layout)
    data = PromptData(LENGTHS, seed=seed, prompts="ids")
    requests = data.requests(n, f"poisson:{RATE}", scaled=True)
    outcomes = server.replay(requests, math.inf, Watch())
    answers = outcomes.answers
    assert len(answers.e2e_s) == n
    sent = server.told()[0]["replicas"]["requests"]
    return {
        "mean_s": float(np.mean(answers.e2e_s)),
        "p99_s": float(np.percentile(answers.e2e_s, 99)),
        "ttft_p99_s": float(np.percentile(answers.ttft_s, 99)),
        "uneven": max(sent.values()) / max(1, min(sent.get(k, 0) for k in range(REPLICAS))),
    }


def routers_table(found: Cases) -> str:
    rows = [["router", "goes by", *(heading for heading, _ in MEASURES.values())]]
    for case in found:
        cells = [told(shown(case, measure), form) for measure, (_, form) in MEASURES.items()]
        rows.append([case["router"], case["known"], *cells])
    return markdown(rows, left=2)


# ---- what a front end computes


def fronts_table() -> str:
    """Cores that a request's and a token's CPU time come to, of all processes beside an engine."""
    record = json.loads(RECORD.read_text())
    mean = PromptData(LENGTHS).mean_num_tokens
    most = {
        case["front"]: max(
            value for each in case["seeds"] for name, value in each.items()
            if name.startswith("answers_per_s")
        )
        for case in record["loads"]
    }  # fmt: skip
    rows = [["through", "CPU of an answer, ms", "of a streamed token, ms",
             f"cores for {RATE:,} answers/s", f"if {mean:.0f} tokens each are streamed",
             "answers/s that 2 cores gave"]]  # fmt: skip
    for case in record["costs"]:
        request, token = (shown(case, f"{what}_cpu_ms").mean for what in ("request", "token"))
        answers = RATE * request / 1e3
        rows.append([
            case["front"], f"{request:.2f}", f"{token:.3f}", f"{answers:,.0f}",
            f"{answers + RATE * (mean - 1) * token / 1e3:,.0f}", f"{most[case['front']]:,.0f}",
        ])  # fmt: skip
    return markdown(rows)


# ---- what all replicas tell


def full() -> Run:
    """A run of which a server keeps as much as it can."""
    n, drawn = WINDOW, np.random.default_rng(0)
    counts = Counter({"finished": n, "prompt_tokens": 10 * n, "completion_tokens": 100 * n})
    samples = {name: drawn.exponential(1.0, n) for name in DISTRIBUTIONS}
    return Run(0.0, 1.0, counts, by_tokens=Counter({100: n}), latency_by_tokens={100: 1.0 * n},
               busy_s=1.0, samples=samples)  # fmt: skip


def told_by_all() -> dict[str, dict[str, float]]:
    """What a replica's own take in bytes, and to put so many together in seconds."""
    config = build("dynamic", {"model": "fake"}, {})
    server = Server(config, replica="0")
    exposed = generate_latest(server.metrics.registry)
    server.close()
    one = full()
    start = time.perf_counter()
    merged(config, [Told(str(k), None, 1000, one) for k in range(REPLICAS)], Run())
    stats_s = time.perf_counter() - start
    exposed_by_all = [exposed.replace(b'replica="0"', b'replica="%d"' % k) for k in range(REPLICAS)]
    start = time.perf_counter()
    one_exposition(exposed_by_all)
    return {
        "/stats": {"bytes": len(pickle.dumps(one)), "seconds": stats_s},
        "/metrics": {"bytes": len(exposed), "seconds": time.perf_counter() - start},
    }


def told_table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [["", "of a replica, kB", f"of {REPLICAS}, MB", "to put them together, s"]]
    rows += [
        [name, f"{each['bytes'] / 1e3:,.0f}", f"{REPLICAS * each['bytes'] / 1e6:,.0f}",
         f"{each['seconds']:.1f}"]
        for name, each in found.items()
    ]  # fmt: skip
    return markdown(rows)


def main() -> None:
    parser = parser_of(STUDY, STUDY.title)
    parser.set_defaults(seeds=3)
    parser.add_argument("--requests", type=int, default=40_000, help="of a trace (default: 40000)")
    options = parser.parse_args()
    tasks = [(known, options.requests) for known in KNOWN]
    with multiprocessing.Pool(options.processes) as workers:
        results = over_seeds(workers, serve, tasks, options.seeds)
    found: list[Case] = [
        {"router": known.router, "known": str(known), "seeds": mine}
        for known, mine in zip(KNOWN, results)
    ]
    by_all = told_by_all()
    body = "\n\n".join([
        "## What a front end computes",
        fronts_table(),
        "CPU is that of all processes beside an engine, measured with one request at a time.",
        "## What a router must know",
        routers_table(found),
        f"Between two reports {RATE * OLD_S:,.0f} requests are sent. *And what it sent since* is a "
        "router that all requests pass; *alone* is what many routers come to of which none knows "
        "what the others send.",
        "## What all replicas tell",
        told_table(by_all),
    ])  # fmt: skip
    told_of = (
        f"{REPLICAS} replicas of {ROWS} rows, {RATE:,} requests a second; routers simulated, costs "
        f"fake, dynamic, {options.requests:,} requests of {LENGTHS} tokens, {options.seeds} seeds"
    )
    write(STUDY, options.out, told_of, body, None, {"cases": found, "told": by_all})


if __name__ == "__main__":
    main()
