"""Tables of runs and of studies: as Markdown for pages, and for the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from client.analysis import overloaded
from client.results import KEYS, Json, Key, Point, Result, keys
from client.runs import SavedRun
from client.summary import line_text
from compare import sweep
from compare.analysis import Estimate, difference, estimate
from compare.sweep import Swept

Results = Mapping[str, Sequence[Result]]  # by server: one result per seed
TableRows = Sequence[Sequence[str]]  # a table's rows, the headings first
Case = tuple[Sequence[str], Sequence[Result]]  # a row: its names, and its results, one a seed

PRICE = "cost_per_million_tokens cost_per_thousand_within"
OF_RUN = keys(
    f"output_throughput goodput attainment {PRICE} mean_e2el_ms mean_tpot_ms "
    "mean_normalized_latency_ms useful_fraction occupancy largest_batch preemptions "
    "recomputed_tokens cached_tokens cached_fraction acceptance adapter_loads"
)
PERCENTILES = keys(
    "p50_ttft_ms p95_ttft_ms p99_ttft_ms p50_itl_ms p95_itl_ms p99_itl_ms "
    "p50_e2el_ms p95_e2el_ms p99_e2el_ms"
)
HEADLINES = OF_RUN, PERCENTILES  # a table each
COMPARED = keys(  # numbers whose differences are shown
    "output_throughput goodput mean_e2el_ms p99_e2el_ms p50_ttft_ms mean_tpot_ms "
    f"mean_normalized_latency_ms {PRICE} capacity goodput_rate"
)
STEPS = {"goodput_rate": sweep.STEP}  # steps of the lattices that values lie on
POINTS = keys(
    "rate ended achieved_rate offered_throughput output_throughput p50_normalized_latency_ms "
    f"p50_ttft_ms p99_e2el_ms goodput attainment {PRICE} occupancy preemptions recomputed_tokens "
    "cached_tokens cached_fraction acceptance adapter_loads growth growth_in_flight"
)
SWEPT = (  # headings of `_swept`
    "capacity, requests/s",
    "its queue begins to grow, requests/s",
    "throughput sustained, tok/s",
    "latency per token p50 there, ms",
    "highest rate within the limits, requests/s",
)
NONE = "–"
MOST = 1000  # columns of a table, however wide the terminal is


def markdown(rows: TableRows, left: int = 1) -> str:
    """A Markdown table, headings first, numbers right of `left` columns; pipes are quoted."""
    rows = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows]
    lines = [rows[0], ["---"] * left + ["--:"] * (len(rows[0]) - left), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True, slots=True)
class Terminal:
    """A table for the terminal, without intervals. One that is too wide is set closer, or shown in
    parts, below each other, so that no name and no number breaks; headings break between words.
    left: columns of text, which break only where they are too wide by themselves.
    """

    rows: TableRows
    left: int = 1
    caption: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        def fits(part: Table) -> bool:
            width = Measurement.get(console, options.update_width(MOST), part).maximum
            return width <= options.max_width

        n, shown = len(self.rows[0]), list(range(self.left))
        for padding in (1, 0):
            if fits(whole := self._part(range(n), self.caption, padding)):
                yield whole
                return
        for i in range(self.left, n):
            if len(shown) > self.left and not fits(self._part([*shown, i])):
                yield self._part(shown)
                shown = shown[: self.left]
            shown.append(i)
        yield self._part(shown, self.caption)

    def _part(self, columns: Sequence[int], caption: str | None = None, padding: int = 1) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption=caption,
            padding=(0, padding),
        )  # fmt: skip
        cells = [[self._cell(row, i) for i in columns] for row in self.rows[1:]]
        for place, i in enumerate(columns):
            heading, is_text = self.rows[0][i], i < self.left
            if not is_text and "\n" not in heading:
                width = max(map(len, [*heading.split(), *(row[place] for row in cells)]))
                heading = textwrap.fill(heading, width, break_on_hyphens=False)
            justify: Any = "left" if is_text else "right"
            table.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        return table

    def _cell(self, row: Sequence[str], i: int) -> str:
        return row[i] if i < self.left else re.sub(r" ± \S+", "", row[i])


# ---- cells


def formatted(value: Estimate, form: str, mean: str = "") -> str:
    """ "3,781 ± 40", or the mean alone where there is no interval; zero has no sign. mean: as it is
    shown, if not in this form.
    """
    text = (mean or form.format(value.mean)).replace("-", "−")
    text = text if re.search("[1-9]", text) else text.lstrip("+−")
    return text if value.half is None else f"{text} ± {form.format(value.half)}"


def signed(value: Estimate, form: str) -> str:
    """A difference, as `formatted`, with a plus where it is one."""
    return re.sub(r"^(?=[\d,.]*[1-9])", "+", formatted(value, form))


def cell_of(key: Key, results: Sequence[Result]) -> str:
    return cell(key, [result.number(key.name) for result in results])


def cell(key: Key, numbers: Sequence[Any]) -> str:
    """A number of each seed: its mean with its interval; a number alone for one seed. Or the words
    of all seeds.
    """
    if not (values := known(key, numbers)):
        return NONE
    if any(isinstance(value, str) for value in values):
        return "; ".join(dict.fromkeys(values))
    found = estimate(values, STEPS.get(key.name, 0.0))
    if len(values) == len(numbers):
        return formatted(found, key.form, key.shown(found.mean))
    # an interval of those that have it would claim too much
    mean = formatted(Estimate(found.mean, None), key.form, key.shown(found.mean))
    return f"{mean} ({len(values)} of {len(numbers)} seeds)"


def known(key: Key, numbers: Iterable[Any]) -> list[Any]:
    """Return the numbers that are known, as tables show them; or words."""
    known = [number for number in numbers if number is not None]
    return [each if isinstance(each, str) else each * key.scale for each in known]


def estimates(keys: Iterable[Key], results: Sequence[Result]) -> dict[str, Json]:
    """Return mean, half of the interval and values of each number that all seeds have."""
    return {
        key.name: {**asdict(estimate(values, STEPS.get(key.name, 0.0))), "values": values}
        for key in keys
        if None not in (values := [result.number(key.name) for result in results])
    }


def label(name: str, results: Sequence[Result]) -> str:
    """A server's name, marked where its numbers are not what they seem."""
    marks = [mark for mark in ("partial", "cut") if any(result.number(mark) for result in results)]
    marks += ["overloaded"] * bool(overloaded(*results))
    return f"{name} ({', '.join(marks)})" if marks else name


