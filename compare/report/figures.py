"""Figures of a run; every axis has its unit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from client.drawing import INK, legend_below, new_figure, patches, plain_log, styled, styles
from client.results import Json, Point, Result, share
from compare.report.sections import Groups, RequestGroup
from stats import LIMITED

EMPTY = "#ececec"
OTHERS = "#cfcfcf"  # replicas that are paid for, and take no requests
KINDS = {  # kinds of computed rows that serve no request
    "idle": ("#e6ab02", "idle: computed for a request that is done"),
    "padding": ("#8c6d4f", "padding: computed for no request"),
    "recomputed": ("#c51b1b", "recomputed: once more, after a preemption"),
    "rejected": ("#9a5cc6", "rejected: a draft token that was not the next one"),
}
WIDTH = 4  # panels of groups side by side
LONGEST = 24  # letters of a name above a panel
HOLLOW: Json = {"mfc": "white", "mew": 2, "ms": 8}  # a mark
LIVE = (INK, "live (in the variant's colour)")
Sweeps = Mapping[str, Sequence[Sequence[Point]]]  # {name: [points of a seed, by rate]}


@styled
def occupancy(
    runs: Mapping[str, Json],
    whole: Mapping[str, bool],
    max_batch_size: int,
    caption: str,
) -> Figure:
    """Rows over time, the same seconds in every variant: live, idle (computed for a request that is
    done), padding, recomputed, rejected, empty.

    runs: {variant: {"bin_s", "live": [rows], KIND: [rows]}}. The window ends a
    little after the quickest of the variants that are `whole` does.
    """
    kinds = _kinds(runs.values())
    spans = {name: run["bin_s"] * len(run["live"]) for name, run in runs.items()}
    finished = [span for name, span in spans.items() if whole[name]]
    window = 1.15 * min(finished, default=max(spans.values()))
    counted = "rows + draft tokens" if "rejected" in kinds else "rows"
    figure, panels = _over_time(list(runs), caption, counted, "the first iteration")
    top: float = max_batch_size  # draft tokens may lie above
    for (axis, colour), (name, run) in zip(panels, runs.items()):
        axis.axhspan(0, max_batch_size, color=EMPTY, lw=0)
        edges = run["bin_s"] * np.arange(len(run["live"]) + 1)
        layers = [(colour, run["live"]), *((KINDS[k][0], run.get(k, 0)) for k in kinds)]
        top = max(top, _stack(axis, edges, layers))
        note = f"done after {spans[name]:.1f} s" + (" →" if spans[name] > window else "")
        axis.set_title(note, loc="right", fontsize=11, fontweight="normal")
        axis.set(ylim=(0, top), xlim=(0, window))
    colours, labels = zip(LIVE, *(KINDS[kind] for kind in kinds), (EMPTY, "empty"))
    legend_below(figure, patches(colours), labels, 3 if len(labels) < 4 else 2)
    return figure


@styled
def replicas(
    changes: Mapping[str, Sequence[tuple[float, int, int]]],
    ends_s: Mapping[str, float],
    caption: str,
) -> Figure:
    """Replicas over time, a panel a variant, until its last request ended.

    changes: {variant: (seconds, replicas that take requests, other replicas), …}.
    """
    figure, panels = _over_time(list(changes), caption, "replicas", "the first request")
    for (axis, colour), (name, rows) in zip(panels, changes.items()):
        at, up, others = zip(*(row for row in rows if row[0] < ends_s[name]))
        _stack(axis, [*at, ends_s[name]], [(colour, up), (OTHERS, others)])
        axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set(xlim=(0, max(ends_s[name] for name in changes)), ylim=(0, None))
    labels = ("take requests (in the variant's colour)", "start, or finish what they have")
    legend_below(figure, patches((INK, OTHERS)), labels, 2)
    return figure


def _over_time(
    names: Sequence[str], caption: str, counted: str, since: str
) -> tuple[Figure, list[tuple[Any, str]]]:
    """A figure with a panel below the other for each variant, under its name and in its colour."""
    figure = new_figure((11, 1.75 * len(names) + 1.4), caption)
    axes = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    panels = [(axis, style.colour) for axis, style in zip(axes, styles(names).values())]
    for (axis, colour), name in zip(panels, names):
        axis.set_title(name, color=colour, fontsize=12, loc="left")
    axis.set_xlabel(f"seconds since {since}")
    figure.supylabel(counted)
    return figure, panels


def _stack(
    axis: Any, edges: Sequence[float] | np.ndarray, layers: Iterable[tuple[str, Any]]
) -> float:
    """Counts between edges, each layer of a colour on top of the one before; return the highest."""
    below: Any = 0
    for colour, counts in layers:
        above = below + np.array(counts)
        axis.stairs(above, edges, baseline=below, fill=True, color=colour)
        below = above
    return float(np.max(below))


def _kinds(runs: Collection[Json]) -> list[str]:
    """Kinds of rows to draw: idle ones, and others of which there are any."""
    return [kind for kind in KINDS if kind == "idle" or any(np.any(r.get(kind, 0)) for r in runs)]


@styled
def latency_vs_throughput(sweeps: Sweeps, caption: str, measure: str, words: str) -> Figure:
    """A measure of latency against throughput while the rate rises (Orca's figure 10 has the median
    per token).
    """
    figure, axis = _curves(sweeps, "output_throughput", measure, caption)
    axis.set(
        xlabel="throughput, completion tokens per second",
        ylabel=f"{words}, ms (log scale)",
        title=f"{words[0].upper()}{words[1:]}, over throughput",
    )
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25, which="both")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@styled
def goodput(sweeps: Sweeps, limits: str, caption: str) -> Figure:
    """Requests per second within the limits against those sent; all are on the diagonal."""
    figure, axis = _curves(sweeps, "achieved_rate", "goodput", caption)
    points = [point for seeds in sweeps.values() for points in seeds for point in points]
    ends = [0, max((point.achieved_rate or 0 for point in points), default=1)]
    axis.plot(ends, ends, ":", color="#999999", label="every request within the limits", zorder=0)
    axis.set(
        xlabel="requests per second, as sent",
        ylabel="goodput, requests per second",
        title=f"Goodput over the rate: {limits}",
        xlim=(0, None),
        ylim=(0, None),
    )
    axis.grid(alpha=0.25)
    axis.legend(loc="upper left")
    return figure


def _curves(sweeps: Sweeps, x: str, y: str, caption: str) -> tuple[Figure, Any]:
    """A figure of each server's points by rate, a curve a seed; hollow beyond the capacity."""
    figure = new_figure((9.5, 5.2), caption)
    axis: Any = figure.subplots()
    for name, (colour, line, marker) in styles(sweeps).items():
        for i, points in enumerate(sweeps[name]):
            known = [p for p in points if None not in (p.number(x), p.number(y))]
            sustained = [p for p in known if not p.saturated]
            saturated = [p for p in known if p.saturated]
            first = min((p.rate for p in saturated), default=float("inf"))
            below = [p for p in known if p.rate < first]
            joint = below[-1:] + known[len(below) :]
            label = name if not i else None
            for shown, how in (
                (sustained, {"marker": marker, "ms": 6, "lw": 2, "ls": line, "label": label}),
                (joint, {"ls": ":", "lw": 1.4, "zorder": 1}),
                (saturated, {"marker": marker, "ls": "", "mfc": "white", "ms": 6}),
            ):
                at = [[p.number(key) for p in shown] for key in (x, y)]
                axis.plot(*at, color=colour, **how)
    label = "beyond its capacity: the queue only grows"
    axis.plot([], [], "o:", color="#555555", mfc="white", label=label)
    return figure, axis


