"""Figures of the engine's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from compare.report.drawing import STYLE, caption_of, looks, plain_log

DRAWN = 2000  # points of a kind, at random
LEAST = 10  # of which quantiles are drawn


def step_time(points: Sequence[Mapping[str, float]], caption: str) -> Figure:
    """Step time against rows, a colour a context, and what memory and arithmetic bound it by.

    A roofline. points: {"rows", "context", "seconds", "memory_s", "arithmetic_s", "reached",
    "reached_least", "reached_most"} each. The right panel: which part of the bound (the larger of
    the two, as if they overlapped wholly) a step reaches, median and range.
    """
    contexts = sorted({int(point["context"]) for point in points})
    shades = [matplotlib.colormaps["viridis"](x) for x in np.linspace(0.1, 0.75, len(contexts))]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for context, shade in zip(contexts, shades):
            mine = sorted((p for p in points if p["context"] == context), key=lambda p: p["rows"])
            rows = [p["rows"] for p in mine]
            measured = np.array([p["seconds"] for p in mine])
            bound = np.array([max(p["memory_s"], p["arithmetic_s"]) for p in mine])
            left.plot(rows, 1e3 * measured, "o-", color=shade, label=f"measured, context {context}")
            left.plot(
                rows, 1e3 * bound, "--", color=shade, lw=1.2, label=f"bound, context {context}"
            )
            reached, least, most = (
                [100 * p[f"reached{which}"] for p in mine] for which in ("", "_least", "_most")
            )
            right.plot(rows, reached, "o-", color=shade, label=f"context {context}")
            right.fill_between(rows, least, most, color=shade, alpha=0.12, lw=0)
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(
                sorted({int(p["rows"]) for p in points}), sorted({int(p["rows"]) for p in points})
            )
            axis.set_xlabel("rows")
            axis.grid(alpha=0.25)
        left.set_yscale("log")
        plain_log(left.yaxis)
        left.set(ylabel="step time, ms (log scale)", title="What an iteration takes")
        right.set(ylabel="bound / measured, %", ylim=(0, 105), title="How near the machine's limit")
        left.legend(fontsize=9.5, ncols=2)
        caption_of(figure, caption)
    return figure


def gap_over_budgets(points: Sequence[Mapping[str, float]], limit: float, caption: str) -> Figure:
    """What a long prompt does to the rows that decode, over token budgets.

    points: {"token_budget", "longest_itl_s", "median_itl_s", "ttft_s"} each. limit: as a multiple
    of the median.
    """
    budgets = [p["token_budget"] for p in points]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(
            budgets,
            [p["longest_itl_s"] / p["median_itl_s"] for p in points],
            "o-",
            color=looks(["dynamic"])["dynamic"].colour,
        )
        left.axhline(limit, color="#555555", ls="--", lw=1)
        left.annotate(
            f"{limit:g} × the median",
            (budgets[0], limit),
            xytext=(0, 4),
            textcoords="offset points",
            color="#555555",
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
        caption_of(figure, caption)
    return figure


def quantization(
    steps: Sequence[Mapping[str, Any]],
    pools: Mapping[str, Mapping[str, Any]],
    control: str,
    pool_gb: float,
    caption: str,
) -> Figure:
    """What variants gain over the plain one: a panel a context, over rows, and a capped pool.

    steps: {"context", "rows", "gains"} each, gains of each variant in each turn; pools: {"rows",
    "throughput", "gains"} of each variant, the plain one first. The band is what `control` gains,
    which has the plain variant's settings.
    """
    contexts = sorted({int(step["context"]) for step in steps})
    rows = sorted({int(step["rows"]) for step in steps})
    _, *names = pools
    own = looks(["nobatch", "static", "windowed", "dynamic"])
    look = dict(zip(pools, own.values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * (len(contexts) + 1), 4.8), layout="constrained")
        *panels, last = figure.subplots(1, len(contexts) + 1)
        for axis, context in zip(panels, contexts):
            mine = sorted((s for s in steps if s["context"] == context), key=lambda s: s["rows"])
            # of each variant the middle half and the median over rows: [3, rows]
            gains = {
                name: np.array([np.percentile(s["gains"][name], (25, 50, 75)) for s in mine]).T
                for name in (*names, control)
            }
            low, _, high = gains[control]
            axis.fill_between(rows, low, high, color="#bbbbbb", alpha=0.6, lw=0)
            axis.axhline(1, color="#555555", lw=1)
            for name in names:
                low, middle, high = gains[name]
                axis.errorbar(
                    rows,
                    middle,
                    [middle - low, high - middle],
                    color=look[name].colour,
                    marker=look[name].marker,
                    capsize=3,
                    label=name,
                )
            axis.set_xscale("log", base=2)
            axis.set_xticks(rows, [str(n) for n in rows])
            axis.set(xlabel="rows", title=f"A step at context {context}")
            axis.grid(alpha=0.25)
        most = max(np.percentile(s["gains"][name], 75) for s in steps for name in names)
        for axis in panels:
            axis.set_ylim(0.8, 1.05 * most)
        panels[0].set_ylabel("speed, plain = 1")
        panels[0].legend(fontsize=10.5, loc="upper right")
        panels[-1].annotate(
            f"band: {control}",
            (0.98, 0.03),
            xycoords="axes fraction",
            ha="right",
            color="#555555",
            fontsize=10.5,
        )
        speeds = [pool["throughput"] for pool in pools.values()]
        bars = last.barh(list(pools), speeds, color=[look[name].colour for name in pools])
        for bar, pool in zip(bars, pools.values()):
            last.annotate(
                f"{pool['rows']:.1f} rows: × {np.median(pool['gains']):.2f}",
                (0, bar.get_y() + bar.get_height() / 2),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color="white",
            )
        last.invert_yaxis()
        last.set(xlabel="tok/s", title=f"A burst on {1e3 * pool_gb:g} MB of KV")
        caption_of(figure, caption)
    return figure


def costs(points: Mapping[str, Mapping[str, np.ndarray]], caption: str) -> Figure:
    """How far iterations are from a line: measured against predicted, and their ratio over rows.

    points: by what they are, `rows`, `seconds`, `ratio` (measured / predicted) and `decodes` (rows
    that decode alone) of each iteration. Of numbers of rows with LEAST iterations and more the band
    holds 90% of them, its line is the median.
    """
    kinds = {"decode rows alone": ("#1f3a70", True), "with a prompt": ("#d95f02", False)}
    every = np.random.default_rng(0)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.8), layout="constrained")
        left, *panels = figure.subplots(1, 1 + len(points), width_ratios=[1.1, *[1] * len(points)])
        (*_, last) = points.values()
        for label, (colour, decodes) in kinds.items():
            mine = np.flatnonzero(last["decodes"] == decodes)
            mine = every.permutation(mine)[:DRAWN]
            took = 1e3 * last["seconds"][mine]
            left.plot(
                took / last["ratio"][mine], took, ".", ms=4, alpha=0.35, color=colour, mew=0,
                label=label,
            )  # fmt: skip
        left.axline((1, 1), slope=1, color="#555555", lw=1)
        left.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms")
        left.set_title(f"Iterations, {[*points][-1]}")
        for axis in (left.xaxis, left.yaxis):
            plain_log(axis)
        left.legend(markerscale=3)
        for axis, (name, found) in zip(panels, points.items()):
            for colour, decodes in kinds.values():
                mine = found["decodes"] == decodes
                rows, often = np.unique(found["rows"][mine], return_counts=True)
                rows = rows[often >= LEAST]
                spread = [
                    np.percentile(100 * found["ratio"][mine & (found["rows"] == n)], (5, 50, 95))
                    for n in rows
                ]
                low, middle, high = np.reshape(spread, (-1, 3)).T - 100
                axis.plot(rows, middle, ".-", color=colour)
                axis.fill_between(rows, low, high, color=colour, alpha=0.13, lw=0)
            axis.axhline(0, color="#555555", lw=1)
            axis.set(ylim=(-60, 100), xlabel="rows", title=f"Errors, {name}")
            most = max(found["rows"], default=1)
            axis.set_xscale("log", base=2)
            axis.set_xlim(0.9, 1.1 * most)
            powers = 2 ** np.arange(1 + int(np.log2(most)))
            axis.set_xticks(powers, [str(n) for n in powers])
            axis.grid(alpha=0.25)
        panels[0].set_ylabel("measured − predicted, % of predicted")
        panels[-1].annotate(
            "median, and 90% of them",
            (0.98, 0.03),
            xycoords="axes fraction",
            ha="right",
            color="#555555",
            fontsize=10.5,
        )
        caption_of(figure, caption)
    return figure