def labels(run: SavedRun) -> dict[str, str]:
    """Each server's name, and as it is marked."""
    return {name: label(name, seeds) for name, seeds in run.variants.items()}


# ---- rows


def rows_of(
    names: Sequence[str], columns: Sequence[Key], cases: Sequence[Case], short: bool = False
) -> list[list[str]]:
    """The headings, and a row for each case, of the columns that have a number. names: headings of
    the cases' names. short: for the terminal.
    """
    shown = present([key for key in columns if key.short or not short], cases)
    head = [*names, *(key.short if short else key.heading for key in shown)]
    return [head, *([*of, *(cell_of(key, seeds) for key in shown)] for of, seeds in cases)]


def answered(results: Sequence[Result]) -> str:
    """How many requests were answered, and how many failed."""
    done, failed = (sum(getattr(r, each) for r in results) for each in ("completed", "failed"))
    return f"{done:,}, {failed:,} failed" if failed else f"{done:,}"


def present(keys: Sequence[Key], cases: Iterable[Case]) -> list[Key]:
    """Keys that any result has; rare ones only where they would be shown as more than zero."""
    results = [result for _, seeds in cases for result in seeds]

    def is_shown(key: Key) -> bool:
        values = known(key, [result.number(key.name) for result in results])
        zero = key.shown(0) if key.rare else None
        return any(key.shown(value) != zero for value in values)

    return list(filter(is_shown, keys))


def of_variants(results: Results) -> list[Case]:
    """A case for each variant, by its name."""
    return [([label(name, seeds)], seeds) for name, seeds in results.items()]


def terminal_tables(results: Results, marked: str = "") -> Iterator[Terminal]:
    """The headline tables within 80 columns. marked: beside the heading of the names."""
    cases: list[Case] = [([name.replace(" (", "\n(")], r) for [name], r in of_variants(results)]
    for columns in HEADLINES:
        names = [f"variant{marked}".replace(" ", "\n")]
        yield Terminal(rows_of(names, columns, cases, short=True))


def headlines(results: Results, marked: str = "") -> str:
    """The headline tables of report.md; columns without a number are left out. marked: as above."""
    cases = of_variants(results)
    of_run, percentiles = (rows_of([f"variant{marked}"], each, cases) for each in HEADLINES)
    of_run[0] += ["latency of a request", "answered"]
    for row, (_, seeds) in zip(of_run[1:], cases):
        row += [mean_line(seeds), answered(seeds)]
    return f"{markdown(of_run)}\n\n{markdown(percentiles)}"


def mean_line(results: Sequence[Result]) -> str:
    """The lines of several seeds, averaged."""
    lines = [line for result in results if (line := result.latency_line)]
    return line_text({k: fmean(line[k] for line in lines) for k in lines[0]} if lines else None)


# ---- runs compared


def differences(results: Results, baseline: str) -> Sequence[Json]:
    """Each server and the baseline, and the paired difference (second - first) of each headline
    over the seeds both ran.

    Where a seed has no value of one of them, the difference has no interval: that of the others
    would claim too much.
    """
    entries, base = [], results[baseline]
    for name, seeds in results.items():
        if name == baseline:
            continue
        entry: dict[str, Any] = {"first": baseline, "second": name}
        for key in COMPARED:
            both = [(a.number(key.name), b.number(key.name)) for a, b in zip(base, seeds)]
            if pairs := [pair for pair in both if None not in pair]:
                first, second = np.array(pairs).T
                apart = difference(first, second, STEPS.get(key.name, 0.0))
                whole = len(pairs) == len(base) == len(seeds)
                entry[key.name] = apart if whole else Estimate(apart.mean, None)
        entries.append(entry)
    return entries


