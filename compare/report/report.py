"""Reports of saved runs: report.md with figures as PNG, report.html in one file. All that they say
is in the run's JSON.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from client.data import described, save_json
from client.machine import processor
from client.quoting import code, escape, unescape
from compare import calibrate, sweep
from compare.analysis import ATTAINMENT, GROWTH, Estimate, estimate
from compare.report import drawing, figures, replicas, sentences, tables, who_waits
from compare.report.page import as_page
from compare.results import Key
from compare.runs import FIGURES, LIVE, Run, differing
from stats import DEFINITIONS, LIMITED, ROW_KINDS, Times, latency_line

Drawing = Callable[[], Figure]
TOLD = (
    "lengths",
    "prompts",
    "prefixes",
    "sessions",
    "priorities",
    "scale",
)  # of a workload, where given


def drawings(run: Run) -> dict[str, Drawing]:
    """What can be drawn of a run: each figure's name, and how."""
    load, seeds, limits = run.first["workload"], len(run.summaries), _limits(run)
    requests = f"{load['requests']:,} requests"
    sent = [summary["workload"]["requests"] for summary in run.summaries]
    of_all = f"{requests} × {seeds} seeds" if seeds > 1 else requests
    if len(set(sent)) > 1:  # users send for their seconds, of each seed another number
        of_all = f"{sum(sent):,} requests in {seeds} seeds"
    caption = _caption(run, f"{of_all}, {load['arrival']}")
    shown = caption
    if sample := sentences.sample(run):
        shown = _caption(run, f"{sample:,} of {of_all}, {load['arrival']}")
    answered = {name: run.answered(name) for name in run.names}
    lines = {}
    for name, mine in answered.items():
        tokens, seconds = (
            [r["completion_tokens"] for r in mine],
            [r["answered_at"] - r["sent_at"] for r in mine],
        )
        lines[name] = (tokens, seconds, latency_line(tokens, seconds))
    found: dict[str, Drawing] = {
        "latency_vs_tokens": lambda: figures.latency_vs_tokens(lines, shown)
    }
    if who_waits.groups(run.variants, "by_length"):
        found["who_waits"] = lambda: who_waits.figure(run.variants, caption)
    if points := run.points:
        n = sum(len(mine) for several in points.values() for mine in several)
        rates = _caption(run, f"{n} rates, lengths {load['lengths']}")
        found["latency_vs_throughput"] = lambda: figures.latency_vs_throughput(points, rates)
        if limits:
            found["goodput"] = lambda: figures.goodput(points, limits, rates)
    # runs that were saved before there were rows of a kind have none
    over_time = {
        n: {kind: [0] * len(o["live"]) for kind in ROW_KINDS} | o
        for n, r in run.results[0].items() if (o := r.get("occupancy_over_time")) and o["live"]
    }  # fmt: skip
    if over_time:
        rows = max(
            r["config"]["max_batch_size"] * _replicas(r)
            for r in run.results[0].values()
            if r.get("config")
        )
        whole = {name: not r["partial"] for name, r in run.results[0].items()}
        one = _caption(
            run, f"{requests}, {load['arrival']}, seed {run.first['seed']}"
        )  # this figure is of one seed
        found["occupancy"] = lambda: figures.occupancy(over_time, whole, rows, one)
        computed = {
            name: {kind: sum(r.get(f"{kind}_rows") or 0 for r in mine) for kind in ROW_KINDS}
            for name, mine in run.variants.items() if mine[0]["live_rows"] is not None
        }  # fmt: skip
        expected = {name: run.variants[name][0]["expected_useful_fraction"] for name in computed}
        found["rows"] = lambda: figures.computed_rows(computed, expected, caption)
    if replicas.has_changes(run):
        first = _caption(run, f"{requests}, {load['arrival']}, seed {run.first['seed']}")
        found["replicas"] = lambda: replicas.figure(run, first)
    found["distributions"] = lambda: figures.distributions(
        {n: distributions(a) for n, a in answered.items()}, shown
    )
    return {name: found[name] for name in FIGURES if name in found}


def _replicas(result: Mapping[str, Any]) -> int:
    """That served, at one time or another."""
    server = result["server"]
    simulated = server.get("replicas", {}).get("requests", {})
    return len(server.get("by_replica", {})) or len(simulated) or 1


