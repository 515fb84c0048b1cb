"""Reports of saved runs, made from their JSON alone: report.md with figures as PNG, and report.html
in one file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from client import drawing
from client.groups import described
from client.machine import processor, save_json
from client.quoting import code, escape
from client.runs import FIGURES, LIVE, Run, differing
from client.summary import latency_line
from compare import calibrate, sweep
from compare.analysis import ATTAINMENT, GROWTH, Estimate
from compare.report import by_group, figures, replicas, sentences, tables
from compare.report.page import as_page
from config import NOT_SIMULATED
from stats import DEFINITIONS, LIMITED, ROW_KINDS, Times

Drawing = Callable[[], Figure]
# of a workload, where given
SHOWN = (
    "lengths", "prompts", "prefixes", "sessions", "priorities", "slo_mix", "adapters", "scale",
)  # fmt: skip
RATES = (
    "A variant's capacity is what it completed while requests were always waiting, at all rates "
    "beyond it: tokens a second over the mean tokens of a request. Its queue begins to grow "
    "between two rates 9% apart: at the second, each second of sending adds over "
    f"{GROWTH:g} s to the wait for the first token, over {100 * GROWTH:g}% of what is sent stays "
    f"in flight, or over {100 * sweep.LOST:g}% of requests fail. Near the capacity "
    "chance decides whether the queue grows, so the capacity need not lie between these rates."
)


def drawings(run: Run) -> dict[str, Drawing]:
    """Return the figures that a run has: a name, and a function that draws it."""
    load, limits, first = run.first["workload"], _limits(run), run.results[0]
    sent = [summary["workload"]["requests"] for summary in run.summaries]
    requests = f"{sum(sent):,} requests" + (f" in {len(sent)} seeds" if len(sent) > 1 else "")
    caption = of_points = _caption(run, f"{requests}, {load['arrival']}")
    if sample := sentences.sample(run):
        of_points = _caption(run, f"{sample:,} of {requests}, {load['arrival']}")
    of_one = _caption(run, f"{sent[0]:,} requests, {load['arrival']}, seed {run.first['seed']}")

    lines, distributed = {}, {}
    for name in run.names:
        answered = run.answered(name)
        tokens = [r["completion_tokens"] for r in answered]
        seconds = [r["answered_at"] - r["sent_at"] for r in answered]
        lines[name] = (tokens, seconds, latency_line(tokens, seconds))
        distributed[name] = distributions(answered)
    drawn: dict[str, Drawing] = {
        "latency_vs_tokens": partial(figures.latency_vs_tokens, lines, of_points),
        "by_group": partial(by_group.figure, run.variants, caption),
        "distributions": partial(figures.distributions, distributed, of_points),
    }
    if points := run.points:
        n = sum(len(rates) for seeds in points.values() for rates in seeds)
        of_rates = _caption(run, f"{n} rates, lengths {load['lengths']}")
        drawn["latency_vs_throughput"] = partial(figures.latency_vs_throughput, points, of_rates)
        if limits:
            drawn["goodput"] = partial(figures.goodput, points, limits, of_rates)
    ours = {name: r for name, r in first.items() if r.get("config")}
    over_time = {name: o for name, r in ours.items() if (o := r["occupancy_over_time"])["live"]}
    if over_time:
        rows = max(r["config"]["max_batch_size"] * replicas.number(r) for r in ours.values())
        whole = {name: not r["partial"] for name, r in first.items()}
        drawn["occupancy"] = partial(figures.occupancy, over_time, whole, rows, of_one)
        seeds_of = {name: run.variants[name] for name in ours}
        computed = {
            name: {kind: sum(r.get(f"{kind}_rows") or 0 for r in seeds) for kind in ROW_KINDS}
            for name, seeds in seeds_of.items()
        }
        expected = {name: run.variants[name][0]["expected_useful_fraction"] for name in computed}
        drawn["rows"] = partial(figures.computed_rows, computed, expected, caption)
    if changes := replicas.changes(run):
        ends_s = {name: first[name]["wall_clock_s"] for name in changes}
        drawn["replicas"] = partial(figures.replicas, changes, ends_s, of_one)
    return drawn


def distributions(answered: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return `latencies` of answered requests."""
    names = ("sent_at", "first_token_at", "last_token_at", "answered_at", "completion_tokens")
    return latencies(*(np.array([r[name] for r in answered]) for name in names))


