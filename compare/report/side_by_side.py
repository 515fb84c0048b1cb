"""The report of several runs: of different commits, machines or settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client.quoting import code, escape
from compare import calibrate
from compare.report import figures, sentences, tables
from compare.report.report import Drawing, distributions, marked, write_files
from compare.runs import FIGURES, Run
from stats import DEFINITIONS


def compare_runs(runs: Sequence[Run], out: Path) -> None:
    """A report of several runs side by side: what differs between them, each variant in each,
    and by how much it changed.
    """
    labels, same = _labels(runs), _same_traces(runs)
    rows = [["", *labels]]
    for what, of in ABOUT.items():
        rows.append([what, *(of(run.first) for run in runs)])
    settings = [name for run in runs for name in run.first["config"]]
    for name in dict.fromkeys(settings):
        found = [escape(run.first["config"].get(name, tables.NONE)) for run in runs]
        if len(set(found)) > 1:
            rows.append([escape(name), *found])
    shared = [name for name in runs[0].names if all(name in run.names for run in runs)]
    parts = [
        f"# {' against '.join(labels)}",
        "## What differs",
        tables.markdown(rows, left=len(rows[0])),
        "All replayed the same traces, so their differences are the servers' and the machines'."
        if same
        else "**The traces differ**: at another load latencies differ for that alone; `--trace` "
        "replays "
        "one run's trace in another.",
    ]
    parts += _foreign_costs(labels, runs)
    for label, run in zip(labels, runs):
        told = [
            sentence
            for sentence in (
                sentences.simulated(run),
                sentences.partial(run),
                *sentences.failures(run),
                sentences.client_limited(run),
            )
            if sentence
        ]
        told += [sentences.conditions(run)]
        if not run.first.get("simulated"):
            told += [calibrate.sentence(run.first["calibration"])]
        parts += [f"{label}: {' '.join(told)}"]
    parts += [
        "## Variants",
        tables.runs_table({label: run.variants for label, run in zip(labels, runs)}, paired=same),
    ]
    styles: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[str, np.ndarray]] = {}
    for name in shared:
        for label, run, style in zip(labels, runs, ("-", "--", ":", "-.") * len(runs)):
            styles[f"{name}, {label}"] = (name, style)
            values[f"{name}, {label}"] = distributions(run.answered(name))
    drawn: dict[str, Drawing] = {}
    if values:
        caption = " · ".join(
            f"{label}: commit {run.first['commit']}" for label, run in zip(labels, runs)
        )
        drawn["distributions"] = lambda: figures.distributions(values, caption, styles)
        parts.append(f"![{FIGURES['distributions']}](distributions.png)")
    parts += [
        "## Definitions",
        "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items()),
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, "\n\n".join(parts) + "\n", drawn)


ABOUT: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "commit": lambda s: escape(s["commit"]),
    "date": lambda s: escape(s["date"]),
    "hardware": lambda s: escape(f"{s['hardware']['cpu']}, {s['hardware']['cores']} cores"),
    "workload": lambda s: (
        f"{s['workload']['requests']} requests, {code(s['workload']['lengths'])}, "
        f"{code(s['workload']['arrival'])}"
    ),
    "command": lambda s: code(s["command"]),
}


def _labels(runs: Sequence[Run]) -> list[str]:
    names = [run.folder.resolve().name for run in runs]
    names = [escape(name) for name in names]
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    return [f"{name}{marked(run)}" for name, run in zip(names, runs)]


def _foreign_costs(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Which simulations reckon with other hardware than the measured runs had beside them."""
    measured = {
        label: run.first["hardware"]["cpu"]
        for label, run in zip(labels, runs)
        if not run.first.get("simulated")
    }
    found = []
    for label, run in zip(labels, runs):
        told = run.first.get("simulated")
        if not told or not told["hardware"]:
            continue
        fitted = told["hardware"]["cpu"]
        if others := [other for other, cpu in measured.items() if cpu != fitted]:
            found.append(
                f"**{label} reckons with another machine**: its costs were fitted on "
                f"{escape(fitted)}, and {', '.join(others)} ran on "
                f"{escape(measured[others[0]])}; fit them there with `python -m benchmarks.costs`."
            )
    return found


def _same_traces(runs: Sequence[Run]) -> bool:
    traces = [
        [_trace(folder, summary) for folder, summary in zip(run.folders, run.summaries)]
        for run in runs
    ]
    return all(trace == traces[0] for trace in traces)


def _trace(folder: Path, summary: Mapping[str, Any]) -> Any:
    """A trace, or of one that was not saved what it is drawn from."""
    if summary["workload"].get("saved", True):  # earlier versions saved every one
        return (folder / "trace.jsonl").read_text()
    return summary["seed"], summary["workload"]
