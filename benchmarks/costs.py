"""What an iteration costs on this machine: results/costs/NAME.json, by which a simulation reckons.

    python -m benchmarks.costs --model demo [--name NAME] [--more] [any setting of the engine]

A real server is asked for many kinds of iterations, and what it tells of them is fitted: every
number of rows with contexts up to the longest, chunks of prompts alone and beside rows that decode.
Rounds of this traffic are as short as they can be and take turns with other traffic, which is not
fitted but held against the fit: the speed of a shared machine changes by the minute. Writes the
costs with the residuals of both, and a figure of them. Give the server's own defaults two minutes
for `demo`, and three for GPT-2 on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures
from benchmarks.calibration import Driven, Round, Segment, at_once, keep, kept, served
from benchmarks.common import PREFIXES, any_configs, record, run
from benchmarks.fitting import Observed, fit, ratios, residuals, whole
from client.machine import processor
from compare.report import drawing
from compare.servers import server
from config import ONLY_IN, ONLY_OVER_HTTP, Config, ConfigError, Parser
from simulate import PS
from simulate.costs import FAKE, FOLDER, Costs, Line, save

UNUSED = PREFIXES | {"mode", "loop_interval_ms", *ONLY_IN, *ONLY_OVER_HTTP}  # one schedule is asked


def of_http(costs: Costs, segments: Sequence[Segment]) -> Costs:
    """With what a request takes between client and scheduler while others come and go, medians;
    and how far apart requests and answers are that are sent at once.
    """
    served = [each for segment in segments if segment.rate for each in segment.served]
    request = statistics.median(each.arrived_at - each.sent_at for each in served)
    answer = statistics.median(each.received_at - each.answered_at for each in served)
    coming, going = turns(segments)
    return replace(
        costs,
        request=max(0, round(request * PS)),
        answer=max(0, round(answer * PS)),
        request_turn=round(coming * PS),
        answer_turn=round(going * PS),
    )


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
            answers: dict[int, list[float]] = {}
            for each in segment.served:
                answers.setdefault(bisect_left(begun, each.answered_at), []).append(
                    each.received_at
                )
            going += answers.values()
    return _apart(coming), _apart(going)


def _apart(bursts: Sequence[Sequence[float]]) -> float:
    """Median of the mean steps, of those bursts that are at least half as large as the largest."""
    most = max(map(len, bursts), default=0)
    large = [times for times in bursts if len(times) >= max(2, most / 2)]
    steps = [(max(times) - min(times)) / (len(times) - 1) for times in large]
    return statistics.median(steps) if steps else 0.0


def measure(config: Config, name: str, rounds: Sequence[Round]) -> tuple[Costs, dict[str, Any]]:
    """The costs by all rounds, and what a figure of them shows."""
    fitted, held_out = ([each for some in sides for each in some] for sides in zip(*rounds))
    plain, other, streams = (
        [each.observed for each in segments if each.streamed is streamed]
        for segments, streamed in ((fitted, False), (held_out, False), (held_out, True))
    )
    everything = [each for segment in fitted for each in segment.observed]
    mixed = [each.observed for each in fitted if (each.users or each.rate) and not each.streamed]
    costs = of_http(fit(name, everything, at_once(config), mixed), fitted)
    found = {
        "fitted": residuals(costs, plain),
        "held_out": residuals(costs, other),
        "held_out_streams": whole(costs, streams),
    }
    shown = {"fitted": points(costs, plain), "held out": points(costs, other)}
    return replace(costs, source={"residuals": found, "rounds": len(rounds)}), shown


def points(costs: Costs, runs: Sequence[Sequence[Observed]]) -> dict[str, np.ndarray]:
    """Of the iterations beside which nothing happened."""
    calm = [each for observed in runs for each in observed if each.calm]
    return {
        "rows": np.array([each.rows for each in calm]),
        "seconds": np.array([each.seconds for each in calm]),
        "ratio": ratios(costs, calm),
        "decodes": np.array([each.decodes for each in calm]),
    }


def show(costs: Costs) -> None:
    def in_microseconds(line: Line) -> str:
        terms = {
            "iteration": line.iteration, "a row": line.row, "a position of context": line.context,
            "a prefill token": line.prefill, "a position of its context": line.chunk_context,
        }  # fmt: skip
        return ", ".join(f"{what} {value / 1e6:,.4g} µs" for what, value in terms.items() if value)

    print(f"an iteration: {in_microseconds(costs.line)}")
    for n, line in costs.decode.items():
        print(f"decode rows alone, {n}: {in_microseconds(line)}")
    for what, value in (
        ("between iterations", costs.gap),
        ("and a row", costs.gap_row),
        ("and a request that it answers", costs.gap_answer),
        ("and so much less of it a row", costs.gap_answer_row),
        ("for streams", costs.gap_stream),
        ("and each of them", costs.gap_stream_row),
        ("from client to iteration", costs.request),
        ("from iteration to client", costs.answer),
        ("from one request to the next, of many at once", costs.request_turn),
        ("from one answer to the next, of many at once", costs.answer_turn),
    ):
        print(f"{what}: {value / 1e6:,.0f} µs")
    for what, found in costs.source["residuals"].items():
        low, middle, high = found["of_runs_percent"]
        print(
            f"{what}: all time {found['whole_percent']:+.1f}%; of runs {low:+.1f}%, "
            f"{middle:+.1f}%, {high:+.1f}%"
        )
        if found.get("calm"):
            print(
                f"    of {found['calm']:,} iterations 90% within {found['p5_percent']:+.1f}% and "
                f"{found['p95_percent']:+.1f}%, median {found['p50_percent']:+.1f}%, mean |error| "
                f"{found['mean_absolute_percent']:.1f}%"
            )


def name_of(config: Config) -> str:
    return "fake-server" if config.model == FAKE.name else Path(config.model).name


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.costs",
        description="What an iteration costs on this machine, for simulations: about two minutes "
        "for demo and fake, three for GPT-2 on a CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", help="of the costs (default: the model's; fake: fake-server)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90,
        help="after which no round begins; one always does (default: 90)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")
    parser.add_argument(
        "--more",
        action="store_true",
        help="fit the rounds of the calls before, too: a shared machine's speed changes with time",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: results/costs")
    options, [config] = any_configs(parser, sys.argv[1:], lambda known: ["dynamic"], UNUSED)
    name = options.name or name_of(config)
    if name == FAKE.name:
        raise ConfigError(f"{name} are the costs that need no file; give another --name")
    flags = {key: value for key, value in vars(options).items() if key in Config.model_fields}
    with server("dynamic", flags) as url:
        driven = Driven(url)
        rounds = kept(name, driven.config) if options.more else []
        rounds += served(driven, options.seconds, options.seed + len(rounds))
    keep(name, driven.config, rounds)
    costs, shown = measure(driven.config, name, rounds)
    show(costs)
    made = record([config], UNUSED)
    used = driven.config.model_dump(mode="json")
    source = {
        "processor": processor(made["hardware"], used),
        "n_blocks": driven.n_blocks,
        "block_bytes": driven.config.block_bytes,
        **costs.source,
        **made,
        "config": used,
    }
    save(replace(costs, source=source), options.out / f"{name}.json")
    caption = f"{name} · {source['processor']} · commit {made['commit']}, {made['date'][:10]}"
    drawing.save(figures.costs(shown, caption), options.out / f"{name}.png")
    print(f"{options.out / name}.json, and .png")


if __name__ == "__main__":
    run(main)
