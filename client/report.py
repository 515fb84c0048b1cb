"""Tables of a comparison, for the terminal and for report.md. Every report names its config, hardware and commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from stats import DEFINITIONS

# heading, unit, key of a mode's summary, format
COLUMNS = [
    ("throughput", "tok/s", "output_throughput", "{:,.0f}"),
    ("requests", "/s", "request_throughput", "{:.2f}"),
    ("latency mean", "s", "mean_e2el_ms", "{:.2f}"),
    ("p99", "s", "p99_e2el_ms", "{:.2f}"),
    ("first token p50", "s", "p50_ttft_ms", "{:.2f}"),
    ("per token, mean", "ms", "mean_normalized_latency_ms", "{:.1f}"),
    ("useful rows", "%", "useful_fraction", "{:.0f}"),
    ("occupancy", "%", "occupancy", "{:.0f}"),
    ("largest batch", "rows", "largest_batch", "{:.0f}"),
]
SCALE = {"mean_e2el_ms": 1e-3, "p99_e2el_ms": 1e-3, "p50_ttft_ms": 1e-3, "useful_fraction": 100, "occupancy": 100}


def _cells(mode: str, result: Mapping[str, Any]) -> list[str]:
    cells = [mode]
    for _, _, key, form in COLUMNS:
        value = result.get(key)
        cells.append("–" if value is None else form.format(value * SCALE.get(key, 1)))
    line = result.get("fairness")
    cells.append(f"{line['intercept_s']:.2f} + {line['slope_s_per_token'] * 1e3:.1f}/1000·n" if line else "–")
    return [*cells, f"{result['completed']}" + (f", {result['failed']} failed" if result["failed"] else "")]


def _headings() -> list[str]:
    return ["mode", *(f"{name}, {unit}" for name, unit, _, _ in COLUMNS), "latency of n tokens, s", "answered"]


def terminal_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title="The same requests in every mode", title_justify="left")
    for heading in _headings():
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, result in summary["modes"].items():
        table.add_row(*_cells(mode, result))
    return table


def markdown_table(summary: Mapping[str, Any]) -> str:
    headings = _headings()
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)]]
    lines += [_cells(mode, result) for mode, result in summary["modes"].items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def identity_sentence(summary: Mapping[str, Any]) -> str:
    """Whether the modes gave the same texts; they must for greedy answers in float32."""
    same = summary["identical_outputs"]
    n, identical = same["requests"], same["identical"]
    if len(summary["modes"]) < 2:
        return "One mode alone: nothing to compare the texts with."
    if n == identical:
        return f"All {n} requests that every mode answered got the same text in each."
    return f"{identical} of {n} requests that every mode answered got the same text in each; {n - identical} differ."


def write_report(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write report.md beside the figures of a comparison."""
    load, hardware, config = summary["workload"], summary["hardware"], summary["config"]
    rate = f"{load['requested_rate']:.2f} requests a second" if load["requested_rate"] else "all at once"
    capacity = summary.get("capacity")
    arrival = f"`{load['arrival']}` ({rate})"
    if capacity:
        arrival += (
            f": {capacity['load']:g} of the {capacity['output_throughput']:,.0f} tok/s that a burst of "
            f"{capacity['requests']} requests reached in `dynamic` while every row was busy"
        )
    settings = ", ".join(f"{name} {value}" for name, value in config.items() if value is not None)
    parts = [
        f"# {', '.join(summary['modes'])} on {config['model']}",
        markdown_table(summary),
        identity_sentence(summary),
        "Latencies are of plain answers: a request-level batch is answered as a whole. "
        "Modes ran one after another on the same machine, each on a server of its own.",
        f"- workload: {load['requests']} requests, lengths `{load['lengths']}`, {load['mean_num_tokens']:.0f} completion "
        f"tokens on average, arrival {arrival}, seed {summary['seed']} (`trace.jsonl`)",
        f"- settings: {settings}",
        f"- hardware: {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']:.0f} GB; "
        f"{hardware['system']}; Python {hardware['python']}, torch {hardware['torch']}",
        f"- commit {summary['commit']}, {summary['date']}, `{summary['command']}`",
        "![Latency against completion tokens](latency_vs_tokens.png)",
        "![Occupancy over time](occupancy.png)",
        "## Definitions",
        "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items()),
    ]
    (folder / "report.md").write_text("\n\n".join(parts).replace("\n\n- ", "\n- ").replace("\n- workload", "\n\n- workload") + "\n")


def hardware() -> dict[str, Any]:
    """What the numbers were made on."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit of the code that runs, marked when the tree differs from it."""
    root = Path(__file__).resolve().parents[1]
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if dirty else name
