"""Every mode, the same trace: start a server a mode, replay, measure, stop; then tables and figures.

./compare.sh [--modes a,b] [--numsamples N] [--lengths …] [--arrival …] [--trace F] [--seed S] [--out DIR] [any server setting]
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from client import graph, report
from client.data import (
    ARRIVALS,
    LENGTHS,
    ORDERS,
    PromptData,
    Request,
    WorkloadError,
    arrivals,
    describe,
    dumps,
    load_trace,
    save_trace,
)  # fmt: skip
from client.load import Outcome, ServerError, get, post, replay
from client.servers import ROOT, server
from config import (
    MODES,
    ONLY_IN,
    Config,
    ConfigError,
    Parser,
    add_settings,
    build,
    flag,
    from_environment,
    meaningful,
    refuse_unknown,
)
from stats import DEFINITIONS, fairness, occupancy_over_time, summarise

LOAD = 0.85  # of the capacity of dynamic: beyond what static can deliver, within what dynamic can


@dataclass(frozen=True, slots=True)
class Options:
    modes: list[str]
    numsamples: int
    lengths: str
    arrival: str
    order: str
    trace: Path | None
    seed: int
    goodput: dict[str, float]
    timeout: float
    out: Path
    flags: dict[str, Any]  # server settings, as given


def parse(argv: Sequence[str]) -> Options:
    """Parse compare.sh's command line. Raises ConfigError or WorkloadError; exits 0 after --help."""
    parser = Parser(
        prog="./compare.sh", description="Replay one trace against every batching mode.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )  # fmt: skip
    parser.add_argument("--modes", default=",".join(MODES), help="modes to compare, separated by commas (default: all)")
    parser.add_argument("--numsamples", type=int, default=300, help="requests (default: 300)")
    parser.add_argument("--lengths", default="normal", help=f"completion lengths: {LENGTHS} (default: normal)")
    parser.add_argument("--arrival", default="auto",
                        help=f"{ARRIVALS}, or auto: Poisson at {LOAD} of dynamic's capacity (default: auto)")  # fmt: skip
    parser.add_argument("--order", choices=ORDERS, default="random", help="random, or descend: longest first")
    parser.add_argument("--trace", type=Path, help="replay this trace.jsonl, at its own times unless --arrival says others")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2el")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that an answer may take (default: 3600)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: runs/DATE-TIME)")
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = {name: value for name, value in vars(known).items() if name in Config.model_fields}
    for name in ("host", "port"):
        if name in flags:
            raise ConfigError(f"{flag(name)} has no meaning here: every mode gets a free port on this machine")
    modes = known.modes.split(",")
    if len(set(modes)) < len(modes):
        raise ConfigError("--modes names a mode twice")
    for mode in modes:  # a setting of one mode alone is given to that mode alone
        build(mode, {name: value for name, value in flags.items() if meaningful(name, mode)}, from_environment(os.environ))
    for name in flags:
        if not any(meaningful(name, mode) for mode in modes):
            raise ConfigError(f"{flag(name)} has no meaning in any of the modes {', '.join(modes)}")
    if known.trace and (known.numsamples != 300 or known.lengths != "normal" or known.order != "random"):
        raise ConfigError("--trace holds the requests; leave out --numsamples, --lengths and --order")
    if known.numsamples < 1:
        raise ConfigError("--numsamples must be at least 1")
    return Options(
        modes, known.numsamples, known.lengths, known.arrival, known.order, known.trace, int(flags.get("seed", 0)),
        parse_goodput(known.goodput), known.timeout, known.out or ROOT / "runs" / f"{datetime.now():%Y%m%d-%H%M%S}", flags,
    )  # fmt: skip


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """{"ttft": 200.0} from ["ttft:200"]. Raises ConfigError."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2el"):
                raise ValueError
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {text!r}: give ttft:MS, tpot:MS or e2el:MS") from None
    return limits


def measure_capacity(url: str, config: Config, data: PromptData, timeout: float, progress: Progress) -> dict[str, Any]:
    """Tokens per second of a server while every row is busy, from a burst of three requests a row if it holds as many.

    Counted are the tokens made until the last request was admitted: after that rows fall empty.
    """
    requests = data.requests(min(3 * config.max_batch_size, config.max_in_flight), "burst")
    task = progress.add_task("capacity", total=len(requests), failed="")
    outcomes = replay(url, requests, timeout, on_outcome=lambda outcome: progress.advance(task))
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    if len(answers) < len(requests):
        error = next(outcome.error for outcome in outcomes if outcome.error)
        raise ServerError(f"the burst that measures capacity failed ({error}); name a rate with --arrival poisson:RATE")
    timings = [answer.timings for answer in answers]
    start = min(t["arrived_at"] for t in timings)
    end = max(t["arrived_at"] + t["queue_s"] for t in timings)
    made = sum(
        int(np.sum(t["arrived_at"] + t["ttft_s"] + np.cumsum([0.0, *t["itl_s"]]) <= end)) for t in timings
    )  # fmt: skip
    reached = made / (end - start)
    return {"output_throughput": reached, "requests": len(requests), "load": LOAD}


def run_mode(url: str, requests: Sequence[Request], options: Options, progress: Progress, mode: str) -> dict[str, Any]:
    """Warm a server up, replay the trace, and return MODE.json."""
    for _ in range(2):
        post(f"{url}/inference", {"prompt": "warm up", "num_tokens": 8})
    post(f"{url}/stats/reset")
    task = progress.add_task(mode, total=len(requests), failed="")
    failures = 0

    def show(outcome: Outcome) -> None:
        nonlocal failures
        failures += bool(outcome.error)
        progress.update(task, advance=1, failed=f"{failures} failed" if failures else "")

    outcomes = replay(url, requests, options.timeout, show)
    engine = get(f"{url}/stats?iterations=1", timeout_s=120)
    iterations = engine.pop("iterations")
    engine.pop("definitions")
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    result = {"mode": mode, "config": get(url)["config"]}
    result |= summarise(answers, [outcome.sent_at for outcome in outcomes], options.goodput)
    result["requested_rate"] = describe(requests)["requested_rate"]
    result |= {key: engine[key] for key in ("useful_fraction", "occupancy", "largest_batch", "live_rows", "idle_rows")}
    result["errors"] = sorted({outcome.error for outcome in outcomes if outcome.error})
    result["server"] = engine
    result["occupancy_over_time"] = occupancy_over_time(iterations, bins=400)
    result["definitions"] = DEFINITIONS
    result["requests"] = [_record(outcome) for outcome in outcomes]
    return result


def _record(outcome: Outcome) -> dict[str, Any]:
    """One request of MODE.json; the gaps between tokens stay out, they are summarised above."""
    record: dict[str, Any] = {"id": outcome.request.id, "num_tokens": outcome.request.num_tokens, "sent_at": outcome.sent_at}
    if outcome.answer is None:
        return record | {"error": outcome.error}
    record |= asdict(outcome.answer) | {"text": outcome.text}
    record["timings"] = {name: value for name, value in record["timings"].items() if name != "itl_s"}
    return record


def identical_outputs(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many of the requests that every mode answered got the same text in each, and where the others part.

    `parted_after`: for each request whose texts differ, the fraction of its longest text that all modes share.
    """
    texts = [{r["id"]: r["text"] for r in result["requests"] if "text" in r} for result in results.values()]
    common = set.intersection(*(set(t) for t in texts)) if texts else set()
    answers = [[t[i] for t in texts] for i in sorted(common)]
    different = [answer for answer in answers if len(set(answer)) > 1]
    parted = [round(_shared(answer) / max(map(len, answer)), 4) for answer in different]
    return {"requests": len(answers), "identical": len(answers) - len(different), "parted_after": parted}


