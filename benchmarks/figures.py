"""Figures of the engine's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.report.drawing import STYLE, caption_of, looks, plain_log

GREY = "#555555"


def powers_of_two(axis: Axes, ticks: Sequence[float], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel(label)
    axis.grid(alpha=0.25)


def noted(axis: Axes, text: str, at: tuple[float, float], **more: Any) -> None:
    axis.annotate(text, at, textcoords="offset points", **more)


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
            measured = [1e3 * p["seconds"] for p in mine]
            bound = [1e3 * max(p["memory_s"], p["arithmetic_s"]) for p in mine]
            left.plot(rows, measured, "o-", color=shade, label=f"measured, context {context}")
            left.plot(rows, bound, "--", color=shade, lw=1.2, label=f"bound, context {context}")
            reached, least, most = (
                [100 * p[f"reached{which}"] for p in mine] for which in ("", "_least", "_most")
            )
            right.plot(rows, reached, "o-", color=shade, label=f"context {context}")
            right.fill_between(rows, least, most, color=shade, alpha=0.12, lw=0)
        for axis in (left, right):
            powers_of_two(axis, sorted({int(p["rows"]) for p in points}), "rows")
        left.set_yscale("log")
        plain_log(left.yaxis)
        left.set(ylabel="step time, ms (log scale)", title="What an iteration takes")
        right.set(ylabel="bound / measured, %", ylim=(0, 105), title="How near the machine's limit")
        left.legend(fontsize=9.5, ncols=2)
        caption_of(figure, caption)
    return figure


def quantization(
    steps: Sequence[Mapping[str, Any]],
    pools: Mapping[str, Mapping[str, Any]],
    control: str,
    pool_gb: float,
    caption: str,
) -> Figure:
    """Gains of variants over the plain one: a panel a context, over rows, and a capped pool.

    steps: {"context", "rows", "gains"} each, gains of each variant in each turn; pools: {"rows",
    "throughput", "gains"} of each variant, the plain one first. The band is the gain of `control`,
    which has the plain variant's settings.
    """
    contexts = sorted({int(step["context"]) for step in steps})
    rows = sorted({int(step["rows"]) for step in steps})
    _, *names = pools
    look = dict(zip(pools, looks(["nobatch", "static", "windowed", "dynamic"]).values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * (len(contexts) + 1), 4.8), layout="constrained")
        *panels, last = figure.subplots(1, len(contexts) + 1)
        most = max(np.percentile(s["gains"][name], 75) for s in steps for name in names)
        for axis, context in zip(panels, contexts):
            mine = sorted((s for s in steps if s["context"] == context), key=lambda s: s["rows"])
            # of each variant the middle half and the median over rows: [3, rows]
            gains = {
                name: np.array([np.percentile(s["gains"][name], (25, 50, 75)) for s in mine]).T
                for name in (*names, control)
            }
            low, _, high = gains[control]
            axis.fill_between(rows, low, high, color="#bbbbbb", alpha=0.6, lw=0)
            axis.axhline(1, color=GREY, lw=1)
            for name in names:
                low, middle, high = gains[name]
                bars = [middle - low, high - middle]
                colour, _, marker = look[name]
                axis.errorbar(
                    rows, middle, bars, color=colour, marker=marker, capsize=3, label=name
                )
            powers_of_two(axis, rows, "rows")
            axis.set(title=f"A step at context {context}", ylim=(0.8, 1.05 * most))
        panels[0].set_ylabel("speed, plain = 1")
        panels[0].legend(fontsize=10.5, loc="upper right")
        panels[-1].text(0.98, 0.03, f"band: {control}", ha="right", color=GREY, fontsize=10.5,
                        transform=panels[-1].transAxes)  # fmt: skip
        speeds = [pool["throughput"] for pool in pools.values()]
        bars = last.barh(list(pools), speeds, color=[look[name].colour for name in pools])
        for bar, pool in zip(bars, pools.values()):
            text = f"{pool['rows']:.1f} rows: × {np.median(pool['gains']):.2f}"
            at = (0, bar.get_y() + bar.get_height() / 2)
            noted(last, text, at, xytext=(6, 0), va="center", color="white")
        last.invert_yaxis()
        last.set(xlabel="tok/s", title=f"A burst on {1e3 * pool_gb:g} MB of KV")
        caption_of(figure, caption)
    return figure