def differences_table(results: Results, baseline: str) -> str:
    """The differences with their intervals; "no difference shown" where one spans zero."""
    entries = differences(results, baseline)
    columns = [key for key in COMPARED if any(key.name in entry for entry in entries)]
    rows = [["second − first", *(key.heading for key in columns)]]
    for entry in entries:
        cells = [_difference(entry.get(key.name), key) for key in columns]
        second, first = (label(n, results[n]) for n in (entry["second"], entry["first"]))
        rows.append([f"{second} − {first}", *cells])
    return markdown(rows)


def _difference(value: Estimate | None, key: Key) -> str:
    if value is None:
        return NONE
    text = signed(value.times(key.scale), key.form)
    if value.half is None:
        text += ", not of all seeds"
    return text if value.shown else f"no difference shown ({text})"


def runs_table(runs: Mapping[str, Results], paired: bool) -> str:
    """Each server's headlines in several runs, and changes. paired: they have the same traces."""
    columns = present(COMPARED, (case for run in runs.values() for case in run.items()))
    rows = [["variant", "run", *(key.heading for key in columns)]]
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        first: dict[str, list[float]] = {}
        for run, results in runs.items():
            if seeds := results.get(name):
                cells = [_changed(key, seeds, first, paired) for key in columns]
                rows.append([label(name, seeds), run, *cells])
    return markdown(rows, left=2)


def _changed(
    key: Key, results: Sequence[Result], first: dict[str, list[float]], paired: bool
) -> str:
    """A number, and its ratio to that of the first run, which is kept in `first`."""
    numbers = [result.number(key.name) for result in results]
    text, values = cell(key, numbers), known(key, numbers)
    if not values or (base := first.setdefault(key.name, values)) is values or not fmean(base):
        return text
    ratio = f"× {fmean(values) / fmean(base):.2f}"
    if paired and len(values) == len(base) == len(results) > 1:
        shown = difference(base, values, STEPS.get(key.name, 0.0)).shown
        ratio += "" if shown else ", no difference shown"
    return f"{text} ({ratio})"


# ---- sweeps


def capacity_table(sweeps: Mapping[str, Sequence[Swept]], goodput: bool) -> str:
    """Results of sweeps, a list of outcomes (one a seed) for each server."""
    rows = [["variant", *SWEPT], *([name, *_swept(seeds)] for name, seeds in sweeps.items())]
    return markdown(rows if goodput else [row[:-1] for row in rows])


def sweep_table(points: Mapping[str, Sequence[Sequence[Point]]]) -> Terminal:
    """The state of a sweep, for the terminal. points: rates by server and seed."""
    rows = [["variant", "rates", *(heading.replace("requests", "req") for heading in SWEPT)]]
    for name, seeds in points.items():
        rates = str(sum(map(len, seeds)))
        rows.append([name, rates, *_swept([sweep.outcome(each) for each in seeds])])
    return Terminal(rows)


def _swept(outcomes: Sequence[Swept]) -> list[str]:
    """Cells of a sweep's outcome over seeds, as in SWEPT."""
    known = [outcome.sustained for outcome in outcomes if outcome.sustained]
    capacity = cell(KEYS["capacity"], [outcome.capacity for outcome in outcomes])
    if known and all(outcome.saturated_rate is None for outcome in outcomes):
        capacity = f"at least {min(point.request_throughput or 0.0 for point in known):.3g}"
    there = [cell_of(key, known) for key in keys("output_throughput p50_normalized_latency_ms")]
    grow = [(of.sustained.rate if of.sustained else None, of.saturated_rate) for of in outcomes]
    limits = [(each.goodput_rate, each.missed_rate) for each in outcomes]
    return [capacity, _between(grow), *there, _between(limits)]


def _between(borders: Sequence[tuple[float | None, float | None]]) -> str:
    """A border between two rates, "8.72 to 9.51"; the widest where there are several seeds."""
    below, above = ([rate for rate in rates if rate] for rates in zip(*borders))
    if len(below) < len(borders):
        return f"below {max(above):.3g}" if above else NONE
    if len(above) < len(borders):
        return f"above {min(below):.3g}"
    return f"{min(below):.3g} to {max(above):.3g}"


def points_table(points: Mapping[str, Sequence[Point]]) -> str:
    """Every rate of a sweep, marked where it was beyond the capacity."""
    every = [(name, point) for name, rates in points.items() for point in rates]
    head, *rows = rows_of(["variant"], POINTS, [([name], [point]) for name, point in every])
    said = ([*row, sweep.in_words(point)] for row, (_, point) in zip(rows, every))
    return markdown([[*head, "verdict"], *said])
