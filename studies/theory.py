"""Where theory knows the answer, the server gives it: queueing, idle rows, Little's law.

    python -m studies.theory [--seeds 6] [--requests 200] [--load 0.6]

Real servers with the fake engine. `nobatch` under Poisson arrivals is an M/G/1 queue, whose mean
queue time Pollaczek and Khinchine give; a saturated `static` server uses
mean(g) / E[max of B draws of g] of its rows; and in every run L = λ · W. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from client.load import Watch
from client.machine import stamp
from client.outcomes import Outcome
from client.wire import wire
from client.workloads import Workload
from compare.analysis import difference, estimate, expected_useful_fraction, pollaczek_khinchine
from compare.measure import Target, measure, warm_up
from compare.servers import server
from config import MODES

LENGTHS = "exponential:20:100"  # completion tokens, so that service times vary
WARM = 0.1  # of a run's requests come while the queue is still filling


def queueing(seeds: int, requests: int, load: float) -> list[dict[str, float]]:
    """For each seed `nobatch`'s mean queue time, and what is expected of its service times."""
    found = []
    with server("nobatch", {"model": "fake"}) as url:
        target = Target("nobatch", url, wire("inference"))
        warm_up(target)
        _, outcomes = measure(target, Workload(LENGTHS).requests(50, "closed:1"), {}, 60, Watch())
        rate = load / float(np.mean(services(outcomes)))
        for seed in range(seeds):
            trace = Workload(LENGTHS, seed=seed).requests(requests, f"poisson:{rate}")
            result, outcomes = measure(target, trace, {}, 600, Watch())
            queued = [
                o.answer.timings["queue_s"] for o in outcomes if o.answer and o.answer.timings
            ]
            expected = pollaczek_khinchine(result["requested_rate"], services(outcomes))
            found.append(
                {
                    "seed": seed,
                    "queue_s": float(np.mean(queued[int(WARM * requests) :])),
                    "expected_s": expected,
                }
            )
    return found


def services(outcomes: list[Outcome]) -> list[float]:
    """Seconds from admission to answer."""
    return [
        o.answer.timings["e2e_s"] - o.answer.timings["queue_s"]
        for o in outcomes
        if o.answer and o.answer.timings
    ]


def useful_rows(rows: int) -> dict[str, float]:
    """Useful rows of a static server that always has a batch waiting, measured and expected."""
    burst = Workload(seed=1).requests(30 * rows, "burst")
    with server("static", {"model": "fake", "max_batch_size": rows}) as url:
        result, _ = measure(Target("static", url, wire("inference")), burst, {}, 600, Watch())
    expected = expected_useful_fraction([request.num_tokens for request in burst], [rows])
    assert expected is not None
    return {"rows": rows, "useful_fraction": result["useful_fraction"], "expected": expected}


def littles_law(requests: int) -> dict[str, dict[str, float]]:
    """L as the client counts it, and λ · W with the server's W, in every mode."""
    found = {}
    for mode in MODES:
        with server(mode, {"model": "fake"}) as url:
            trace = Workload(seed=2).requests(requests, "poisson:10")
            result, _ = measure(Target(mode, url, wire("inference")), trace, {}, 600, Watch())
            found[mode] = result["littles_law"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.theory",
        description="Where theory knows the answer, the server gives it.",
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=200, help="of each run (default: 200)")
    parser.add_argument(
        "--load", type=float, default=0.6, help="of nobatch, below 1 (default: 0.6)"
    )
    parser.add_argument("--rows", type=int, default=16, help="of static's batches (default: 16)")
    options = parser.parse_args()
    results: dict[str, Any] = {"queueing": queueing(options.seeds, options.requests, options.load)}
    measured = [run["queue_s"] for run in results["queueing"]]
    apart = difference([run["expected_s"] for run in results["queueing"]], measured)
    interval = "" if apart.half is None else f" ± {1e3 * apart.half:.1f}"
    print(
        f"nobatch, mean queue time: {1e3 * estimate(measured).mean:.1f} ms; "
        f"less Pollaczek-Khinchine's: {1e3 * apart.mean:+.1f}{interval} ms "
        f"over {options.seeds} seeds: "
        f"{'a difference is shown' if apart.shown else 'no difference shown'}"
    )
    rows = results["useful_rows"] = useful_rows(options.rows)
    print(
        f"static, useful rows in batches of {rows['rows']}: {100 * rows['useful_fraction']:.1f}%, "
        f"expected {100 * rows['expected']:.1f}% "
        f"({100 * (rows['useful_fraction'] / rows['expected'] - 1):+.1f}%)"
    )
    results["littles_law"] = littles_law(options.requests)
    for mode, law in results["littles_law"].items():
        apart_by = 100 * (law["in_flight"] / law["rate_x_latency"] - 1)
        print(
            f"{mode:9} in flight {law['in_flight']:.2f}, "
            f"rate × latency {law['rate_x_latency']:.2f} ({apart_by:+.1f}%)"
        )
    print(json.dumps(results | stamp()))


if __name__ == "__main__":
    main()
