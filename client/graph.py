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


def _caption(figure: Any, caption: str) -> None:
    figure.suptitle(caption, fontsize=10.5, color="#555555", x=0.01, ha="left")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    plt.close(figure)
