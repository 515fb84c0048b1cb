"""Costs of an iteration on this machine: results/costs/NAME.json, which simulations use.

    python -m lab.benchmarks.costs --model demo [--name NAME] [--more] [any setting of the engine]

A real server gets many kinds of iterations, and what it reports of them is fitted: every number of
rows with contexts up to the longest, chunks of prompts alone and beside rows that decode. Rounds of
this traffic are as short as they can be and take turns with other traffic, which is held out of
the fit: the speed of a shared machine changes by the minute. Writes the costs with the
residuals of both. Takes two minutes for `demo`, and three for GPT-2 on a CPU.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from client.machine import processor
from compare.servers import server
from config import ONLY_IN, ONLY_OVER_HTTP, ConfigError
from lab.benchmarks.calibration import Rounds, Segment, TrafficServer, at_once, keep, kept, measure
from lab.benchmarks.fitting import Served, fit, observe, residuals
from lab.benchmarks.harness import PREFIXES, Benchmark, chosen_settings, run
from simulate import PS
from simulate.costs import FOLDER, HTTP, STATED, Costs, save

BENCHMARK = Benchmark(
    "costs",
    __doc__,
    {
        "--name": (str, "name of the costs, if not the model's (fake: fake-server)"),
        "--seconds": (90.0, "seconds after which no new round begins; one is always run"),
        "--seed": (0, "seed of the traffic"),
        "--more": (False, "fit the rounds of earlier calls, too: a machine's speed changes"),
        "--out": (FOLDER, "folder"),
    },
    # one schedule is fitted: of `dynamic`, with blocks whole or on demand
    PREFIXES
    | {"mode", "loop_interval_ms", "ahead", *ONLY_IN, *ONLY_OVER_HTTP} - {"kv_reservation"},
)


def fitted(name: str, rounds: Rounds) -> Costs:
    """The costs by all rounds, with the residuals."""
    config = rounds.config
    runs = [(run, observe(config, run.served, run.iterations)) for run in rounds.segments]
    train = [(run, observed) for run, observed in runs if not run.held_out]
    mixed = [observed for run, observed in train if run.arrivals != "burst" and not run.streamed]
    everything = [each for _, observed in train for each in observed]
    costs = fit(name, everything, at_once(config), mixed)
    costs = replace(costs, **http([run for run, _ in train]))
    parts = {"fitted": (False, False), "held_out": (True, False), "held_out_streams": (True, True)}
    errors = {
        part: residuals(costs, [seen for run, seen in runs if (run.held_out, run.streamed) == kind])
        for part, kind in parts.items()
    }
    return replace(costs, source={"residuals": errors, "rounds": rounds.number})


def http(segments: Sequence[Segment]) -> dict[str, Any]:
    """Medians of a request's time between client and scheduler while others come and go, and of
    the time between requests and answers that are sent at once.
    """
    served = [each for part in segments if part.arrivals == "poisson" for each in part.served]
    times = (*http_seconds(served), *turns(segments))
    return {name: max(0, round(seconds * PS)) for name, seconds in zip(HTTP, times)}


def http_seconds(served: Sequence[Served]) -> tuple[float, float]:
    """Return the medians of a request's seconds to the scheduler, and of its answer's back."""
    return (
        statistics.median(each.arrived_at - each.sent_at for each in served),
        statistics.median(each.received_at - each.answered_at for each in served),
    )


def turns(segments: Sequence[Segment]) -> tuple[float, float]:
    """Seconds from a request's arrival to the next one's, of many that were sent at once, and from
    an answer's to the next one's, of many that an iteration had.
    """
    coming: list[list[float]] = []
    going: list[list[float]] = []
    for segment in segments:
        if segment.arrivals == "burst" and not segment.streamed:
            coming.append([each.arrived_at for each in segment.served])
            begun = [started_at for started_at, *_ in segment.iterations]
            answers = defaultdict(list)
            for each in segment.served:
                answers[bisect_left(begun, each.answered_at)].append(each.received_at)
            going += answers.values()
    return _apart(coming), _apart(going)


def _apart(bursts: Sequence[Sequence[float]]) -> float:
    """Median of the mean steps, of those bursts that are at least half as large as the largest."""
    most = max(map(len, bursts), default=0)
    large = [times for times in bursts if len(times) >= max(2, most / 2)]
    steps = [(max(times) - min(times)) / (len(times) - 1) for times in large]
    return statistics.median(steps) if steps else 0.0


def main() -> None:
    options, [config] = BENCHMARK.configs()
    model = Path(config.model).name
    name = options.name or {"fake": "fake-server"}.get(model, model)
    if name in STATED:
        raise ConfigError(f"{name} are the costs that need no file; give another --name")
    with server("dynamic", chosen_settings(options)) as url:
        traffic = TrafficServer(url)
        rounds = kept(name, traffic.config) if options.more else Rounds(config=traffic.config)
        for segments in measure(traffic, options.seconds, options.seed + rounds.number):
            rounds.segments.extend(segments)
            rounds.number += 1
    costs = fitted(name, rounds)
    keep(name, rounds)
    for part, errors in costs.source["residuals"].items():
        print(f"{part}: " + ", ".join(f"{key} {np.round(n, 1)}" for key, n in errors.items()))
    record = BENCHMARK.record([config])
    settings = traffic.config.model_dump(mode="json")
    source = {
        "processor": processor(record["hardware"], settings),
        "n_blocks": traffic.n_blocks,
        "block_bytes": traffic.config.block_bytes,
        **costs.source,
        **record,
        "config": settings,
    }
    save(replace(costs, source=source), options.out / f"{name}.json")
    print(f"{options.out / name}.json")


if __name__ == "__main__":
    run(main)