@styled
def computed_rows(
    rows: Mapping[str, Mapping[str, int]], expected: Mapping[str, float | None], caption: str
) -> Figure:
    """Kinds of computed rows, a bar a variant, with the useful fraction that theory expects as a
    tick.

    rows: {variant: {"live", KIND: rows summed over iterations}}. expected: {variant: useful
    fraction or None}.
    """
    kinds = _kinds(rows.values())
    figure = new_figure((9.5, 0.62 * len(rows) + 2.0), caption)
    axis = figure.subplots()
    for y, (name, style) in enumerate(styles(rows).items()):
        counts = rows[name]
        computed = sum(counts.values())
        parts = {kind: 100 * n / computed if computed else 0.0 for kind, n in counts.items()}
        end = 0.0
        for kind, colour in (("live", style.colour), *((k, KINDS[k][0]) for k in kinds)):
            axis.barh(y, parts[kind], left=end, color=colour, height=0.62)
            end += parts[kind]
        text = f"{share(parts['live'])}% of {computed:,}"
        x = parts["live"] / 2
        axis.text(x, y, text, ha="center", va="center", color="white", fontsize=11)
        if (fraction := expected[name]) is not None:
            # theory expects a fraction of live and idle rows; others are not the batch's doing
            at = (100 - parts["padding"] - parts["rejected"]) * fraction
            axis.plot([at, at], [y - 0.42, y + 0.42], color="black", lw=2.5)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set(xlabel="computed rows, %", xlim=(0, 100), title="Computed rows by kind")
    colours, labels = zip(LIVE, *(KINDS[kind] for kind in kinds))
    handles = patches(colours)
    if any(fraction is not None for fraction in expected.values()):
        handles.append(Line2D([], [], color="black", lw=2.5))
        labels = (*labels, "expected by theory")
    legend_below(figure, handles, labels, 3 if len(labels) < 4 else 2, fontsize=10.5)
    return figure