def _shared(texts: Sequence[str]) -> int:
    """Characters from the start that all texts share."""
    return next((i for i, letters in enumerate(zip(*texts)) if len(set(letters)) > 1), min(map(len, texts)))


SUMMARY_KEYS = [
    "output_throughput",
    "request_throughput",
    "total_token_throughput",
    "goodput",
    "mean_e2el_ms",
    "p50_e2el_ms",
    "p99_e2el_ms",
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_normalized_latency_ms",
    "mean_queue_time_ms",
    "mean_held_time_ms",
    "useful_fraction",
    "occupancy",
    "largest_batch",
    "fairness",
    "completed",
    "failed",
    "wall_clock_s",
    "client_limited",
    "p99_schedule_lag_ms",
    "achieved_rate",
]


def compare(options: Options, console: Console) -> dict[str, Any]:
    """Run the comparison, write its folder, and return summary.json. Raises ServerError or WorkloadError."""
    environment = from_environment(os.environ)
    configs = {
        mode: build(mode, {n: v for n, v in options.flags.items() if meaningful(n, mode)}, environment)
        for mode in {*options.modes, "dynamic"}
    }
    data = PromptData(options.lengths, options.order, options.seed)
    lengths, arrival, capacity = options.lengths, options.arrival, None
    trace = load_trace(options.trace) if options.trace else None
    if arrival != "auto":  # a mistyped one is found before any server starts
        at = arrivals(arrival, len(trace or [0]), options.seed)
        trace = trace and [request.model_copy(update={"at": t}) for request, t in zip(trace, at)]
    if options.trace:
        lengths, arrival = f"as in {options.trace}", arrival if arrival != "auto" else f"as in {options.trace}"
    hardware, commit = report.hardware(), report.commit()
    if busy := report.busy_sentence(hardware):
        console.print(busy)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{mode}.json" for mode in MODES), "summary.json", "report.md"):  # of an earlier run into this folder
        (options.out / name).unlink(missing_ok=True)
    console.print(f"{len(options.modes)} modes on {configs['dynamic'].model}; results go to {options.out}")
    results: dict[str, dict[str, Any]] = {}
    requests: list[Request] = []
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("[red]{task.fields[failed]}"))  # fmt: skip
    measure_first = arrival == "auto"
    order = ["dynamic", *(mode for mode in options.modes if mode != "dynamic")] if measure_first else options.modes
    with Progress(*columns, console=console) as progress:
        for mode in order:
            with server(mode, options.flags) as url:
                if measure_first and mode == "dynamic":
                    capacity = measure_capacity(url, configs[mode], data, options.timeout, progress)
                    mean = float(np.mean([request.num_tokens for request in data.requests(options.numsamples)]))
                    arrival = f"poisson:{LOAD * capacity['output_throughput'] / mean:.4g}"
                    reached = f"{capacity['output_throughput']:,.0f} tok/s"
                    console.print(f"capacity of dynamic: {reached}; {LOAD:g} of it: --arrival {arrival}")
                if not requests:
                    requests = trace or data.requests(options.numsamples, arrival)
                    save_trace(options.out / "trace.jsonl", requests)
                if mode in options.modes:
                    results[mode] = run_mode(url, requests, options, progress, mode)
                    (options.out / f"{mode}.json").write_text(dumps(results[mode]))
    results = {mode: results[mode] for mode in options.modes}
    config = {}  # of all modes; a setting that belongs to some modes alone, from one of them
    for name, value in results[options.modes[0]]["config"].items():
        owners = [mode for mode in options.modes if meaningful(name, mode)]
        if owners and name not in ("mode", "port", "host", "log_level"):
            config[name] = results[owners[0]]["config"][name] if name in ONLY_IN else value
    summary = {
        "modes": {mode: {key: result.get(key) for key in SUMMARY_KEYS} for mode, result in results.items()},
        "identical_outputs": identical_outputs(results),
        "config": config,
        "workload": describe(requests) | {"lengths": lengths, "arrival": arrival},
        "capacity": capacity,
        "hardware": hardware,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "command": shlex.join(["./compare.sh", *sys.argv[1:]]),
        "definitions": DEFINITIONS,
    }
    (options.out / "summary.json").write_text(dumps(summary))
    _draw(options.out, results, summary)
    report.write_report(options.out, summary)
    return summary


