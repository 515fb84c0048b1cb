"""How far a sweep's capacity is from the truth: sweeps in virtual time, against an endless queue.

    python -m studies.capacity [--seeds 12] [--modes nobatch,dynamic] [--processes 2]

A sweep's own traces, search, verdict and estimate, on the real scheduler and policies; an iteration
takes what the fake engine's does, and nothing else takes time. The truth: requests completed a
second while 20,000 are served. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from client.machine import stamp
from client.outcomes import Outcome
from client.traces import Request
from client.workloads import Workload
from compare import sweep
from compare.measure import burst_size, judged
from compare.options import SWEEP_GOODPUT, parse_goodput
from compare.report.tables import between
from config import MODES, Config, build
from generate.fake import cost_s
from scheduling import scheduler
from scheduling.inference import Inference
from simulate import drive
from stats import Answer, times_of

LENGTHS, ARRIVAL = "normal", "poisson:1"  # a comparison's own defaults
LIMITS = parse_goodput(SWEEP_GOODPUT)


def serve(config: Config, requests: Sequence[Request]) -> list[Inference]:
    """Serve a trace in virtual time to its end; of each request its inference."""
    served = [Inference(request.ids, request.num_tokens) for request in requests]
    drive(scheduler.build(config), [(r.at, [i]) for r, i in zip(requests, served)], cost_s)
    return served


def outcome(request: Request, inference: Inference) -> Outcome:
    """What a client without any delay sees."""
    if inference.error is not None:
        return Outcome(request, request.at, request.at, request.at, error="429")
    times = times_of(inference)
    timings = {
        "arrived_at": times.started_at,
        "queue_s": times.queue_s,
        "ttft_s": times.ttft_s,
        "held_s": times.held_s,
        "itl_s": times.itl_s,
    }
    answer = Answer(
        request.id,
        request.at,
        request.at,
        times.token_times[0],
        times.token_times[-1],
        times.answered_at,
        len(inference.prompt_ids),
        len(inference.tokens),
        times.itl_s,
        timings,
    )
    return Outcome(request, request.at, request.at, times.answered_at, answer)


def true_capacity(config: Config, n: int) -> float:
    """Requests completed a second until the last of n, which all came at once, is admitted."""
    requests = Workload(LENGTHS, seed=2**31).requests(n, "burst", scaled=True)
    served = serve(config.model_copy(update={"max_waiting": n}), requests)
    times = [times_of(inference) for inference in served]
    end = max(t.admitted_at for t in times)
    return sum(t.answered_at <= end for t in times) / end


def one_sweep(config: Config, seed: int) -> dict[str, Any]:
    """What a sweep of one seed finds, and the seconds that it would take."""
    points: list[sweep.Point] = []
    seconds = 0.0

    def replay(what: str, requests: Sequence[Request]) -> dict[str, Any]:
        nonlocal seconds
        served = serve(config, requests)
        result = judged(requests, [outcome(r, i) for r, i in zip(requests, served)], LIMITS)
        seconds += result["wall_clock_s"]
        return result

    sweep.sweep(
        replay, Workload(LENGTHS, seed=seed), ARRIVAL, burst_size(config), None, points.append
    )
    found = sweep.outcome(points)
    kept = (
        "rate",
        "completed",
        "growth",
        "growth_in_flight",
        "saturated",
        "busy_s",
        "busy_throughput",
        "attainment",
    )
    return {
        "seed": seed,
        "seconds": seconds,
        **{key: value for key, value in found.items() if key != "point"},
        "points": [
            {key: point[key] for key in kept}
            for point in sorted(points, key=lambda p: float(p["rate"]))
        ],
    }


def task(mode: str, seed: int | None, n: int) -> Any:
    """The truth of a mode, or what the sweep of a seed finds."""
    config = build(mode, {"model": "fake"}, {})
    return true_capacity(config, n) if seed is None else one_sweep(config, seed)


def study(modes: Sequence[str], seeds: int, requests: int, processes: int) -> dict[str, Any]:
    """Of each mode its true capacity, what every seed's sweep found, and found / true."""
    tasks = [(mode, seed, requests) for mode in modes for seed in (None, *range(seeds))]
    if processes == 1:
        results = [task(*each) for each in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            results = pool.starmap(task, tasks, chunksize=1)
    study: dict[str, Any] = {}
    for mode, true, *sweeps in zip(modes, *(results[i :: seeds + 1] for i in range(seeds + 1))):
        ratios = [found["capacity"] / true for found in sweeps]
        study[mode] = {"true": true, "found_to_true": ratios, "sweeps": sweeps}
    return study


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.capacity",
        description="How far a sweep's capacity is from the truth, in virtual time.",
    )
    parser.add_argument("--seeds", type=int, default=12, help="sweeps of each mode (default: 12)")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="separated by commas (default: all)"
    )
    parser.add_argument(
        "--requests", type=int, default=20_000, help="of the truth (default: 20000)"
    )
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    options = parser.parse_args()
    found = study(options.modes.split(","), options.seeds, options.requests, options.processes)
    print(
        "mode      true, 1/s  found / true (least to most)  the queue begins to grow  rates  "
        "a sweep takes, s"
    )
    for mode, of in found.items():
        ratios, sweeps = of["found_to_true"], of["sweeps"]
        print(
            f"{mode:9} {of['true']:9.3f}  "
            f"{statistics.mean(ratios):12.3f} ({min(ratios):.3f} to {max(ratios):.3f})  "
            f"{between(sweeps, 'sustained_rate', 'saturated_rate'):>24}  "
            f"{statistics.mean(len(each['points']) for each in sweeps):5.1f}  "
            f"{statistics.mean(each['seconds'] for each in sweeps):16.0f}"
        )
    print(
        json.dumps(
            {"command": shlex.join(["python", "-m", *sys.orig_argv[2:]]), "modes": found} | stamp()
        )
    )


if __name__ == "__main__":
    main()