@styled
def distributions(
    runs: Mapping[str, Mapping[str, Sequence[float] | np.ndarray]],
    caption: str,
    lines: Mapping[str, tuple[str, str]] | None = None,
    reported: Mapping[str, Result] = MappingProxyType({}),
) -> Figure:
    """Cumulative distributions of TTFT, TPOT and end-to-end latency, a panel each, on a logarithmic
    scale.

    runs: {name: {"ttft" | "tpot" | "e2el": seconds}}. lines: {name: (the variant whose colour it
    has, line)}. reported: {name: results of which p50 and p99 are marked}.
    """
    figure = new_figure((13, 4.6), caption)
    axes = figure.subplots(1, len(LIMITED), sharey=True)
    lines = lines or {name: (name, "") for name in runs}
    of_variant = styles(dict.fromkeys(variant for variant, _ in lines.values()))
    for axis, measure in zip(axes, LIMITED.values()):
        for name, values in runs.items():
            variant, line = lines[name]
            style, seconds = of_variant[variant], np.array(values.get(measure.name, []), float)
            sizes = np.sort(seconds[~np.isnan(seconds)]) * (1e3 if measure.unit == "ms" else 1)
            if name in reported:
                ms = [reported[name].number(f"p{p}_{measure.name}_ms") for p in (50, 99)]
                at = np.array(ms, float) / (1 if measure.unit == "ms" else 1e3)
                label = None if len(sizes) else name
                axis.plot(at, (50, 99), "o", color=style.colour, **HOLLOW, zorder=3, label=label)
            if not len(sizes):
                continue
            y = 100 * np.arange(1, len(sizes) + 1) / len(sizes)
            [step] = axis.step(sizes, y, where="post", label=name, color=style.colour, lw=2)
            step.set_linestyle(line or style.line)
            if line:  # the line says which run, so the marker says which of two variants
                step.set(marker=style.marker, markevery=0.25, markersize=5)
        axis.set(xlabel=f"{measure.title}, {measure.unit}", ylim=(0, 101))
        drawn = np.concatenate([[], *(line.get_xdata() for line in axis.lines)])
        drawn = drawn[drawn > 0]
        if drawn.size and drawn.max() > 1.001 * drawn.min():  # else a log spreads nothing
            axis.set_xscale("log")
            plain_log(axis.xaxis)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("requests, %")
    axes[0].set_title("Distribution of latencies")
    handles, labels = axes[2].get_legend_handles_labels()
    if reported:
        handles.append(Line2D([], [], ls="", marker="o", color=INK, **HOLLOW))
        labels.append("median and p99 as reported")
    legend_below(figure, handles, labels, 5 if reported else 4)
    return figure


