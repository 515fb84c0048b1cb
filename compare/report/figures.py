"""Figures of a run; every axis has its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from compare.report.drawing import STYLE, caption_of, looks, plain_log
from compare.report.tables import line_text
from stats import LIMITED

IDLE, PADDING, RECOMPUTED, EMPTY = "#e6ab02", "#8c6d4f", "#c51b1b", "#ececec"
MANY = 5_000  # points, that as shapes would make a page of megabytes
KINDS = {  # of computed rows that serve nobody
    "idle": (IDLE, "idle: computed for a request that is done"),
    "padding": (PADDING, "padding: computed to fill a decoder batch size"),
    "recomputed": (RECOMPUTED, "recomputed: once more, after a preemption"),
}


def latency_vs_tokens(
    runs: Mapping[str, tuple[Sequence[int], Sequence[float], Mapping[str, float] | None]],
    caption: str,
) -> Figure:
    """Latency against completion tokens, a point a request, with each variant's least-squares line.

    runs: {variant: (completion tokens, latencies in seconds, latency_line)}. The left panel shares
    one linear scale, so that slopes and intercepts compare; the right one has a logarithmic scale,
    so that no variant hides another.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        axes = figure.subplots(1, 2)
        look = looks(runs)
        many = sum(len(tokens) for tokens, _, _ in runs.values()) > MANY
        for name, (tokens, seconds, line) in runs.items():
            label = f"{name}:  {line_text(line)}"
            for axis in axes:
                axis.scatter(
                    tokens,
                    seconds,
                    s=14,
                    alpha=0.45,
                    linewidths=0,
                    color=look[name].colour,
                    marker=look[name].marker,
                    label=label,
                    rasterized=many,
                )
                if line:
                    x = np.linspace(0, max(tokens), 100)
                    y = line["intercept_s"] + line["slope_s_per_token"] * x
                    axis.plot(x[y > 0], y[y > 0], color=look[name].colour, ls=look[name].line, lw=2)
        for axis, scale in zip(axes, ("linear", "log")):
            axis.set(
                xlabel="completion tokens",
                ylabel=f"end-to-end latency, s ({scale} scale)",
                yscale=scale,
            )
            axis.grid(alpha=0.25)
            axis.set_xlim(left=0)
        plain_log(axes[1].yaxis)
        axes[0].set_ylim(bottom=0)
        axes[0].set_title("What a request waits for")
        legend = axes[1].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2, markerscale=2, fontsize=11)
        caption_of(figure, caption)
    return figure


def occupancy(
    runs: Mapping[str, Mapping[str, Any]],
    whole: Mapping[str, bool],
    max_batch_size: int,
    caption: str,
) -> Figure:
    """Rows over time, the same seconds in every variant: live, idle (computed for a request that is
    done), padding, recomputed, empty.

    runs: {variant: {"bin_s", "live": [rows], KIND: [rows]}}. The window ends a
    little after the quickest of the variants that are `whole` does.
    """
    kinds = [
        kind for kind in KINDS if kind == "idle" or any(any(run[kind]) for run in runs.values())
    ]
    spans = {name: run["bin_s"] * len(run["live"]) for name, run in runs.items()}
    window = 1.15 * min(
        (span for name, span in spans.items() if whole[name]), default=max(spans.values())
    )
    with matplotlib.rc_context(STYLE):
        size = (11, 1.75 * len(runs) + 1.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)
        look = looks(runs)
        for axis, (name, run) in zip(axes[:, 0], runs.items()):
            edges = run["bin_s"] * np.arange(len(run["live"]) + 1)
            axis.axhspan(0, max_batch_size, color=EMPTY, lw=0)
            below = np.array(run["live"])
            axis.stairs(below, edges, fill=True, color=look[name].colour)
            for kind in kinds:
                above = below + run[kind]
                axis.stairs(above, edges, baseline=below, fill=True, color=KINDS[kind][0])
                below = above
            axis.set_title(name, color=look[name].colour, fontsize=12, loc="left")
            note = f"done after {spans[name]:.1f} s" + (" →" if spans[name] > window else "")
            axis.set_title(note, loc="right", fontsize=11, fontweight="normal")
            axis.set_ylim(0, max_batch_size)
            axis.set_xlim(0, window)
        axes[-1, 0].set_xlabel("seconds since the first iteration")
        figure.supylabel("rows")
        shown = [
            ("#444444", "live (in the variant's colour)"),
            *(KINDS[kind] for kind in kinds),
            (EMPTY, "empty"),
        ]
        handles = [Rectangle((0, 0), 1, 1, color=c) for c, _ in shown]
        figure.legend(
            handles,
            [name for _, name in shown],
            loc="outside lower center",
            ncols=3 if len(shown) < 4 else 2,
        )
        caption_of(figure, caption)
    return figure