def latencies(start: Any, first: Any, last: Any, end: Any, tokens: Any) -> dict[str, np.ndarray]:
    """Return TTFT, TPOT and latency by stamps, in seconds; NaN where undefined."""
    times = Times(start, np.nan, first, last, end, tokens)
    return {measure.name: measure.of(times) for measure in LIMITED.values()}


def _caption(run: Run, what: str) -> str:
    config, simulated = run.first["config"], run.first.get("simulated")
    model = f"{config['model']}, {config['dtype']}, " if config else ""
    by = processor(run.first["hardware"], config)
    if simulated:
        by = f"simulated, costs {simulated['costs']}"
    if deployed := sentences.deployed(run.first):
        what += f", {deployed}"
    return f"{model}{what} · {by} · commit {run.first['commit']}"


def _limits(run: Run) -> str:
    return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in run.first["goodput"].items())


def sweep_part(run: Run, figure: Sequence[str]) -> list[str]:
    """Return the section on rates: capacities, and how they are determined; empty without one."""
    outcomes = {}
    for name, seeds in run.points.items():
        finished = all(name in summary["swept"] for summary in run.summaries)
        outcomes[name if finished else f"{name} (partial)"] = [sweep.outcome(s) for s in seeds]
    limits, text = _limits(run), RATES
    if limits:
        text += f" A rate is within the limits when {ATTAINMENT:.0%} of its requests have {limits}."
    table = tables.capacity_table(outcomes, bool(limits))
    return ["## From light load to beyond capacity", text, table, *figure] if outcomes else []


def marked(run: Run) -> str:
    """Return the remark that follows the names of a simulated run."""
    if not (facts := run.first.get("simulated")):
        return ""
    return " (simulated, estimated)" if facts.get("estimate") else " (simulated)"


def facts(run: Run) -> list[str]:
    """Return workload, settings, hardware, client, commit, date and command of a run."""
    summary = run.first
    load, hardware, config = summary["workload"], summary["hardware"], summary["config"]
    given = [f"{name} {code(str(load[name]))}" for name in SHOWN if load.get(name)]
    given.append(f"arrival {code(load['arrival'])}")
    if capacity := summary["capacity"]:
        given[-1] += (
            f": {capacity['load']:g} of the {capacity['output_throughput']:,.0f} tok/s that a "
            f"burst of {capacity['requests']} requests reached in {code(capacity['of'])} while "
            f"every row was busy"
        )
    seeds = ", ".join(str(s["seed"]) for s in run.summaries)
    where = "`trace.jsonl`" if load.get("saved", True) else "not saved: its flags draw it again"
    lines = [f"workload: {escape(described(load))}; {', '.join(given)}; seed {seeds} ({where})"]
    if config:
        apart = differing(run.results[0])
        left_out = {key for settings in apart.values() for key in settings}
        left_out |= NOT_SIMULATED if summary.get("simulated") else set()
        common = {k: v for k, v in config.items() if k not in left_out and v is not None}
        lines.append(f"settings: {_settings(common)}")
        for name, settings in apart.items():
            mode, own = settings.pop("mode"), _settings(settings)
            if own or name != mode:
                lines.append(f"{name}: {', '.join(filter(None, (mode, own)))}")
    lines += [
        f"{name}: {escape(url)}, through OpenAI's API as a stream; its engine and hardware are not "
        f"known here"
        for name, url in summary["also"].items()
    ]
    whose = "hardware" if summary["started_here"] else "the client's hardware"
    whose = "simulated on" if summary.get("simulated") else whose
    gpu = f"{escape(hardware['gpu'])}; " if hardware.get("gpu") else ""
    lines.append(
        f"{whose}: {gpu}{escape(hardware['cpu'])}, {hardware['cores']} cores, "
        f"{hardware['memory_gb']:.0f} GB; {hardware['system']}; Python {hardware['python']}, "
        f"torch {hardware['torch']}"
    )
    if not summary.get("simulated"):
        lines.append(f"client: {calibrate.sentence(summary['calibration'])}")
    return [*lines, f"commit {summary['commit']}, {summary['date']}, {code(summary['command'])}"]


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {tables.setting(value)}" for name, value in settings.items())


