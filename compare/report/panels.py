"""A figure as a grid of panels, each with lines or bars and their intervals."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.drawing import Style, new_figure, plain_log, styled, styles
from client.results import Json
from compare.analysis import Estimate

COLUMNS = 3


class Point(NamedTuple):
    """A point of a line, or a bar. starred: it is marked as the answer."""

    x: Any
    y: Estimate
    starred: bool = False


@dataclass(frozen=True, kw_only=True)
class FigurePanel:
    """What a panel shows: lines where every x is a number, else bars."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, Sequence[Point]]
    log: bool


@styled
def figure(panels: Sequence[FigurePanel], own: Mapping[str, Style], caption: str) -> Figure:
    """Draw all panels, three a row, with one legend for all. own: styles of names that have one."""
    columns = min(COLUMNS, len(panels))
    n_rows = -(-len(panels) // columns)
    size = 4.8 * columns, 4.2 * n_rows + 0.8
    drawn = new_figure(size, textwrap.fill(caption, 62 * columns))
    all_axes = drawn.subplots(n_rows, columns, squeeze=False).flat
    legend: dict[str, Artist] = {}
    for axes, panel in itertools.zip_longest(all_axes, panels):
        if panel is None:
            axes.set_axis_off()
            continue
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        _draw(axes, panel, styles(panel.lines) | dict(own))
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles))
    wide = 60 * columns // (max(map(len, legend), default=0) + 6)  # labels beside each other
    ncols = min(4, max(1, wide))
    drawn.legend([*legend.values()], [*legend], loc="outside lower center", ncols=ncols)
    return drawn


def _draw(axes: Axes, panel: FigurePanel, style_of: Mapping[str, Style]) -> None:
    points = [point for line in panel.lines.values() for point in line]
    every = [point.x for point in points]
    is_numeric = all(isinstance(x, Number) for x in every)
    places = {x: i for i, x in enumerate(dict.fromkeys(every))}
    n = len(panel.lines)
    for i, (name, line) in enumerate(panel.lines.items()):
        if is_numeric:
            _line(axes, panel, line, style_of[name], name)
        else:
            width = 0.84 / n
            left = (i - (n - 1) / 2) * width
            line = [point._replace(x=places[point.x] + left) for point in line]
            _bars(axes, panel, line, width, color=style_of[name].colour, label=name)
        if star := [(point.x, point.y.mean) for point in line if point.starred]:
            how: Json = {"color": "#c00000", "mec": "w", "ms": 20, "ls": "", "zorder": 9}
            axes.plot(*zip(*star), "*", label="the answer", **how)
    _x_axis(axes, every, is_numeric)
    axes.grid(alpha=0.25, axis="both" if is_numeric else "y")
    if panel.log:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    elif all(point.y.mean >= 0 for point in points):
        axes.set_ylim(bottom=0)


def _spread(panel: FigurePanel, line: Sequence[Point]) -> list[list[float]]:
    """Return lengths below and above the means; on a logarithmic axis none reaches zero."""
    above = [point.y.half or 0.0 for point in line]
    below = [min(half, 0.9 * point.y.mean) for half, point in zip(above, line)]
    return [below if panel.log else above, above]


def _line(axes: Axes, panel: FigurePanel, line: Sequence[Point], style: Style, label: str) -> None:
    line = sorted(line, key=lambda point: point.x)
    x, y = [point.x for point in line], [point.y.mean for point in line]
    how: Json = {"color": style.colour, "marker": style.marker, "ls": style.line}
    axes.errorbar(x, y, _spread(panel, line), capsize=3, label=label, **how)


def _bars(axes: Axes, panel: FigurePanel, bars: Sequence[Point], width: float, **how: Any) -> None:
    at, heights = [bar.x for bar in bars], [bar.y.mean for bar in bars]
    axes.bar(at, heights, 0.92 * width, yerr=_spread(panel, bars), ecolor="#333333", **how)


def _x_axis(axes: Axes, every: Sequence[Any], is_numeric: bool) -> None:
    if not is_numeric:
        places = list(dict.fromkeys(every))
        names = [textwrap.fill(str(x), max(9, 48 // len(places))) for x in places]
        axes.set_xticks(range(len(names)), names, fontsize=9)
        return
    ticks = sorted(set(every))
    if len(ticks) > 2 and ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.minorticks_off()
