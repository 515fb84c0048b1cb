"""The report of several runs: of different commits, machines or settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare import calibrate
from compare.quoting import code, escape
from compare.report import figures, sentences, tables
from compare.report.report import distributions, document, marked, write_files
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
    names = [escape(run.folder.resolve().name) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    named = {f"{name}{marked(run)}": run for name, run in zip(names, runs)}
    traces = [_traces(run) for run in runs]
    same = all(each == traces[0] for each in traces)
    remarks = [f"{label}: {' '.join(_remarks(run))}" for label, run in named.items()]
    styles, values = {}, {}
    for name in runs[0].names:
        for line, (label, run) in zip(itertools.cycle(LINES), named.items()):
            if all(name in each.names for each in runs):
                styles[f"{name}, {label}"] = (name, line)
                values[f"{name}, {label}"] = distributions(run.answered(name))
    caption = " · ".join(f"{label}: commit {run.first['commit']}" for label, run in named.items())
    draw = partial(figures.distributions, values, caption, styles)
    text = document(
        [
            f"# {' against '.join(named)}",
            "## What differs",
            tables.markdown(_differing(named), left=1 + len(runs)),
            SAME if same else OTHER,
            *_foreign_costs(named),
            *remarks,
            "## Variants",
            tables.runs_table({label: run.variants for label, run in named.items()}, paired=same),
            f"![{FIGURES['distributions']}](distributions.png)" if values else "",
        ]
    )
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, text, {"distributions": draw} if values else {})


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


def _foreign_costs(runs: Mapping[str, Run]) -> list[str]:
    """Return a warning for each simulation whose costs are of another processor than a measured run
    beside it had.
    """
    cpus = {name: r.first["hardware"]["cpu"] for name, r in runs.items() if not marked(r)}
    warnings = []
    for name, run in runs.items():
        fitted = (run.first.get("simulated") or {}).get("hardware")
        if fitted and (others := [other for other, cpu in cpus.items() if cpu != fitted["cpu"]]):
            warnings.append(
                f"**{name} has another machine's costs**: they were fitted on "
                f"{escape(fitted['cpu'])}, and {', '.join(others)} ran on "
                f"{escape(cpus[others[0]])}; fit them there with `python -m benchmarks.costs`."
            )
    return warnings


def _remarks(run: Run) -> list[str]:
    """Conditions of a run, after the reasons not to trust it."""
    remarks = [sentences.simulated(run), sentences.partial(run), *sentences.failures(run)]
    remarks += [sentences.client_limited(run), sentences.conditions(run)]
    if not run.first.get("simulated"):
        remarks.append(calibrate.sentence(run.first["calibration"]))
    return [sentence for sentence in remarks if sentence]
