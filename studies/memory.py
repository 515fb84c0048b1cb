"""What reserving KV blocks costs, and what taking them on demand does: virtual time, seeded.

    python -m studies.memory [--pools 8,16,32] [--loads 0.5,0.8,1,1.2] [--seeds 5] [--out DIR]

The server's own scheduler at the cost of `--model fake`. A pool is as large as so many requests of
mean length at their whole lives; a load is a share of what `whole` can complete on that pool. All
variants serve the same traces, so differences are paired by seed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from client.traces import Request
from client.workloads import Workload
from compare.report.drawing import STYLE, caption_of, looks
from compare.report.tables import formatted, markdown
from config import Config, build
from generate.fake import cost_s
from scheduling import scheduler
from scheduling.inference import Inference, Iteration
from scheduling.policies import VICTIMS
from simulate import drive
from stats import times_of
from studies.runner import Case, Cases, Study, apart, over_seeds, parser_of, shown, write

LENGTHS = "exponential:100:800"  # long tails: what a request will need nobody knows
ROWS = 64  # more than a pool holds, so that memory is what binds
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    **{victim: {"kv_reservation": "demand", "victim": victim} for victim in VICTIMS},
}
SHOWN = {  # measure: heading, format
    "rows": ("rows at once", "{:.1f}"),
    "mean_s": ("latency mean, s", "{:.2f}"),
    "p99_s": ("latency p99, s", "{:.2f}"),
    "throughput": ("tok/s", "{:,.0f}"),
    "preemptions": ("preemptions a request", "{:.2f}"),
    "tax": ("recomputed, % of computed tokens", "{:.1f}"),
}
STUDY = Study(
    "studies.memory",
    "memory",
    "KV blocks reserved, or on demand",
    "Latency and recomputed tokens over load",
)


def config_of(variant: str, n_blocks: int) -> Config:
    settings = {"model": "fake", "max_batch_size": ROWS, "kv_cache": f"{n_blocks}blocks"}
    return build("dynamic", {**settings, "max_waiting": 10**6, **VARIANTS[variant]}, {})


def serve(config: Config, requests: Sequence[Request]) -> dict[str, float]:
    """Serve a trace in virtual time: what came of it."""
    served = [Inference(r.ids, r.num_tokens) for r in requests]
    running_s = busy_s = 0.0
    computed = 0

    def cost(iteration: Iteration) -> float:
        nonlocal running_s, busy_s, computed
        seconds = cost_s(iteration)
        running_s += iteration.running * seconds
        busy_s += seconds
        computed += sum(row.n_tokens for row in iteration.rows)
        return seconds

    end = drive(scheduler.build(config), [(r.at, [i]) for r, i in zip(requests, served)], cost)
    latencies = [times_of(inference).e2e_s for inference in served]
    return {
        "rows": running_s / busy_s,
        "mean_s": statistics.mean(latencies),
        "p99_s": float(np.percentile(latencies, 99)),
        "throughput": sum(len(inference.tokens) for inference in served) / end,
        "preemptions": sum(i.interruptions.preemptions for i in served) / len(served),
        "tax": 100 * sum(i.interruptions.recomputed_tokens for i in served) / computed,
    }


def blocks_of(pool: int) -> int:
    """KV blocks of so many requests of mean length, and at least of the longest."""
    requests = Workload(LENGTHS, seed=2**31).requests(2000, "burst")
    lives = [len(r.ids) + r.num_tokens for r in requests]
    return max(round(pool * statistics.mean(lives) / 16), 1024 // 16)


def capacity(n_blocks: int, requests: int) -> float:
    """Requests a second that `whole` completes when all come at once."""
    burst = Workload(LENGTHS, seed=2**31).requests(requests, "burst", scaled=True)
    mean = statistics.mean(request.num_tokens for request in burst)
    return serve(config_of("whole", n_blocks), burst)["throughput"] / mean


def task(pool: int, load: float, variant: str, n: int, rate: float, seed: int) -> dict[str, float]:
    requests = Workload(LENGTHS, seed=seed).requests(n, f"poisson:{load * rate:g}", scaled=True)
    return serve(config_of(variant, blocks_of(pool)), requests)


def study(
    pools: Sequence[int], loads: Sequence[float], seeds: int, n: int, processes: int
) -> list[dict[str, Any]]:
    """Of each pool, load and variant what every seed's trace came to."""
    cases = list(itertools.product(pools, loads, VARIANTS))
    with multiprocessing.Pool(processes) as workers:
        rates = dict(zip(pools, workers.starmap(capacity, [(blocks_of(p), 4 * n) for p in pools])))
        tasks = [(pool, load, variant, n, rates[pool]) for pool, load, variant in cases]
        results = over_seeds(workers, task, tasks, seeds)
    return [
        {
            "pool": pool,
            "kv_blocks": blocks_of(pool),
            "load": load,
            "rate": load * rates[pool],
            "variant": variant,
            "seeds": of_seeds,
        }
        for (pool, load, variant), of_seeds in zip(cases, results)
    ]