def _draw(folder: Path, results: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    config = summary["config"]
    caption = (
        f"{config['model']}, {config['dtype']}, {summary['workload']['requests']} requests, {summary['workload']['arrival']} "
        f"· {summary['hardware']['cpu']}, {config['threads']} threads · commit {summary['commit']}"
    )
    points = {}
    for mode, result in results.items():
        answered = [r for r in result["requests"] if "text" in r]
        tokens = [r["completion_tokens"] for r in answered]
        seconds = [r["answered_at"] - r["sent_at"] for r in answered]
        points[mode] = (tokens, seconds, fairness(tokens, seconds))
    graph.latency_vs_tokens(points, folder / "latency_vs_tokens.png", caption)
    over_time = {mode: result["occupancy_over_time"] for mode, result in results.items()}
    graph.occupancy(over_time, config["max_batch_size"], folder / "occupancy.png", caption)


def main() -> None:
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop servers on SIGTERM as on Ctrl-C
    try:
        options = parse(sys.argv[1:])
        summary = compare(options, console)
    except (ConfigError, WorkloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; the servers are stopped", file=sys.stderr)
        sys.exit(130)
    console.print(report.terminal_table(summary))
    console.print(
        "Latency of a request by its completion tokens, fitted:", *report.fairness_lines(summary), sep="\n", highlight=False
    )
    console.print("\n" + report.identity_sentence(summary))
    if late := report.client_limited_sentence(summary):
        console.print(late)
    console.print(f"report.md, figures and every request: {options.out}")
    if any(result["failed"] for result in summary["modes"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
