"""What queueing and planning cost: at full rows, with a short and a long queue. No torch.

    python -m benchmarks.scheduler [--rows 256] [--waiting 100000]

Timed are enqueue, schedule and apply. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from client.machine import stamp
from config import MODES, build
from scheduling import scheduler as scheduling
from scheduling.errors import Cancelled
from scheduling.inference import Inference

REPEATS = 100


def measure(mode: str, rows: int, waiting: int) -> dict[str, float]:
    """Medians: ms of an iteration's schedule and apply, µs of an enqueue behind all that wait."""
    settings = {"model": "fake", "max_batch_size": str(rows), "max_waiting": str(waiting + REPEATS)}
    scheduler = scheduling.build(build(mode, settings, {}))
    scheduler.enqueue([Inference([1] * 10, REPEATS + 10) for _ in range(rows)], 0.0)
    for _ in range(waiting):
        scheduler.enqueue([Inference([1] * 10, 100)], 0.0)
    plan, apply, enqueue = [], [], []
    for inference in [Inference([1] * 10, 100) for _ in range(REPEATS)]:
        start = time.perf_counter()
        scheduler.enqueue([inference], 0.0)
        enqueue.append(time.perf_counter() - start)
        scheduler.fail([inference], Cancelled("it was measured"), 0.0)
    for step in range(REPEATS):
        start = time.perf_counter()
        iteration, _ = scheduler.schedule(1.0 + step)
        planned = time.perf_counter()
        scheduler.apply(iteration, [1] * sum(row.samples for row in iteration.rows), 1.0 + step)
        plan.append(planned - start)
        apply.append(time.perf_counter() - planned)
    return {
        "enqueue_us": 1e6 * statistics.median(enqueue),
        "plan_ms": 1e3 * statistics.median(plan),
        "apply_ms": 1e3 * statistics.median(apply),
        "rows": len(iteration.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler",
        description="What queueing and planning cost.",
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=100_000)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for mode in MODES:
        for waiting in (0, options.waiting):
            found = measure(mode, 1 if mode == "nobatch" else options.rows, waiting)
            results.setdefault(mode, {})[f"{waiting} waiting"] = found
            print(
                f"{mode:9} {found['rows']:4} rows, {waiting:7,} waiting: "
                f"enqueue {found['enqueue_us']:.1f} µs, plan {found['plan_ms']:.3f} ms, "
                f"apply {found['apply_ms']:.3f} ms"
            )
    print(json.dumps({"modes": results} | stamp()))


if __name__ == "__main__":
    main()