def latency_vs_throughput(
    sweeps: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], caption: str
) -> Figure:
    """Median latency per token against throughput while the rate rises (Orca's figure 10), a curve
    a server and seed.

    sweeps: {name: [points of a seed, by rate]}. Rates beyond the capacity, where latency depends on
    how long one measures, are hollow and dotted.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        axis = figure.subplots()
        _curves(axis, sweeps, "output_throughput", "p50_normalized_latency_ms")
        axis.set_yscale("log")
        plain_log(axis.yaxis)
        axis.set(
            xlabel="throughput, completion tokens a second",
            ylabel="latency per token, median, ms (log scale)",
        )
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25, which="both")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        figure.legend(loc="outside lower center", ncols=3)
        axis.set_title("What a variant can deliver, and at what latency")
        caption_of(figure, caption)
    return figure


def goodput(
    sweeps: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], limits: str, caption: str
) -> Figure:
    """Requests a second within the limits against requests a second sent; on the diagonal all of
    them are.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        axis = figure.subplots()
        _curves(axis, sweeps, "achieved_rate", "goodput")
        most = max(
            (
                p["achieved_rate"] or 0
                for seeds in sweeps.values()
                for points in seeds
                for p in points
            ),
            default=1,
        )
        axis.plot(
            [0, most],
            [0, most],
            ":",
            color="#999999",
            label="every request within the limits",
            zorder=0,
        )
        axis.set(
            xlabel="requests a second, as sent", ylabel=f"goodput, requests a second with {limits}"
        )
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.legend(loc="upper left")
        axis.set_title("How many requests are answered in time")
        caption_of(figure, caption)
    return figure


def _curves(
    axis: Any, sweeps: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], x: str, y: str
) -> None:
    """Each server's points by rate, a curve a seed; those beyond its capacity hollow, and joined by
    dots.
    """
    look = looks(sweeps)
    for name, seeds in sweeps.items():
        for i, points in enumerate(seeds):
            known = [p for p in points if p[x] is not None and p[y] is not None]
            sustained, saturated = (
                [p for p in known if p["saturated"] is beyond] for beyond in (False, True)
            )
            first = min((p["rate"] for p in saturated), default=float("inf"))
            joint = [p for p in sustained if p["rate"] < first][-1:] + [
                p for p in known if p["rate"] >= first
            ]
            colour, line, marker = look[name]
            label = name if not i else None
            for shown, style in (
                (sustained, {"marker": marker, "ms": 6, "lw": 2, "ls": line, "label": label}),
                (joint, {"ls": ":", "lw": 1.4, "zorder": 1}),
                (saturated, {"marker": marker, "ls": "", "mfc": "white", "ms": 6}),
            ):
                axis.plot([p[x] for p in shown], [p[y] for p in shown], color=colour, **style)
    axis.plot(
        [],
        [],
        "o:",
        color="#555555",
        mfc="white",
        label="beyond its capacity: the queue only grows",
    )


