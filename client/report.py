"""Tables of a comparison, for the terminal and for report.md. Every report names its config, hardware and commit."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.table import Table

from stats import CLIENT_LIMITED_MS, DEFINITIONS

# key of a mode's summary, heading in report.md, short heading for the terminal (none: not shown there), scale, format
COLUMNS = [
    ("output_throughput", "throughput, tok/s", "tok/s", 1, "{:,.0f}"),
    ("mean_e2el_ms", "latency mean, s", "mean\ns", 1e-3, "{:.2f}"),
    ("p99_e2el_ms", "latency p99, s", "p99\ns", 1e-3, "{:.2f}"),
    ("p50_ttft_ms", "first token p50, s", "ttft\np50 s", 1e-3, "{:.2f}"),
    ("mean_normalized_latency_ms", "latency per token mean, ms", "ms per\ntoken", 1, "{:.1f}"),
    ("useful_fraction", "useful rows, %", "useful\n%", 100, "{:.0f}"),
    ("occupancy", "occupancy, %", "", 100, "{:.0f}"),  # not in 80 columns
    ("largest_batch", "largest batch, rows", "largest\nbatch", 1, "{:.0f}"),
]


def _cells(mode: str, result: Mapping[str, Any]) -> list[str]:
    cells = [mode]
    for key, _, _, scale, form in COLUMNS:
        value = result.get(key)
        cells.append("–" if value is None else form.format(value * scale))
    return cells


def line_text(line: Mapping[str, float] | None) -> str:
    """The least-squares line of a mode: "0.03 s + 7.8 ms per token, r = 0.92"."""
    if line is None:
        return "no line"
    sign, slope = "−" if line["slope_s_per_token"] < 0 else "+", abs(line["slope_s_per_token"]) * 1e3
    text = f"{line['intercept_s']:.2f} s {sign} {slope:.1f} ms per token, r = {line['r']:.2f}"
    return text.replace("-", "−").replace("−0.00", "0.00")


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """Fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("mode", no_wrap=True)
    for _, _, short, _, _ in COLUMNS:
        if short:
            table.add_column(short, justify="right", no_wrap=True)
    for mode, result in summary["modes"].items():
        name, *cells = _cells(mode, result)
        table.add_row(name, *(cell for cell, column in zip(cells, COLUMNS) if column[2]))
    return table


def markdown_table(summary: Mapping[str, Any]) -> str:
    headings = ["mode", *(heading for _, heading, _, _, _ in COLUMNS), "latency of a request", "answered"]
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)]]
    for mode, result in summary["modes"].items():
        answered = str(result["completed"]) + (f", {result['failed']} failed" if result["failed"] else "")
        lines.append([*_cells(mode, result), line_text(result["fairness"]), answered])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def fairness_lines(summary: Mapping[str, Any]) -> list[str]:
    return [f"{mode:>8}: {line_text(result['fairness'])}" for mode, result in summary["modes"].items()]


def identity_sentence(summary: Mapping[str, Any]) -> str:
    """Whether the modes gave the same texts; they must for greedy answers in float32."""
    same = summary["identical_outputs"]
    n, identical = same["requests"], same["identical"]
    if len(summary["modes"]) < 2:
        return "One mode alone: nothing to compare the texts with."
    if n == identical:
        return f"All {n} requests that every mode answered got the same text in each."
    parted = sorted(same["parted_after"])
    sentence = (
        f"{identical} of {n} requests ({100 * identical / n:.0f}%) that every mode answered got the same text in each; the "
        f"texts of the others part after {100 * parted[0]:.0f} to {100 * parted[-1]:.0f}% of their length "
        f"(median {100 * statistics.median(parted):.0f}%)."
    )
    if summary["config"]["dtype"] == "bfloat16":
        sentence += (
            " bfloat16 keeps 8 bits, so two tokens often have equal logits, and the shape of a batch decides between them."
        )
    return sentence


def client_limited_sentence(summary: Mapping[str, Any]) -> str | None:
    late = [mode for mode, result in summary["modes"].items() if result["client_limited"]]
    if not late:
        return None
    return f"The client sent late in {', '.join(late)} (p99 of the schedule lag over {CLIENT_LIMITED_MS:g} ms)."


def busy_sentence(hardware: Mapping[str, Any]) -> str | None:
    busy = hardware["busy_before_percent"]
    return f"Other processes used {busy:.0f}% of the processor before the run: its numbers are suspect." if busy > 20 else None


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
    facts = [
        f"workload: {load['requests']} requests, lengths `{load['lengths']}`, {load['mean_num_tokens']:.0f} completion "
        f"tokens on average, arrival {arrival}, seed {summary['seed']} (`trace.jsonl`)",
        f"settings: {settings}",
        f"hardware: {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']:.0f} GB; "
        f"{hardware['system']}; Python {hardware['python']}, torch {hardware['torch']}",
        f"commit {summary['commit']}, {summary['date']}, `{summary['command']}`",
    ]
    parts = [
        f"# {', '.join(summary['modes'])} on {config['model']}",
        markdown_table(summary),
        " ".join(filter(None, [identity_sentence(summary), client_limited_sentence(summary), busy_sentence(hardware)])),
        "Latencies are of plain answers: a request-level batch is answered as a whole. "
        "Modes ran one after another on the same machine, each on a server of its own.",
        "\n".join(f"- {fact}" for fact in facts),
        "![Latency against completion tokens](latency_vs_tokens.png)",
        "![Occupancy over time](occupancy.png)",
        "## Definitions",
        "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items()),
    ]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")


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
        "busy_before_percent": psutil.cpu_percent(interval=0.5),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit of the code that runs, marked when the tree (results apart) differs from it."""
    root = Path(__file__).resolve().parents[1]
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", ":!results"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if dirty else name