def distributions(answered: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """TTFT, TPOT and end-to-end latency of answered requests, in seconds; NaN: it has none."""
    names = ("sent_at", "first_token_at", "last_token_at", "answered_at", "completion_tokens")
    start, first, last, end, tokens = (np.array([r[name] for r in answered]) for name in names)
    times = Times(start, np.nan, first, last, end, tokens)
    return {measure.name: measure.of(times) for measure in LIMITED.values()}


def _caption(run: Run, what: str) -> str:
    config = run.first["config"]
    model = f"{config['model']}, {config['dtype']}, " if config else ""
    told = run.first.get("simulated")
    by = f"simulated, costs {told['costs']}" if told else processor(run.first["hardware"], config)
    if deployed := sentences.deployed(run.first):
        what += f", {deployed}"
    return f"{model}{what} · {by} · commit {run.first['commit']}"


def _limits(run: Run) -> str:
    return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in run.first["goodput"].items())


def sweep_part(run: Run) -> list[str]:
    """The section on rates: how capacities were found, and what they are."""
    found = {
        name: [sweep.outcome(points) for points in seeds] for name, seeds in run.points.items()
    }
    if not found:
        return []
    unfinished = {
        name for name in found if any(name not in summary["swept"] for summary in run.summaries)
    }
    found = {
        f"{name} (partial)" if name in unfinished else name: outcomes
        for name, outcomes in found.items()
    }
    text = (
        "A variant's capacity is what it completed while requests were always waiting, at all "
        "rates beyond it: tokens a second over the mean tokens of a request. Its queue begins to "
        "grow between two rates 9% apart: at the second, each second of sending adds over "
        f"{GROWTH:g} s to the wait for the first token, over {100 * GROWTH:g}% of what is sent "
        f"stays in flight, or over {100 * sweep.LOST:g}% of requests fail. Near the capacity that "
        "is chance, and the two need not lie around it."
    )
    if any("busy_s" not in p for seeds in run.points.values() for points in seeds for p in points):
        text += (
            " **This sweep is from a version that did not measure capacity so**: it is missing; "
            "measure again to have it. Its "
            "traces were as drawn, and asked for up to a tenth more or less than their rate says."
        )
    if limits := _limits(run):
        text += (
            f" A rate is within the limits when {100 * ATTAINMENT:.0f}% of its requests have "
            f"{limits}."
        )
    return [
        "## From light load to beyond capacity",
        text,
        tables.capacity_table(found, bool(limits)),
    ]


def rows_page(run: Run) -> list[str]:
    """The link to what `python -m live` made of the run."""
    if not (run.folder / LIVE).exists():
        return []
    return [f"[Every row, iteration by iteration]({LIVE})"]


def marked(run: Run) -> str:
    """What stands beside the names of a run that was not measured."""
    return " (simulated)" if run.first.get("simulated") else ""


def facts(run: Run) -> list[str]:
    summary = run.first
    load, hardware, config, capacity = (
        summary["workload"],
        summary["hardware"],
        summary["config"],
        summary["capacity"],
    )
    arrival = f"arrival {code(load['arrival'])}"
    if capacity:
        arrival += (
            f": {capacity['load']:g} of the {capacity['output_throughput']:,.0f} tok/s that a "
            f"burst of "
            f"{capacity['requests']} requests reached in {code(capacity.get('of', 'dynamic'))} "
            f"while every row was busy"
        )
    seeds = ", ".join(str(s["seed"]) for s in run.summaries)
    asked = [f"{name} {code(str(load[name]))}" for name in TOLD if load.get(name)]
    # earlier versions saved every trace
    where = "`trace.jsonl`" if load.get("saved", True) else "not saved: these draw it again"
    found = [
        f"workload: {escape(described(load))}; {', '.join([*asked, arrival])}; seed {seeds} "
        f"({where})"
    ]
    if config:
        apart = differing(run.results[0])
        common = [name for name in config if not any(name in mine for mine in apart.values())]
        settings = [escape(f"{name} {config[name]}") for name in common if config[name] is not None]
        found.append("settings: " + ", ".join(settings))
        for name, mine in apart.items():
            if len(mine) > 1 or name != mine["mode"]:
                own = [escape(f"{key} {value}") for key, value in mine.items() if key != "mode"]
                found.append(f"{name}: {', '.join([mine['mode'], *own])}")
    found += [f"{name}: {escape(url)}, through OpenAI's API as a stream; its engine and hardware "
              f"are not known here"
              for name, url in summary["also"].items()]  # fmt: skip
    gpu = f"{escape(hardware['gpu'])}; " if hardware.get("gpu") else ""
    whose = "hardware" if summary["started_here"] else "the client's hardware"
    whose = "simulated on" if summary.get("simulated") else whose
    found += [
        f"{whose}: {gpu}{escape(hardware['cpu'])}, {hardware['cores']} cores, "
        f"{hardware['memory_gb']:.0f} GB; "
        f"{hardware['system']}; Python {hardware['python']}, torch {hardware['torch']}",
        *(
            []
            if summary.get("simulated")
            else [f"client: {calibrate.sentence(summary['calibration'])}"]
        ),
        f"commit {summary['commit']}, {summary['date']}, {code(summary['command'])}",
    ]
    return found


