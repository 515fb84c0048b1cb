"""Laws of queueing theory beside real servers: queue time, idle rows, Little's law.

Real servers with the fake engine. `nobatch` under Poisson arrivals is an M/G/1 queue, whose mean
queue time Pollaczek and Khinchine give; a saturated `static` server uses
mean(g) / E[max of B draws of g] of its rows; and in every run L = λ · W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.load import Watch
from client.outcomes import Outcome
from client.wire import wire
from client.workloads import Workload
from compare.analysis import expected_useful_fraction, pollaczek_khinchine
from compare.measure import Target, measure, warm_up
from compare.servers import server
from config import MODES
from studies.study import Case, Study, Table

LENGTHS = "exponential:20:100"  # completion tokens, so that service times vary
WARM = 0.1  # of a run's requests come while the queue is still filling
QUEUE, IDLE, LITTLE = "queue time, s", "useful rows, %", "requests in flight"


def cases(n: int, load: float, rows: int) -> list[dict[str, Any]]:
    return [
        {"law": QUEUE, "mode": "nobatch", "load": load},
        {"law": IDLE, "mode": "static", "rows": rows},
        *({"law": LITTLE, "mode": mode} for mode in MODES),
    ]


def run(case: Case, n: int, seed: int, kept: Any = ()) -> dict[str, Any]:
    settings = {"model": "fake"} | ({"max_batch_size": case["rows"]} if "rows" in case else {})
    with server(case["mode"], settings) as url:
        target = Target(case["mode"], url, wire("inference"))
        warm_up(target)
        if case["law"] == QUEUE:
            measured, expected = queueing(target, case["load"], n, seed)
        elif case["law"] == IDLE:
            measured, expected = useful_rows(target, case["rows"], seed)
        else:
            trace = Workload(seed=seed).requests(n, "poisson:10")
            law = measure(target, trace, {}, 600, Watch())[0]["littles_law"]
            measured, expected = law["in_flight"], law["rate_x_latency"]
    return {"measured": measured, "expected": expected, "difference": measured - expected}


def queueing(target: Target, load: float, n: int, seed: int) -> tuple[float, float]:
    """Return `nobatch`'s mean queue time, measured and expected from its service times."""
    _, outcomes = measure(target, Workload(LENGTHS).requests(50, "closed:1"), {}, 60, Watch())
    rate = load / float(np.mean(services(outcomes)))
    trace = Workload(LENGTHS, seed=seed).requests(n, f"poisson:{rate}")
    result, outcomes = measure(target, trace, {}, 600, Watch())
    queued = [timings["queue_s"] for timings in timings_of(outcomes)][int(WARM * n) :]
    return float(np.mean(queued)), pollaczek_khinchine(result["requested_rate"], services(outcomes))


def timings_of(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    return [o.answer.timings for o in outcomes if o.answer and o.answer.timings]


def services(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds from admission to answer of each request."""
    return [timings["e2e_s"] - timings["queue_s"] for timings in timings_of(outcomes)]


def useful_rows(target: Target, rows: int, seed: int) -> tuple[float, float]:
    """Return useful rows, in %, of a static server that always has a batch waiting, measured and
    expected.
    """
    burst = Workload(seed=seed).requests(30 * rows, "burst")
    result, _ = measure(target, burst, {}, 600, Watch())
    expected = expected_useful_fraction([request.num_tokens for request in burst], [rows])
    assert expected is not None
    return 100 * result["useful_fraction"], 100 * expected


STUDY = Study(
    name="theory",
    title="Where theory knows the answer",
    question="Does the server give what theory knows: queue time, idle rows, Little's law?",
    source="Pollaczek and Khinchine's mean queue time of M/G/1; L = λ · W (Little)",
    workload="real servers, the fake engine; {n} requests, {seeds} seeds, a load of {load:g}, "
    "batches of {rows}",
    requests=200,
    seeds=6,
    options={"load": (0.6, "of nobatch, below 1"), "rows": (16, "of static's batches")},
    cases=cases,
    run=run,
    servers=True,
    measures={
        "measured": ("measured", "{:.4g}"),
        "expected": ("expected", "{:.4g}"),
        "difference": ("measured − expected", "{:.3f}"),
    },
    tables=[Table(("law", "mode"))],
)
