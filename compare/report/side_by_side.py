"""The report of several runs: of different commits, machines or settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compare import calibrate
from compare.quoting import code, escape
from compare.report import figures, sentences, tables
from compare.report.report import Drawing, distributions, document, marked, write_files
from compare.runs import FIGURES, Run

LINES = ("-", "--", ":", "-.")  # of runs, in figures
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
SAME = "All replayed the same traces, so their differences are the servers' and the machines'."
OTHER = (
    "**The traces differ**: at another load latencies differ for that alone; `--trace` replays one "
    "run's trace in another."
)


def compare_runs(runs: Sequence[Run], out: Path) -> None:
    """Write a report of several runs side by side: what differs between them, each variant in each,
    and by how much it changed.
    """
    labels, traces = _labels(runs), [_traces(run) for run in runs]
    same = all(each == traces[0] for each in traces)
    named = dict(zip(labels, runs))
    parts = [
        f"# {' against '.join(labels)}",
        "## What differs",
        tables.markdown(_differing(named), left=1 + len(runs)),
        SAME if same else OTHER,
        *_foreign_costs(named),
    ]
    parts += [f"{label}: {' '.join(_remarks(run))}" for label, run in named.items()]
    variants = {label: run.variants for label, run in named.items()}
    parts += ["## Variants", tables.runs_table(variants, paired=same)]
    styles: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[str, np.ndarray]] = {}
    for name in runs[0].names:
        for i, (label, run) in enumerate(named.items()):
            if all(name in each.names for each in runs):
                styles[f"{name}, {label}"] = (name, LINES[i % len(LINES)])
                values[f"{name}, {label}"] = distributions(run.answered(name))
    drawn: dict[str, Drawing] = {}
    if values:
        caption = " · ".join(
            f"{label}: commit {run.first['commit']}" for label, run in named.items()
        )
        drawn["distributions"] = lambda: figures.distributions(values, caption, styles)
        parts.append(f"![{FIGURES['distributions']}](distributions.png)")
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, document(parts), drawn)


def _labels(runs: Sequence[Run]) -> list[str]:
    names = [escape(run.folder.resolve().name) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    return [f"{name}{marked(run)}" for name, run in zip(names, runs)]


def _traces(run: Run) -> list[Any]:
    """The trace of each seed, or of one that was not saved what it is drawn from."""
    return [
        (folder / "trace.jsonl").read_text()
        if summary["workload"].get("saved", True)
        else (summary["seed"], summary["workload"])
        for folder, summary in zip(run.folders, run.summaries)
    ]


def _differing(runs: Mapping[str, Run]) -> list[list[str]]:
    """A table of facts about the runs, and of the settings in which they differ."""
    first = [run.first for run in runs.values()]
    rows = [["", *runs], *([what, *map(of, first)] for what, of in ABOUT.items())]
    for name in dict.fromkeys(name for summary in first for name in summary["config"]):
        settings = [escape(summary["config"].get(name, tables.NONE)) for summary in first]
        if len(set(settings)) > 1:
            rows.append([escape(name), *settings])
    return rows


def _remarks(run: Run) -> list[str]:
    """Conditions of a run, after the reasons not to trust it."""
    remarks = [sentences.simulated(run), sentences.partial(run), *sentences.failures(run)]
    remarks += [sentences.client_limited(run), sentences.conditions(run)]
    if not run.first.get("simulated"):
        remarks.append(calibrate.sentence(run.first["calibration"]))
    return [sentence for sentence in remarks if sentence]


def _foreign_costs(runs: Mapping[str, Run]) -> list[str]:
    """Simulations that reckon with other hardware than the measured runs beside them had."""
    measured = {
        label: run.first["hardware"]["cpu"]
        for label, run in runs.items()
        if not run.first.get("simulated")
    }
    warnings = []
    for label, run in runs.items():
        simulated = run.first.get("simulated")
        if not simulated or not simulated["hardware"]:
            continue
        fitted = simulated["hardware"]["cpu"]
        if others := [other for other, cpu in measured.items() if cpu != fitted]:
            warnings.append(
                f"**{label} reckons with another machine**: its costs were fitted on "
                f"{escape(fitted)}, and {', '.join(others)} ran on "
                f"{escape(measured[others[0]])}; fit them there with `python -m benchmarks.costs`."
            )
    return warnings
