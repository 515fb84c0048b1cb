"""The figure of a study: a grid of panels, each with lines or bars."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.drawing import Look, looks, new_figure, plain_log, styled
from compare.analysis import Estimate
from lab.studies.study import Case, Cases, Panel, Study, base_of, key_of, mean, only, ratio, values

COLUMNS = 3


class Point(NamedTuple):
    """A point of a line, or a bar. expected: by theory, where that is known."""

    x: Any
    y: Estimate
    expected: float | None


@styled
def figure(study: Study, cases: Cases, caption: str) -> Figure:
    """Draw all panels, three a row, with one legend for all."""
    panels = [panel for panel in study.panels if only(cases, panel.where)]
    columns = min(COLUMNS, len(panels))
    n_rows = -(-len(panels) // columns)
    size = 4.8 * columns, 4.2 * n_rows + 0.8
    drawn = new_figure(size, textwrap.fill(caption, 62 * columns))
    all_axes = drawn.subplots(n_rows, columns, squeeze=False).flat
    legend: dict[str, Any] = {}
    for axes, panel in itertools.zip_longest(all_axes, panels):
        if panel is None:
            axes.set_axis_off()
            continue
        _draw(axes, study, panel, only(cases, panel.where))
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles))
    drawn.legend([*legend.values()], [*legend], loc="outside lower center", ncols=4)
    return drawn


def _draw(axes: Axes, study: Study, panel: Panel, cases: Cases) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    if panel.step:
        _areas(axes, study, panel, cases)
        return
    lines: dict[str, list[Case]] = {}
    for case in cases:
        lines.setdefault(str(key_of(case, panel.line)), []).append(case)
    look_of = looks(lines) | dict(study.looks)
    points = {name: _points(study, panel, cases, lines[name]) for name in lines}
    every = [point.x for line in points.values() for point in line]
    is_numeric = all(isinstance(x, Number) for x in every)
    for i, (name, line) in enumerate(points.items()):
        if is_numeric:
            _line(axes, panel, sorted(line, key=lambda point: point.x), look_of[name], name)
        else:
            places = list(dict.fromkeys(every))
            _bars(axes, panel, line, places, look_of[name], name, (i, len(points)))
    _x_axis(axes, every, is_numeric)
    axes.grid(alpha=0.25, axis="both" if is_numeric else "y")
    if panel.log:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    elif all(point.y.mean >= 0 for line in points.values() for point in line):
        axes.set_ylim(bottom=0)


def _areas(axes: Axes, study: Study, panel: Panel, cases: Cases) -> None:
    """Draw means of series over all seeds of the panel's case, one on another."""
    seeds = values(cases[0], str(panel.measure))
    series = {name: np.mean([seed[name] for seed in seeds], axis=0) for name in seeds[0]}
    colours = [study.looks[name].colour for name in series]
    x = panel.step * np.arange(max(map(len, series.values())))
    axes.stackplot(x, [*series.values()], colors=colours, labels=[*series], step="post")


def _points(study: Study, panel: Panel, cases: Cases, line: Iterable[Case]) -> list[Point]:
    measures = [panel.measure] if isinstance(panel.measure, str) else panel.measure
    keys = [key for key in cases[0] if key != "seeds"]

    points = []
    for case in line:
        base = base_of(cases, case, panel.base, keys) if panel.base else None
        if panel.base and base is None:
            continue  # left out by --only

        def value(measure: str, case: Case = case, base: Case | None = base) -> Estimate:
            return ratio(base, case, measure) if base else mean(case, measure)

        known = panel.expected and None not in values(case, panel.expected)
        expected = value(panel.expected).mean if known else None
        for measure in measures:
            x = study.measures[measure][0] if len(measures) > 1 else key_of(case, panel.x)
            points.append(Point(x, value(measure), expected))
    return points


def _spread(panel: Panel, line: list[Point]) -> list[list[float]]:
    """Return lengths below and above the means; on a logarithmic axis none reaches zero."""
    above = [point.y.half or 0.0 for point in line]
    most = 0.9 if panel.log else float("inf")
    below = [min(half, most * point.y.mean) for half, point in zip(above, line)]
    return [below if panel.log else above, above]


def _line(axes: Axes, panel: Panel, line: list[Point], look: Look, label: str) -> None:
    x, y = [point.x for point in line], [point.y.mean for point in line]
    style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "ls": look.line}
    axes.errorbar(x, y, _spread(panel, line), capsize=3, label=label, **style)
    theory = [(point.x, point.expected) for point in line if point.expected is not None]
    if theory:
        axes.plot(*zip(*theory), "k:", label="expected")


def _bars(
    axes: Axes,
    panel: Panel,
    line: list[Point],
    places: list[Any],
    look: Look,
    label: str,
    order: tuple[int, int],
) -> None:
    """Draw the i-th of n bars of each group."""
    i, n = order
    width = 0.84 / n
    at = [places.index(point.x) + (i - (n - 1) / 2) * width for point in line]
    axes.bar(
        at,
        [point.y.mean for point in line],
        0.92 * width,
        yerr=_spread(panel, line),
        color=look.colour,
        ecolor="#333333",
        label=label,
    )
    for x, point in zip(at, line):
        if point.expected is not None:
            ends = [x - width / 2, x + width / 2]
            axes.plot(ends, [point.expected] * 2, "k-", lw=2, label="expected")


def _x_axis(axes: Axes, every: list[Any], is_numeric: bool) -> None:
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
