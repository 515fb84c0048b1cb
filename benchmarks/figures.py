"""Figures of the engine's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from client.report.drawing import STYLE, caption_of, looks, plain_log


def step_time(points: Sequence[Mapping[str, float]], caption: str) -> Figure:
    """Step time against rows, a colour a context, and what memory and arithmetic bound it by.

    A roofline. points: {"rows", "context", "seconds", "memory_s", "arithmetic_s"} each. The right
    panel: which part of the bound (the larger of the two, as if they overlapped wholly) a step
    reaches.
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
            right.plot(rows, 100 * bound / measured, "o-", color=shade, label=f"context {context}")
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