def contents(run: Run) -> str:
    """report.md."""
    summary = run.first
    drawn = drawings(run)

    def shown(*names: str) -> list[str]:
        return [f"![{FIGURES[name]}]({name}.png)" for name in names if name in drawn]

    model = f" on {escape(summary['config']['model'])}" if summary["config"] else ""
    parts = [
        f"# {', '.join(run.names)}{model}{marked(run)}",
        tables.markdown_table(run.variants, marked(run)),
        " ".join(sentences.sentences(run)),
    ]
    if len(run.summaries) > 1 and len(run.names) > 1:
        parts.append(tables.differences_table(run.variants, run.baseline))
    parts += [
        sentences.conditions(run),
        *shown("latency_vs_tokens"), *who_waits.part(run.variants, shown("who_waits")),
        *sweep_part(run), *shown("latency_vs_throughput", "goodput"),
        "## Rows and latencies", *shown("occupancy", "rows", "distributions"), *rows_page(run),
        *replicas.part(run, shown("replicas")), *replicas.measured_part(run),
        "## How it was made", "\n".join(f"- {fact}" for fact in facts(run)),
    ]  # fmt: skip
    if run.points:
        parts += ["## Every rate"]
        for mine in run.summaries:
            parts += [f"Seed {mine['seed']}:", tables.points_table(mine["sweep"])]
    parts += [
        "## Definitions",
        "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def write(run: Run) -> None:
    """Write report.md, report.html and the figures into the run's folder, and for several seeds
    summary.json.
    """
    write_files(run.folder, contents(run), drawings(run))
    if len(run.summaries) > 1:
        save_json(run.folder / "summary.json", over_seeds(run))


def over_seeds(run: Run) -> dict[str, Any]:
    """summary.json of several seeds: each headline's mean, half of its interval, and its values;
    paired differences. Of each group of requests, too.
    """
    keys = dict.fromkeys([*tables.HEADLINES, *tables.COMPARED])
    variants = {
        name: _estimates(keys, mine) | who_waits.of_groups(mine, _estimates)
        for name, mine in run.variants.items()
    }
    differences = [
        {
            key: asdict(value) if isinstance(value, Estimate) else value
            for key, value in entry.items()
        }
        for entry in tables.differences(run.variants, run.baseline)
    ]
    return {
        "seeds": [s["seed"] for s in run.summaries],
        "variants": variants,
        "differences": differences,
    }


def _estimates(keys: Iterable[Key], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each number that all seeds have its mean, half of its interval, and its values."""
    return {
        key.name: {**asdict(estimate(values, tables.STEPS.get(key.name, 0.0))), "values": values}
        for key in keys
        if len(values := [v for r in results if (v := key.of(r)) is not None]) == len(results)
    }


def write_files(folder: Path, markdown: str, drawn: Mapping[str, Drawing]) -> None:
    """report.md and report.html of this text, and its figures."""
    (folder / "report.md").write_text(markdown)
    vectors = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, draw in drawn.items():
            drawing.save(draw(), folder / f"{name}.png", vector := Path(scratch) / f"{name}.svg")
            vectors[name] = vector.read_bytes()
    (folder / "report.html").write_text(as_page(markdown, vectors))


def show(run: Run, console: Console) -> None:
    """What a comparison prints at its end."""
    console.print(tables.terminal_table(run.variants, marked(run)))
    if len(run.summaries) == 1:
        console.print("Latency of a request by its completion tokens, fitted:", highlight=False)
        for name, [result] in run.variants.items():
            console.print(
                f"{name:>8}: {tables.line_text(result['latency_line'])}",
                markup=False,
                highlight=False,
            )
    for kind in ("by_user", "by_priority"):
        if table := who_waits.terminal_table(run.variants, kind):
            console.print(table)
    if run.points:
        console.print(tables.sweep_table({name: seeds[-1] for name, seeds in run.points.items()}))
    console.print(
        "\n" + unescape("\n".join(sentences.sentences(run))), markup=False, highlight=False
    )
    console.print(
        f"report.html, report.md, figures and every request: {run.folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
