"""What queueing and planning cost: at full rows, with a short and a long queue. No torch.

    python -m benchmarks.scheduler [--rows 256] [--waiting 100000]

Timed are enqueue, schedule and apply, and how long a prompt's keys take to hash, which happens
before it is queued. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from client.machine import stamp
from config import MODES, build
from scheduling import scheduler as scheduling
from scheduling.errors import Cancelled
from scheduling.inference import Inference
from scheduling.policies import ORDERS
from scheduling.prefix_cache import block_keys

REPEATS = 100
PROMPT = list(range(64))
CACHING = {"prefix_caching": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: (mode, {}) for mode in MODES},
    "demand": ("dynamic", {"kv_reservation": "demand"}),
    "caching": ("dynamic", CACHING),
    "demand, caching": ("dynamic", {"kv_reservation": "demand"} | CACHING),
    **{
        order: ("dynamic", {"order": order} | (CACHING if order == "prefix" else {}))
        for order in ORDERS
        if order != "fcfs"
    },
    "mlfq, demand": ("dynamic", {"order": "mlfq", "kv_reservation": "demand"}),
    "fair, multibin": ("multibin", {"order": "fair"}),
}
USERS = 100


def measure(variant: str, rows: int, waiting: int) -> dict[str, float]:
    """Medians: ms of an iteration's schedule and apply, µs of an enqueue behind all that wait.

    With caching all prompts begin alike. With an order a row is free and no block, so that it looks
    whom to take in every iteration; preemptive ones look anyway.
    """
    mode, own = VARIANTS[variant]
    preemptive = ORDERS[own.get("order", "fcfs")].preemptive
    looks = "order" in own and not preemptive and mode == "dynamic"
    settings = {"model": "fake", "max_batch_size": rows + looks, "max_waiting": waiting + REPEATS}
    scheduler = scheduling.build(build(mode, settings | own, {}))

    numbers = itertools.count()

    def asked(tokens: int) -> Inference:
        keys = block_keys(PROMPT, 16) if "prefix_caching" in own else None
        return Inference(PROMPT, tokens, keys=keys, user=f"user {next(numbers) % USERS}")

    def iterate(now: float) -> tuple[float, float, int]:
        start = time.perf_counter()
        iteration, _ = scheduler.schedule(now)
        planned = time.perf_counter()
        scheduler.apply(iteration, [1] * sum(row.samples for row in iteration.rows), now)
        return planned - start, time.perf_counter() - planned, len(iteration.rows)

    scheduler.enqueue([asked(2 * REPEATS + 10) for _ in range(rows)], 0.0)
    for step in range(REPEATS):  # until all have their prompts
        iterate(float(step))
    if looks:
        scheduler.pool.allocate(scheduler.pool.free_blocks)
    for _ in range(waiting):
        scheduler.enqueue([asked(100)], 0.0)
    enqueue = []
    for inference in [asked(100) for _ in range(REPEATS)]:
        start = time.perf_counter()
        scheduler.enqueue([inference], 0.0)
        enqueue.append(time.perf_counter() - start)
        scheduler.fail([inference], Cancelled("it was measured"), 0.0)
    plan, apply, computed = zip(*(iterate(float(REPEATS + step)) for step in range(REPEATS)))
    return {
        "enqueue_us": 1e6 * statistics.median(enqueue),
        "plan_ms": 1e3 * statistics.median(plan),
        "apply_ms": 1e3 * statistics.median(apply),
        "rows": max(computed),
    }


def hashing_us() -> float:
    """Median µs a token of a prompt's keys."""
    ids, seconds = list(range(1024)), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        block_keys(ids, 16)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds) / len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler",
        description="What queueing and planning cost.",
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=100_000)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for variant in VARIANTS:
        for waiting in (0, options.waiting):
            found = measure(variant, 1 if variant == "nobatch" else options.rows, waiting)
            results.setdefault(variant, {})[f"{waiting} waiting"] = found
            print(
                f"{variant:15} {found['rows']:4} rows, {waiting:7,} waiting: "
                f"enqueue {found['enqueue_us']:.1f} µs, plan {found['plan_ms']:.3f} ms, "
                f"apply {found['apply_ms']:.3f} ms"
            )
    print(f"hashing: {hashing_us():.2f} µs a token")
    print(json.dumps({"variants": results, "hashing_us": hashing_us()} | stamp()))


if __name__ == "__main__":
    main()
