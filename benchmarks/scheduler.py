"""Costs of queueing and planning at full rows, with a short and a long queue. No torch.

python -m benchmarks.scheduler [--rows 256] [--waiting 100000]
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Benchmark, run
from config import MODES, build
from scheduling.building import build_scheduler
from scheduling.errors import Cancelled
from scheduling.inference import Inference
from scheduling.policies import ORDERS
from scheduling.prefix_cache import block_keys

REPEATS = 100
USERS = 100
CACHING = {"prefix_caching": True}
VARIANTS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in MODES},
    **{order: {"order": order} | (CACHING if order == "prefix" else {}) for order in ORDERS},
    "demand": {"kv_reservation": "demand"},
    "caching": CACHING,
}
BENCHMARK = Benchmark(
    "scheduler",
    "What queueing and planning cost.",
    {"--rows": (256, "rows of a batch"), "--waiting": (100_000, "requests of the long queue")},
)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def measure(settings: dict[str, Any], rows: int, waiting: int) -> dict[str, float]:
    """Medians: ms of an iteration's schedule and apply, µs of an enqueue behind all that wait.

    With an order a row is free and no block, so that each iteration looks for requests to admit;
    preemptive ones look anyway.
    """
    spare = "order" in settings and not ORDERS[settings["order"]].preemptive
    sizes = {"model": "fake", "max_batch_size": rows + spare, "max_waiting": waiting + REPEATS}
    mode = settings.get("mode", "dynamic")
    config = build(mode, sizes | {k: v for k, v in settings.items() if k != "mode"}, {})
    scheduler, users = build_scheduler(config), itertools.cycle(map(str, range(USERS)))

    def requests(n: int, tokens: int) -> list[Inference]:
        prompt = list(range(64))  # where prefixes are cached, all prompts begin alike
        keys = (block_keys(prompt, 16) if config.prefix_caching else None for _ in range(n))
        return [Inference(prompt, tokens, keys=each, user=next(users)) for each in keys]

    def iterate(now: float) -> tuple[float, float, int]:
        plan_s, (iteration, _) = timed(scheduler.schedule, now)
        ids = [1] * sum(row.samples for row in iteration.rows)
        return plan_s, timed(scheduler.apply, iteration, ids, now)[0], len(iteration.rows)

    scheduler.enqueue(requests(rows, 2 * REPEATS + 10), 0.0)
    for step in range(REPEATS):  # until all have their prompts
        iterate(float(step))
    if spare:
        scheduler.pool.allocate(scheduler.pool.free_blocks)
    for inference in requests(waiting, 100):
        scheduler.enqueue([inference], 0.0)
    enqueue_s = []
    for inference in requests(REPEATS, 100):
        enqueue_s.append(timed(scheduler.enqueue, [inference], 0.0)[0])
        scheduler.fail([inference], Cancelled("it was measured"), 0.0)
    plan_s, apply_s, computed = zip(*(iterate(float(REPEATS + step)) for step in range(REPEATS)))
    return {
        "enqueue_us": 1e6 * statistics.median(enqueue_s),
        "plan_ms": 1e3 * statistics.median(plan_s),
        "apply_ms": 1e3 * statistics.median(apply_s),
        "rows": max(computed),
    }


def main() -> None:
    options = BENCHMARK.parser().parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in VARIANTS}
    for (name, settings), waiting in itertools.product(VARIANTS.items(), (0, options.waiting)):
        result = measure(settings, 1 if name == "nobatch" else options.rows, waiting)
        results[name][f"{waiting} waiting"] = result
        print(
            f"{name:15} {result['rows']:4} rows, {waiting:7,} waiting: "
            f"enqueue {result['enqueue_us']:.1f} µs, plan {result['plan_ms']:.3f} ms, "
            f"apply {result['apply_ms']:.3f} ms"
        )
    ids = list(range(1024))
    seconds = [timed(block_keys, ids, 16)[0] for _ in range(REPEATS)]
    hashing_us = 1e6 * statistics.median(seconds) / len(ids)
    print(f"hashing a prompt's keys, before it is queued: {hashing_us:.2f} µs a token")
    print(json.dumps({"variants": results, "hashing_us": hashing_us} | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