def computed_rows(
    rows: Mapping[str, Mapping[str, int]], expected: Mapping[str, float | None], caption: str
) -> Figure:
    """Where computed rows went, a bar a variant, with the useful fraction that theory expects as a
    tick.

    rows: {variant: {"live", KIND: rows summed over iterations}}. expected: {variant: useful
    fraction or None}.
    """
    kinds = [
        kind for kind in KINDS if kind == "idle" or any(counts[kind] for counts in rows.values())
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 0.62 * len(rows) + 2.0), layout="constrained")
        axis = figure.subplots()
        look = looks(rows)
        for y, (name, counts) in enumerate(rows.items()):
            computed = sum(counts.values())
            share = {kind: 100 * n / computed if computed else 0.0 for kind, n in counts.items()}
            useful = left = share["live"]
            axis.barh(y, useful, color=look[name].colour, height=0.62)
            for kind in kinds:
                axis.barh(y, share[kind], left=left, color=KINDS[kind][0], height=0.62)
                left += share[kind]
            axis.text(
                useful / 2,
                y,
                f"{useful:.0f}% of {computed:,}",
                ha="center",
                va="center",
                color="white",
                fontsize=11,
            )
            if (
                fraction := expected[name]
            ) is not None:  # of live and idle rows: padding is not the batch's doing
                axis.plot(
                    [(100 - share["padding"]) * fraction] * 2,
                    [y - 0.42, y + 0.42],
                    color="black",
                    lw=2.5,
                )
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        axis.set(xlabel="computed rows, %", xlim=(0, 100), title="Where computed rows went")
        shown = [("#444444", "live (in the variant's colour)"), *(KINDS[kind] for kind in kinds)]
        handles = [
            *(Rectangle((0, 0), 1, 1, color=c) for c, _ in shown),
            Line2D([], [], color="black", lw=2.5),
        ]
        names = [*(name for _, name in shown), "expected: mean(g) / E[max g]"]
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=3 if len(names) < 4 else 2,
            fontsize=10.5,
        )
        caption_of(figure, caption)
    return figure


def distributions(
    runs: Mapping[str, Mapping[str, Sequence[float] | np.ndarray]],
    caption: str,
    styles: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Cumulative distributions of TTFT, TPOT and end-to-end latency, a panel each, on a logarithmic
    scale.

    runs: {name: {"ttft" | "tpot" | "e2el": seconds}}. styles: {name: (the variant whose colour it
    has, line style)}.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        axes = figure.subplots(1, len(LIMITED), sharey=True)
        styles = styles or {name: (name, "") for name in runs}
        look = looks(dict.fromkeys(variant for variant, _ in styles.values()))
        for axis, measure in zip(axes, LIMITED.values()):
            for name, values in runs.items():
                seconds = np.array(values[measure.name], float)
                mine = np.sort(seconds[~np.isnan(seconds)]) * (1e3 if measure.unit == "ms" else 1)
                if len(mine):
                    variant, style = styles[name]
                    its = look[variant]
                    share = 100 * np.arange(1, len(mine) + 1) / len(mine)
                    kind = {"color": its.colour, "ls": style or its.line, "lw": 2, "label": name}
                    if style:  # the line says which run, so the marker says which of two variants
                        kind |= {"marker": its.marker, "markevery": 0.25, "ms": 5}
                    axis.step(mine, share, where="post", **kind)
            axis.set(xlabel=f"{measure.title}, {measure.unit}", ylim=(0, 101))
            drawn = np.concatenate([[], *(line.get_xdata() for line in axis.lines)])
            drawn = drawn[drawn > 0]
            if drawn.size and drawn.max() > 1.001 * drawn.min():  # else a log spreads nothing
                axis.set_xscale("log")
                plain_log(axis.xaxis)
            axis.grid(alpha=0.25)
        axes[0].set_ylabel("requests, %")
        axes[0].set_title("How long requests take")
        figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        caption_of(figure, caption)
    return figure
