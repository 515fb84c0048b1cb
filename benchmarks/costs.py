"""What an iteration costs on this machine: results/costs/NAME.json, from which simulations reckon.

    python -m benchmarks.costs --model demo [--name NAME] [--more] [any setting of the engine]

A real server gets many kinds of iterations, and what it reports of them is fitted: every number of
rows with contexts up to the longest, chunks of prompts alone and beside rows that decode. Rounds of
this traffic are as short as they can be and take turns with other traffic, which is not fitted but
held against the fit: the speed of a shared machine changes by the minute. Writes the costs with the
residuals of both. Takes two minutes for `demo`, and three for GPT-2 on a CPU.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.calibration import Round, Segment, TrafficServer, at_once, keep, kept, served
from benchmarks.fitting import fit, residuals
from benchmarks.harness import PREFIXES, Benchmark, chosen_settings, run
from compare.machine import processor
from compare.servers import server
from config import ONLY_IN, ONLY_OVER_HTTP, Config, ConfigError
from simulate import PS
from simulate.costs import FAKE, FOLDER, Costs, save

AROUND = ("gap", "gap_row", "gap_answer", "gap_answer_row", "gap_stream", "gap_stream_row",
          "request", "answer", "request_turn", "answer_turn")  # fmt: skip
BENCHMARK = Benchmark(
    "costs",
    "What an iteration costs on this machine, for simulations: about two minutes for demo and "
    "fake, three for GPT-2 on a CPU.",
    {
        "--name": (str, "of the costs, if not the model's (fake: fake-server)"),
        "--seconds": (90.0, "after which no round begins; one always does"),
        "--seed": (0, "of the traffic"),
        "--more": (False, "fit the rounds of the calls before, too: a machine's speed changes"),
        "--out": (FOLDER, "folder"),
    },
    PREFIXES | {"mode", "loop_interval_ms", *ONLY_IN, *ONLY_OVER_HTTP},  # one schedule is fitted
)


def with_http(costs: Costs, segments: Sequence[Segment]) -> Costs:
    """Add the medians of a request's time between client and scheduler while others come and go,
    and of the time between requests and answers that are sent at once.
    """
    served = [each for segment in segments if segment.rate for each in segment.served]
    request = statistics.median(each.arrived_at - each.sent_at for each in served)
    answer = statistics.median(each.received_at - each.answered_at for each in served)
    times = (max(0, round(each * PS)) for each in (request, answer, *turns(segments)))
    names = ("request", "answer", "request_turn", "answer_turn")
    return replace(costs, **dict[str, Any](zip(names, times)))


def turns(segments: Sequence[Segment]) -> tuple[float, float]:
    """Seconds from a request's arrival to the next one's, of many that were sent at once, and from
    an answer's to the next one's, of many that an iteration had.
    """
    coming: list[list[float]] = []
    going: list[list[float]] = []
    for segment in segments:
        if segment.users is None and segment.rate is None and not segment.streamed:
            coming.append([each.arrived_at for each in segment.served])
            begun = [each.started_at for each in segment.observed]
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


def fitted(config: Config, name: str, rounds: Sequence[Round]) -> Costs:
    """The costs by all rounds, with the residuals."""
    train, test = ([each for some in sides for each in some] for sides in zip(*rounds))
    everything = [each for segment in train for each in segment.observed]
    mixed = [each.observed for each in train if (each.users or each.rate) and not each.streamed]
    costs = with_http(fit(name, everything, at_once(config), mixed), train)
    found = {
        name: residuals(costs, [each.observed for each in segments if each.streamed == streamed])
        for name, segments, streamed in (
            ("fitted", train, False),
            ("held_out", test, False),
            ("held_out_streams", test, True),
        )
    }
    return replace(costs, source={"residuals": found, "rounds": len(rounds)})


def show(costs: Costs) -> None:
    """Print the costs under the names that simulate/costs.py explains, and the residuals."""
    decode = [(f"decode {n}", line) for n, line in costs.decode.items()]
    for name, line in [("line", costs.line), *decode]:
        terms = {term: value for term, value in asdict(line).items() if value}
        print(f"{name}: " + ", ".join(f"{t} {value / 1e6:,.4g} µs" for t, value in terms.items()))
    for name in AROUND:
        print(f"{name}: {getattr(costs, name) / 1e6:,.0f} µs")
    for name, found in costs.source["residuals"].items():
        low, middle, high = found["of_runs_percent"]
        print(
            f"{name}: all time {found['whole_percent']:+.1f}%; of runs {low:+.1f}%, "
            f"{middle:+.1f}%, {high:+.1f}%"
        )
        if found["calm"]:
            print(
                f"    of {found['calm']:,} iterations 90% within {found['p5_percent']:+.1f}% and "
                f"{found['p95_percent']:+.1f}%, median {found['p50_percent']:+.1f}%, mean |error| "
                f"{found['mean_absolute_percent']:.1f}%"
            )


def main() -> None:
    options, [config] = BENCHMARK.configs()
    name = options.name or Path(config.model).name
    if name == FAKE.name:
        if options.name:
            raise ConfigError(f"{name} are the costs that need no file; give another --name")
        name = "fake-server"
    with server("dynamic", chosen_settings(options)) as url:
        traffic = TrafficServer(url)
        rounds = kept(name, traffic.config) if options.more else []
        rounds += served(traffic, options.seconds, options.seed + len(rounds))
    keep(name, traffic.config, rounds)
    costs = fitted(traffic.config, name, rounds)
    show(costs)
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
    options.out.mkdir(parents=True, exist_ok=True)
    save(replace(costs, source=source), options.out / f"{name}.json")
    print(f"{options.out / name}.json")


if __name__ == "__main__":
    run(main)