def contents(run: Run) -> str:
    """Return the text of report.md."""
    drawn, config = drawings(run), run.first["config"]

    def shown(*names: str) -> list[str]:
        return [f"![{FIGURES[name]}]({name}.png)" for name in names if name in drawn]

    model = f" on {escape(config['model'])}" if config else ""
    several = len(run.summaries) > 1 and len(run.names) > 1
    seeds = [(summary["seed"], summary["sweep"]) for summary in run.summaries if run.points]
    return document([
        f"# {', '.join(run.names)}{model}{marked(run)}",
        tables.headlines(run.variants, marked(run)), " ".join(sentences.sentences(run)),
        tables.differences_table(run.variants, run.baseline) if several else "",
        sentences.conditions(run), *shown("latency_vs_tokens"),
        *by_group.part(run.variants, shown("by_group")),
        *sweep_part(run, shown("latency_vs_throughput", "goodput")),
        "## Rows and latencies", *shown("occupancy", "rows", "distributions"),
        f"[Every row, iteration by iteration]({LIVE})" if (run.folder / LIVE).exists() else "",
        *replicas.simulated_part(run, shown("replicas")), *replicas.measured_part(run),
        "## How it was made", "\n".join(f"- {fact}" for fact in facts(run)),
        "## Every rate" if seeds else "",
        *(f"Seed {seed}:\n\n{tables.points_table(points)}" for seed, points in seeds),
    ])  # fmt: skip


def document(parts: Iterable[str]) -> str:
    """Return the text of a report: its parts, empty ones left out, and definitions of numbers."""
    definitions = "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items())
    return "\n\n".join([*filter(None, parts), "## Definitions", definitions]) + "\n"


def write(run: Run) -> None:
    """Write the report and figures into the run's folder; for several seeds summary.json."""
    write_files(run.folder, contents(run), drawings(run))
    if len(run.summaries) > 1:
        save_json(run.folder / "summary.json", over_seeds(run))


def over_seeds(run: Run) -> dict[str, Any]:
    """Return summary.json of several seeds: mean, half of the interval and values of each headline,
    also in each group of requests; and paired differences.
    """
    keys = dict.fromkeys([*tables.HEADLINES, *tables.COMPARED])
    return {
        "seeds": [summary["seed"] for summary in run.summaries],
        "variants": {
            name: tables.estimates(keys, seeds) | by_group.of_groups(seeds)
            for name, seeds in run.variants.items()
        },
        "differences": [
            {k: asdict(v) if isinstance(v, Estimate) else v for k, v in entry.items()}
            for entry in tables.differences(run.variants, run.baseline)
        ],
    }


def write_files(folder: Path, markdown: str, drawn: Mapping[str, Drawing]) -> None:
    """Write report.md and report.html of this text, and its figures."""
    (folder / "report.md").write_text(markdown)
    vectors = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, draw in drawn.items():
            drawing.save(draw(), folder / f"{name}.png", vector := Path(scratch) / f"{name}.svg")
            vectors[name] = vector.read_bytes()
    (folder / "report.html").write_text(as_page(markdown, vectors))


def show(run: Run, console: Console) -> None:
    """Print the tables and sentences that end a comparison."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    console.print(tables.terminal_table(run.variants, marked(run)))
    if len(run.summaries) == 1:
        say("Latency of a request by its completion tokens, fitted:")
        for name, [result] in run.variants.items():
            say(f"{name:>8}: {tables.line_text(result['latency_line'])}")
    for kind in ("by_user", "by_priority", "by_class"):
        if table := by_group.terminal_table(run.variants, kind):
            console.print(table)
    if run.points:
        console.print(tables.sweep_table(run.points))
    say("\n" + "\n".join(map(sentences.plain, sentences.sentences(run))))
