"""Figures. One colour a mode everywhere; every axis has its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from client.report import line_text

COLOURS = {"nobatch": "#7f7f7f", "static": "#d95f02", "windowed": "#7570b3", "dynamic": "#1b9e77"}
IDLE, EMPTY = "#e6ab02", "#ececec"
STYLE: dict[Any, Any] = {
    "font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "figure.dpi": 130, "savefig.bbox": "tight", "legend.frameon": False,
}  # fmt: skip


def colour(mode: str) -> str:
    return COLOURS.get(mode, "#386cb0")


def latency_vs_tokens(
    runs: Mapping[str, tuple[Sequence[int], Sequence[float], Mapping[str, float] | None]], path: Path, caption: str
) -> None:
    """Latency against completion tokens, a point a request, with each mode's least-squares line.

    runs: {mode: (completion tokens, latencies in seconds, fairness)}. The left panel shares one linear scale, so
    that slopes and intercepts compare; the right one has a logarithmic scale, so that no mode hides another.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for mode, (tokens, seconds, line) in runs.items():
            label = f"{mode}:  {line_text(line)}"
            for axis in axes:
                axis.scatter(tokens, seconds, s=14, alpha=0.45, linewidths=0, color=colour(mode), label=label)
                if line:
                    x = np.linspace(0, max(tokens), 100)
                    y = line["intercept_s"] + line["slope_s_per_token"] * x
                    axis.plot(x[y > 0], y[y > 0], color=colour(mode), lw=2)
        for axis, scale in zip(axes, ("linear", "log")):
            axis.set(xlabel="completion tokens", ylabel=f"end-to-end latency, s ({scale} scale)", yscale=scale)
            axis.grid(alpha=0.25)
            axis.set_xlim(left=0)
        axes[0].set_ylim(bottom=0)
        axes[0].set_title("What a request waits for")
        legend = axes[1].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2, markerscale=2, fontsize=11)
        _caption(figure, caption)
        _save(figure, path)


def occupancy(runs: Mapping[str, Mapping[str, Any]], max_batch_size: int, path: Path, caption: str) -> None:
    """Rows over time, the same seconds in every mode: live, idle (computed for a request that is done), empty.

    runs: {mode: {"bin_s", "live": [rows], "idle": [rows]}}. The window ends a little after the quickest mode does.
    """
    spans = {mode: run["bin_s"] * len(run["live"]) for mode, run in runs.items()}
    window = 1.15 * min(spans.values(), default=1.0)
    with plt.rc_context(STYLE):
        size = (11, 1.75 * len(runs) + 1.4)
        figure, axes = plt.subplots(len(runs), 1, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
        for axis, (mode, run) in zip(axes[:, 0], runs.items()):
            edges = run["bin_s"] * np.arange(len(run["live"]) + 1)
            live, idle = np.array(run["live"]), np.array(run["idle"])
            axis.axhspan(0, max_batch_size, color=EMPTY, lw=0)
            axis.stairs(live, edges, fill=True, color=colour(mode))
            axis.stairs(live + idle, edges, baseline=live, fill=True, color=IDLE)
            axis.set_title(mode, color=colour(mode), fontsize=12, loc="left")
            note = f"done after {spans[mode]:.1f} s" + (" →" if spans[mode] > window else "")
            axis.set_title(note, loc="right", fontsize=11, fontweight="normal")
            axis.set_ylim(0, max_batch_size)
            axis.set_xlim(0, window)
        axes[-1, 0].set_xlabel("seconds since the first request")
        figure.supylabel("rows")
        handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("#444444", IDLE, EMPTY)]
        names = ["live (in the mode's colour)", "idle: computed for a request that is done", "empty"]
        figure.legend(handles, names, loc="outside lower center", ncols=3)
        _caption(figure, caption)
        _save(figure, path)


def step_time(points: Sequence[Mapping[str, float]], path: Path, caption: str) -> None:
    """Step time against rows, a colour a context, with the time that memory and arithmetic bound it by (a roofline).

    points: {"rows", "context", "seconds", "memory_s", "arithmetic_s"} each. The right panel: which part of the bound
    (the larger of the two, as if they overlapped wholly) a step reaches.
    """
    contexts = sorted({int(point["context"]) for point in points})
    shades = [plt.get_cmap("viridis")(x) for x in np.linspace(0.1, 0.75, len(contexts))]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for context, shade in zip(contexts, shades):
            mine = sorted((p for p in points if p["context"] == context), key=lambda p: p["rows"])
            rows = [p["rows"] for p in mine]
            measured = np.array([p["seconds"] for p in mine])
            bound = np.array([max(p["memory_s"], p["arithmetic_s"]) for p in mine])
            left.plot(rows, 1e3 * measured, "o-", color=shade, label=f"measured, context {context}")
            left.plot(rows, 1e3 * bound, "--", color=shade, lw=1.2, label=f"bound, context {context}")
            right.plot(rows, 100 * bound / measured, "o-", color=shade, label=f"context {context}")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({int(p["rows"]) for p in points}), sorted({int(p["rows"]) for p in points}))
            axis.set_xlabel("rows")
            axis.grid(alpha=0.25)
        left.set_yscale("log")
        for formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            formatter(lambda y, _: f"{y:g}" if f"{y:g}"[0] in "125" else "")
        left.set(ylabel="step time, ms (log scale)", title="What an iteration takes")
        right.set(ylabel="bound / measured, %", ylim=(0, 105), title="How near the machine's limit")
        left.legend(fontsize=9.5, ncols=2)
        _caption(figure, caption)
        _save(figure, path)


def gap_over_budgets(points: Sequence[Mapping[str, float]], limit: float, path: Path, caption: str) -> None:
    """What a long prompt does to the rows that decode, over token budgets.

    points: {"token_budget", "longest_itl_s", "median_itl_s", "ttft_s"} each. limit: as a multiple of the median.
    """
    budgets = [p["token_budget"] for p in points]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
        left.plot(budgets, [p["longest_itl_s"] / p["median_itl_s"] for p in points], "o-", color=COLOURS["dynamic"])
        left.axhline(limit, color="#555555", ls="--", lw=1)
        left.annotate(
            f"{limit:g} × the median", (budgets[0], limit), xytext=(0, 4), textcoords="offset points", color="#555555"
        )
        left.set(ylabel="longest gap / median gap", title="The rows that decode wait")
        right.plot(budgets, [p["ttft_s"] for p in points], "o-", color="#386cb0")
        right.set(ylabel="s until its first token", title="The long prompt waits")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
            axis.set_ylim(bottom=0)
            axis.set_xlabel("token_budget: prefill tokens in an iteration")
            axis.grid(alpha=0.25)
        _caption(figure, caption)
        _save(figure, path)


def _caption(figure: Any, caption: str) -> None:
    figure.suptitle(caption, fontsize=10.5, color="#555555", x=0.01, ha="left")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    plt.close(figure)