@styled
def by_group(kinds: Iterable[Groups], caption: str) -> Figure:
    """Mean and p99 of latency, a panel for each group and a row for each variant: quarters always,
    users and levels if there are several. All panels share one logarithmic scale: a mark further to
    the right is a longer wait in any of them.
    """
    drawn: list[tuple[str, Sequence[RequestGroup]]] = []
    for kind in kinds:
        by_length, groups = kind.kind == "by_length", kind.shown
        title = "length of the completion" if by_length else kind.title
        if by_length or len(groups) > 1:
            rows = [groups[i : i + WIDTH] for i in range(0, len(groups), WIDTH)]
            drawn += zip([f"Latency by {title}", *[""] * len(rows)], rows)
    shown = [group for _, row in drawn for group in row]
    seconds = [s for group in shown for both in _seconds(group).values() for s in both if s > 0]
    height = (0.46 * len(shown[0].numbers) + 1.35) * len(drawn) + 0.8
    whole = new_figure((13, height), caption)
    parts = whole.subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for part, (title, row) in zip(parts, drawn):
        part.suptitle(title, x=0.01, ha="left", fontweight="bold")
        axes = part.subplots(1, WIDTH, sharey=True)
        for axis, group in zip(axes, row):
            _group(axis, group)
            if seconds:  # with room for the numbers beside the outermost
                axis.set(xscale="log", xlim=(min(seconds) / 2, max(seconds) * 3))
                plain_log(axis.xaxis)
        for axis in axes[len(row) :]:
            axis.set_visible(False)
        axes[0].set_xlabel("seconds (log scale)", loc="left")
    handles = [
        Line2D([], [], marker="o", ms=8, ls="", color=INK),
        Line2D([], [], marker="|", ms=12, mew=2, lw=3, alpha=0.6, color=INK),
    ]
    labels = ["mean end-to-end latency", "up to p99: one request in a hundred takes longer"]
    legend_below(whole, handles, labels, 2)
    return whole


def _seconds(group: RequestGroup) -> dict[str, list[float]]:
    """Return mean and p99 of latency of each variant; empty where it answered no request."""
    return {
        variant: [
            mean(values) / 1e3
            for key in ("mean_e2el_ms", "p99_e2el_ms")
            if (values := [v for n in numbers if (v := n.number(key)) is not None])
        ]
        for variant, numbers in group.numbers.items()
    }


def _group(axis: Any, group: RequestGroup) -> None:
    of_variant = styles(group.numbers)
    for y, (variant, seconds) in enumerate(_seconds(group).items()):
        colour, _, marker = of_variant[variant]
        text: Json = {"textcoords": "offset points", "fontsize": 9.5, "color": colour}
        if not seconds:
            at = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
            axis.annotate("none answered", (0, y), (6, 0), **text, **at)
            continue
        average, slowest = seconds
        axis.plot(seconds, [y, y], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
        axis.plot(average, y, marker, color=colour, ms=8)
        axis.plot(slowest, y, "|", color=colour, ms=12, mew=2)
        above = {"ha": "center", "va": "bottom", "fontweight": "bold"}
        axis.annotate(_two_digits(average), (average, y), (0, 6), **text, **above)
        axis.annotate(_two_digits(slowest), (slowest, y), (7, 0), **text, va="center")
    axis.set_yticks(range(len(group.numbers)), list(group.numbers))
    for tick, style in zip(axis.get_yticklabels(), of_variant.values()):
        tick.set_color(style.colour)
    axis.set_ylim(len(group.numbers) - 0.5, -0.8)
    name = group.name if len(group.name) <= LONGEST else f"{group.name[: LONGEST - 1]}…"
    title = "\n".join(filter(None, (name, group.size)))
    axis.set_title(title, fontsize=11.5, fontweight="normal")
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", which="both", length=3, pad=3)
    axis.grid(axis="x", alpha=0.25)


def _two_digits(seconds: float) -> str:
    """0.0053, 0.72, 7.0, 72."""
    return f"{seconds:#.2g}" if seconds < 9.95 else f"{seconds:.0f}"
