"""What queueing and planning cost: at full rows, with a short and a long queue. No torch.

    python -m benchmarks.scheduler [--rows 256] [--waiting 100000]

Timed are enqueue, schedule and apply, and how long a prompt's keys take to hash, which happens
before it is queued.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from typing import Any

from benchmarks.harness import Benchmark, run
from config import MODES, build
from scheduling import scheduler as scheduling
from scheduling.errors import Cancelled
from scheduling.inference import Inference
from scheduling.policies import ORDERS
from scheduling.prefix_cache import block_keys

REPEATS = 100
USERS = 100
PROMPT = list(range(64))
CACHING = {"prefix_caching": True}
DEMAND = {"kv_reservation": "demand"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: (mode, {}) for mode in MODES},
    "demand": ("dynamic", DEMAND),
    "caching": ("dynamic", CACHING),
    "demand, caching": ("dynamic", DEMAND | CACHING),
    **{
        order: ("dynamic", {"order": order} | (CACHING if order == "prefix" else {}))
        for order in ORDERS
        if order != "fcfs"
    },
    "mlfq, demand": ("dynamic", {"order": "mlfq"} | DEMAND),
    "fair, multibin": ("multibin", {"order": "fair"}),
}
BENCHMARK = Benchmark(
    "scheduler",
    "What queueing and planning cost.",
    {"--rows": (256, "rows of a batch"), "--waiting": (100_000, "requests of the long queue")},
)


def measure(variant: str, rows: int, waiting: int) -> dict[str, float]:
    """Medians: ms of an iteration's schedule and apply, µs of an enqueue behind all that wait.

    With caching all prompts begin alike. With an order a row is free and no block, so that each
    iteration looks for requests to admit; preemptive ones look anyway.
    """
    mode, settings = VARIANTS[variant]
    preemptive = ORDERS[settings.get("order", "fcfs")].preemptive
    looks = "order" in settings and not preemptive and mode == "dynamic"
    sizes = {"model": "fake", "max_batch_size": rows + looks, "max_waiting": waiting + REPEATS}
    scheduler = scheduling.build(build(mode, sizes | settings, {}))
    numbers = itertools.count()

    def request(tokens: int) -> Inference:
        keys = block_keys(PROMPT, 16) if "prefix_caching" in settings else None
        return Inference(PROMPT, tokens, keys=keys, user=f"user {next(numbers) % USERS}")

    def iterate(now: float) -> tuple[float, float, int]:
        start = time.perf_counter()
        iteration, _ = scheduler.schedule(now)
        planned = time.perf_counter()
        scheduler.apply(iteration, [1] * sum(row.samples for row in iteration.rows), now)
        return planned - start, time.perf_counter() - planned, len(iteration.rows)

    scheduler.enqueue([request(2 * REPEATS + 10) for _ in range(rows)], 0.0)
    for step in range(REPEATS):  # until all have their prompts
        iterate(float(step))
    if looks:
        scheduler.pool.allocate(scheduler.pool.free_blocks)
    for _ in range(waiting):
        scheduler.enqueue([request(100)], 0.0)
    enqueue = []
    for inference in [request(100) for _ in range(REPEATS)]:
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
    options = BENCHMARK.parse()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for variant in VARIANTS:
        for waiting in (0, options.waiting):
            result = measure(variant, 1 if variant == "nobatch" else options.rows, waiting)
            results.setdefault(variant, {})[f"{waiting} waiting"] = result
            print(
                f"{variant:15} {result['rows']:4} rows, {waiting:7,} waiting: "
                f"enqueue {result['enqueue_us']:.1f} µs, plan {result['plan_ms']:.3f} ms, "
                f"apply {result['apply_ms']:.3f} ms"
            )
    hashing = hashing_us()
    print(f"hashing: {hashing:.2f} µs a token")
    print(json.dumps({"variants": results, "hashing_us": hashing} | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
