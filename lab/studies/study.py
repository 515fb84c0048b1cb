"""A study as data: its question, the cases that answer it, how one is run and how that is shown.

Tables and figures are made by those of reports (`compare.report`). Knows no scheduler, server or
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from client import results
from client.drawing import Style
from compare.analysis import Estimate, difference, estimate
from compare.report import panels
from compare.report.tables import NONE, cell, formatted, markdown, signed

Case = Mapping[str, Any]  # what is run, and how; "seeds": the measures of each seed's trace
Cases = Sequence[Case]
Keys = Mapping[str, Any]  # a case's; a tuple stands for any of its values
Key = str | Callable[[Case], Any]  # a case's key, or what is computed from the case


@dataclass(frozen=True)
class Against:
    """Paired comparison of each case with its base: the case with these values, else the same."""

    base: Keys
    gaps: Sequence[str] = ()  # measures whose difference is shown
    ratios: Sequence[str] = ()  # measures whose ratio is shown

    @property
    def name(self) -> str:
        """The base's measure in words."""
        return f"{next(iter(self.base.values()))}'s"


@dataclass(frozen=True)
class Table:
    """A row for each case: its keys, means of measures with intervals, and paired comparisons."""

    by: Sequence[str]
    measures: Sequence[str] = ()  # none: all
    against: Sequence[Against] = ()
    where: Keys = field(default_factory=dict)
    title: str = ""
    text: str = ""


@dataclass(frozen=True)
class Panel:
    """One part of the figure: lines over a key with numbers, or bars by a key with names or by
    measure.
    """

    title: str
    ylabel: str
    measure: str | Sequence[str] = ""
    x: Key = ""
    xlabel: str = ""
    line: Key = "variant"  # tells lines, or the bars of a group, apart
    where: Keys = field(default_factory=dict)
    base: Keys | None = None  # given: the ratio to it is drawn
    log: bool = False


@dataclass(frozen=True)
class Study:
    """A question, and how it is answered.

    cases: given the number of requests and the options, returns what is to be run.
    run: given a case, the number of requests and a seed, returns the measures of that seed's trace.
    """

    name: str
    title: str
    question: str
    workload: str  # in words; {n}: requests of a trace; {seeds}; and each option by its name
    cases: Callable[..., list[dict[str, Any]]]
    run: Callable[..., dict[str, Any]]
    measures: Mapping[str, tuple[str, str]]  # heading and format
    tables: Sequence[Table]
    panels: Sequence[Panel] = ()
    figure: str = ""  # the figure in words
    drawn: Callable[[Cases, str], Figure] | None = None  # draws it, instead of panels
    source: str = ""  # paper that makes the claim
    requests: int = 1000  # how many a trace has; 0: its runs need no number
    seeds: int = 5
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # default, help
    text: Callable[[Cases], str] | str = ""  # verdict and explanation, before the tables
    styles: Mapping[str, Style] = field(default_factory=dict)  # by name of a line or bar
    summarized: Callable[..., list[dict[str, Any]]] | None = None  # makes the cases from all runs
    bases: Sequence[str] = ()  # KEY=VALUE of cases with which others are compared, as in --only
    servers: bool = False  # real ones: runs are made one at a time, given the `FinishedRuns`


def grid(**axes: Iterable[Any]) -> Callable[[int], list[dict[str, Any]]]:
    """Return the cases of a study of any size: each combination of these values."""
    every = [dict(zip(axes, each)) for each in itertools.product(*axes.values())]
    return lambda n: every


def only(cases: Cases, keys: Keys) -> list[Case]:
    """Return the cases with these values."""

    def has(case: Case, key: str, value: Any) -> bool:
        return case[key] in value if isinstance(value, tuple) else bool(case[key] == value)

    return [case for case in cases if all(has(case, key, keys[key]) for key in keys)]


def key_of(case: Case, key: Key) -> Any:
    return key(case) if callable(key) else case[key]


def load_of(case: Case) -> float:
    return float(case["load"])


def values(case: Case, measure: str) -> list[Any]:
    """Return a measure of each seed."""
    return [seed[measure] for seed in case["seeds"]]


def mean(case: Case, measure: str) -> Estimate:
    """Return a measure's mean over seeds, with its interval."""
    return estimate(values(case, measure))


def ratio(base: Case, case: Case, measure: str) -> Estimate:
    """Return the paired ratio case ÷ base."""
    pairs = zip(values(base, measure), values(case, measure), strict=True)
    return estimate([value / base_value for base_value, value in pairs])