def table(found: Cases) -> str:
    """Means over seeds with their intervals, and paired differences: of latency to `whole`, of
    what is recomputed to `newest`.
    """
    headings = [heading for heading, _ in SHOWN.values()]
    rows = [["pool", "load", "variant", *headings, "latency − whole's", "recomputed − newest's"]]
    for case in found:
        same = {c["variant"]: c for c in found if (c["pool"], c["load"]) == place(case)}
        cells = [formatted(shown(case, m), form) for m, (_, form) in SHOWN.items()]
        name = case["variant"]
        to_whole = (
            "–" if name == "whole" else apart(same["whole"], case, "mean_s", SHOWN["mean_s"][1])
        )
        to_newest = (
            "–"
            if name in ("whole", "newest")
            else apart(same["newest"], case, "tax", SHOWN["tax"][1])
        )
        rows.append([str(case["pool"]), f"{case['load']:g}", name, *cells, to_whole, to_newest])
    return markdown(rows, left=3)


def place(case: Case) -> tuple[int, float]:
    return case["pool"], case["load"]


def figure(found: Cases, caption: str) -> Figure:
    """Latency, and the tax, over load: a column a pool."""
    pools = list(dict.fromkeys(case["pool"] for case in found))
    look = looks(["dynamic", "static", "windowed", "nobatch"])
    colours = dict(zip(VARIANTS, look.values()))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(4.2 * len(pools), 7), layout="constrained")
        axes = drawn.subplots(2, len(pools), sharex=True, sharey="row", squeeze=False)
        for column, pool in enumerate(pools):
            for variant, its in colours.items():
                mine = [c for c in found if c["pool"] == pool and c["variant"] == variant]
                loads = [100 * case["load"] for case in mine]
                for axis, measure in zip(axes[:, column], ("mean_s", "tax")):
                    known = [shown(case, measure) for case in mine]
                    axis.errorbar(
                        loads,
                        [each.mean for each in known],
                        [each.half or 0.0 for each in known],
                        color=its.colour,
                        ls=its.line,
                        marker=its.marker,
                        capsize=3,
                        label=variant if variant == "whole" else f"demand, {variant}",
                    )
            axes[0, column].set_title(f"a pool of {pool} mean requests")
            axes[1, column].set_xlabel("load, % of what whole completes")
            for axis in axes[:, column]:
                axis.grid(alpha=0.25)
                axis.set_ylim(bottom=0)
        axes[0, 0].set_ylabel("mean latency, s")
        axes[1, 0].set_ylabel("recomputed tokens, %")
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        caption_of(drawn, caption)
    return drawn


def main() -> None:
    parser = parser_of(
        STUDY, "What reserving KV blocks costs, and what taking them on demand does."
    )
    parser.add_argument("--pools", default="8,16,32", help="in requests (default: 8,16,32)")
    parser.add_argument("--loads", default="0.5,0.8,1,1.2", help="default: 0.5,0.8,1,1.2")
    parser.add_argument("--requests", type=int, default=400, help="of a trace (default: 400)")
    options = parser.parse_args()
    pools = [int(pool) for pool in options.pools.split(",")]
    loads = [float(load) for load in options.loads.split(",")]
    found = study(pools, loads, options.seeds, options.requests, options.processes)
    n = f"{options.requests} requests of lengths {LENGTHS}, {options.seeds} seeds"
    told_of = f"{n}, at most {ROWS} rows; virtual time at the cost of --model fake"
    result = {"cases": found, "variants": VARIANTS, "lengths": LENGTHS}
    write(STUDY, options.out, told_of, table(found), figure(found, told_of), result)


if __name__ == "__main__":
    main()