def gap_text(base: Case, case: Case, measure: str, form: str) -> str:
    """Return the paired difference case − base, or "none shown"."""
    gap = difference(values(base, measure), values(case, measure))
    text = signed(gap, form)
    return text if gap.shown and text[0] in "+−" else "none shown"


def base_of(cases: Cases, case: Case, base: Keys, keys: Sequence[str]) -> Case | None:
    """Return the case with the base's values, else the same values of these keys."""
    return next(iter(only(cases, {key: case[key] for key in keys} | {**base})), None)


def tables(study: Study, cases: Cases) -> str:
    """Return the study's text and all its tables in Markdown."""
    parts = [study.text(cases) if callable(study.text) else study.text]
    for table in study.tables:
        if rows := only(cases, table.where):
            parts += [f"## {table.title}" if table.title else "", table.text]
            parts.append(table_of(study, table, rows))
    return "\n\n".join(part for part in parts if part)


def table_of(study: Study, table: Table, cases: Cases) -> str:
    """Return one table in Markdown."""
    measures = table.measures or list(study.measures)
    rows = [[*(key.replace("_", " ") for key in table.by)]]
    rows[0] += [study.measures[measure][0] for measure in measures]
    for against in table.against:
        rows[0] += [_heading(study, measure, "−", against.name) for measure in against.gaps]
        rows[0] += [_heading(study, measure, "÷", against.name) for measure in against.ratios]
    for case in cases:
        cells = [_key_text(case[key]) for key in table.by]
        cells += [_mean_text(study, case, measure) for measure in measures]
        for against in table.against:
            cells += _compared(study, against, case, base_of(cases, case, against.base, table.by))
        rows.append(cells)
    return markdown(rows, left=len(table.by))


def _heading(study: Study, measure: str, sign: str, base: str) -> str:
    """Return "latency mean − fcfs's, s" for "latency mean, s"; a ratio has no unit."""
    label, comma, unit = study.measures[measure][0].rpartition(", ")
    label, unit = (label, comma + unit) if comma else (unit, "")
    return f"{label} {sign} {base}{unit if sign == '−' else ''}"


def _compared(study: Study, against: Against, case: Case, base: Case | None) -> list[str]:
    if base is None or base is case:
        return [NONE] * (len(against.gaps) + len(against.ratios))
    cells = [gap_text(base, case, name, study.measures[name][1]) for name in against.gaps]
    for name in against.ratios:
        known = None not in values(base, name) + values(case, name)
        cells.append(formatted(ratio(base, case, name), "{:.2f}") if known else NONE)
    return cells


def _key_text(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean_text(study: Study, case: Case, measure: str) -> str:
    of_seeds = [seed.get(measure) for seed in case["seeds"]]
    heading, form = study.measures[measure]
    if len({*of_seeds}) == 1 and isinstance(of_seeds[0], int | float):
        # a closed form, or the same by its nature: no spread to show
        return formatted(Estimate(of_seeds[0], None), form)
    return cell(results.Key(measure, heading, form=form), of_seeds)


def figure(study: Study, cases: Cases, caption: str) -> Figure | None:
    """Draw the panels for which there are cases; None if there are none for any."""
    of_panels = [(panel, only(cases, panel.where)) for panel in study.panels]
    drawn = [_drawn(study, panel, found) for panel, found in of_panels if found]
    return panels.figure(drawn, study.styles, caption) if drawn else None


def _drawn(study: Study, panel: Panel, cases: Cases) -> panels.FigurePanel:
    """Return what a panel shows of these cases."""
    lines: dict[str, list[panels.Point]] = {}
    for case in cases:
        line = lines.setdefault(str(key_of(case, panel.line)), [])
        line += _points(study, panel, cases, case)
    return panels.FigurePanel(
        title=panel.title,
        xlabel=panel.xlabel,
        ylabel=panel.ylabel,
        lines=lines,
        log=panel.log,
    )


def _points(study: Study, panel: Panel, cases: Cases, case: Case) -> Iterable[panels.Point]:
    measures = [panel.measure] if isinstance(panel.measure, str) else panel.measure
    base = None
    if panel.base:
        keys = [key for key in case if key != "seeds"]
        if (base := base_of(cases, case, panel.base, keys)) is None:
            return  # left out by --only

    def value(measure: str) -> Estimate:
        return ratio(base, case, measure) if base else mean(case, measure)

    for measure in measures:
        x = study.measures[measure][0] if len(measures) > 1 else key_of(case, panel.x)
        yield panels.Point(x, value(measure))
