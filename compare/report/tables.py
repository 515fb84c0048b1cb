"""Tables and lines of a comparison, for the terminal and for report.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from compare import sweep
from compare.analysis import Estimate, difference, estimate
from compare.results import KEYS, Key, keys

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # of each server, a result a seed

HEADLINES = keys(
    "output_throughput", "goodput", "mean_e2el_ms", "p99_e2el_ms", "p50_ttft_ms",
    "mean_normalized_latency_ms", "useful_fraction", "occupancy", "largest_batch",
    "preemptions", "recomputed_tokens", "cached_tokens", "cached_fraction",
)  # fmt: skip
COMPARED = [*HEADLINES[:6], *keys("capacity", "goodput_rate")]  # of which differences are shown
STEPS = {"goodput_rate": sweep.STEP}  # of the lattices that values lie on
POINTS = keys(
    "rate", "requests", "achieved_rate", "offered_throughput", "output_throughput",
    "p50_normalized_latency_ms", "p50_ttft_ms", "p99_e2el_ms", "goodput", "attainment",
    "occupancy", "preemptions", "recomputed_tokens", "cached_tokens", "cached_fraction",
    "growth", "growth_in_flight",
)  # fmt: skip
NONE = "–"


def cell(values: Sequence[float | None], scale: float, form: str, step: float = 0.0) -> str:
    """A mean over seeds with its interval; a number alone for one seed. step: of the values'
    lattice.
    """
    known = [value * scale for value in values if value is not None]
    if not known:
        return NONE
    if len(known) < len(values):  # an interval of those that have it would claim too much
        mean = formatted(Estimate(estimate(known).mean, None), form)
        return f"{mean} ({len(known)} of {len(values)} seeds)"
    return formatted(estimate(known, step), form)


def cell_of(key: Key, results: Sequence[Mapping[str, Any]]) -> str:
    """What some seeds have of a number."""
    step = STEPS.get(key.name, 0.0)
    return cell([key.of(result) for result in results], key.scale, key.form, step)


def present(keys: Sequence[Key], runs: Iterable[Results]) -> list[Key]:
    """Those that anybody has; rare ones where they would be told as more than zero."""
    found = [result for run in runs for mine in run.values() for result in mine]
    return [key for key in keys if any(_is_told(key, key.of(result)) for result in found)]


def _is_told(key: Key, value: Any) -> bool:
    if value is None or not key.rare:
        return value is not None
    return key.form.format(value * key.scale) != key.form.format(0)


def formatted(value: Estimate, form: str) -> str:
    """ "3,781 ± 40", or the mean alone where there is no interval."""
    text = form.format(value.mean).replace("-", "−")
    return text if value.half is None else f"{text} ± {form.format(value.half)}"


def markdown(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table of a heading row and rows; all but the first `left` columns are numbers.
    Cells may hold pipes.
    """
    rows = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows]
    lines = [rows[0], ["---"] * left + ["--:"] * (len(rows[0]) - left), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def line_text(line: Mapping[str, float] | None) -> str:
    """The least-squares line of a variant: "0.03 s + 7.8 ms per token, r = 0.92"."""
    if line is None:
        return "no line"
    sign, slope = (
        "−" if line["slope_s_per_token"] < 0 else "+",
        abs(line["slope_s_per_token"]) * 1e3,
    )
    text = f"{line['intercept_s']:.2f} s {sign} {slope:.1f} ms per token, r = {line['r']:.2f}"
    return text.replace("-", "−").replace("−0.00", "0.00")


def label(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    return f"{name} (partial)" if any(result["partial"] for result in results) else name


def terminal_table(results: Results, marked: str = "") -> Table:
    """Fits 80 columns; means over seeds. marked: beside the heading of the names."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("variant" + marked.replace(" ", "\n"), no_wrap=True)
    shown = [key for key in HEADLINES if key.short]
    for key in shown:
        table.add_column(key.short, justify="right", no_wrap=True)
    for name, mine in results.items():
        cells = [cell_of(key, mine).split(" ±")[0] for key in shown]
        table.add_row(label(name, mine), *cells)
    return table


def markdown_table(results: Results, marked: str = "") -> str:
    """The headline table; a column that nobody has is left out. marked: as above."""
    columns = present(HEADLINES, [results])
    heading = [f"variant{marked}", *(key.heading for key in columns)]
    rows = [[*heading, "latency of a request", "answered"]]
    for name, mine in results.items():
        answered, failed = sum(r["completed"] for r in mine), sum(r["failed"] for r in mine)
        row = [label(name, mine), *(cell_of(key, mine) for key in columns)]
        row += [line_text(mine[0]["latency_line"]) if len(mine) == 1 else mean_line(mine)]
        rows.append([*row, f"{answered}, {failed} failed" if failed else str(answered)])
    return markdown(rows)


def mean_line(results: Sequence[Mapping[str, Any]]) -> str:
    """The lines of several seeds, averaged."""
    lines = [result["latency_line"] for result in results if result["latency_line"]]
    return line_text(
        {key: sum(line[key] for line in lines) / len(lines) for key in lines[0]} if lines else None
    )


def differences(results: Results, baseline: str) -> list[dict[str, Any]]:
    """Each server and the baseline, and the paired difference (second - first) of each headline
    over the seeds both ran.

    Where a seed has no value of one of them, the difference has no interval: that of the others
    would claim too much.
    """
    found = []
    one = results[baseline]
    for second, two in results.items():
        if second == baseline:
            continue
        entry: dict[str, Any] = {"first": baseline, "second": second}
        for key in COMPARED:
            both = [(key.of(a), key.of(b)) for a, b in zip(one, two)]
            pairs = [
                (a * key.scale, b * key.scale) for a, b in both if a is not None and b is not None
            ]
            if pairs:
                first, last = [a for a, _ in pairs], [b for _, b in pairs]
                apart = difference(first, last, STEPS.get(key.name, 0.0))
                whole = len(pairs) == len(one) == len(two)
                entry[key.name] = apart if whole else Estimate(apart.mean, None)
        found.append(entry)
    return found


def differences_table(results: Results, baseline: str) -> str:
    """The differences in words: with their intervals, and "no difference shown" where one spans
    zero or there is none.
    """
    found = differences(results, baseline)
    columns = [key for key in COMPARED if any(key.name in entry for entry in found)]
    rows = [["second − first", *(key.heading for key in columns)]]
    for entry in found:
        cells = [
            _difference(entry[key.name], key.form) if key.name in entry else NONE for key in columns
        ]
        rows.append([f"{entry['second']} − {entry['first']}", *cells])
    return markdown(rows)


def _difference(value: Estimate, form: str) -> str:
    text = formatted(value, form)
    text = text if text.startswith("−") else f"+{text}"
    if value.half is None:
        text += ", not of all seeds"
    return text if value.shown else f"no difference shown ({text})"


def runs_table(runs: Mapping[str, Results], paired: bool) -> str:
    """Each server's headlines in several runs, and how they changed from the first that has it.

    paired: all ran the same traces, so that with several seeds the change has an interval.
    """
    columns = present(COMPARED, runs.values())
    rows = [["variant", "run", *(key.heading for key in columns)]]
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        base: dict[str, list[float]] = {}
        for run, results in runs.items():
            if name not in results:
                continue
            cells = []
            for key in columns:
                step = STEPS.get(key.name, 0.0)
                text = cell_of(key, results[name])
                values = [v * key.scale for r in results[name] if (v := key.of(r)) is not None]
                if (
                    values
                    and (first := base.setdefault(key.name, values)) is not values
                    and estimate(first).mean
                ):
                    text += f" (× {estimate(values).mean / estimate(first).mean:.2f}"
                    if paired and len(values) == len(first) == len(results[name]) > 1:
                        text += (
                            "" if difference(first, values, step).shown else ", no difference shown"
                        )
                    text += ")"
                cells.append(text)
            rows.append([label(name, results[name]), run, *cells])
    return markdown(rows, left=2)


def capacity_table(sweeps: Mapping[str, Sequence[Mapping[str, Any]]], goodput: bool) -> str:
    """What sweeps found, a list of outcomes (one a seed) for each server."""
    rows = [
        [
            "variant",
            KEYS["capacity"].heading,
            "its queue begins to grow, requests/s",
            "throughput sustained, tok/s",
            "latency per token p50 there, ms",
        ]
    ]
    if goodput:
        rows[0].append(KEYS["goodput_rate"].heading)
    for name, found in sweeps.items():
        known = [outcome["point"] for outcome in found if outcome["point"]]
        capacity = cell([outcome["capacity"] for outcome in found], 1, "{:.3g}")
        if known and all(outcome["saturated_rate"] is None for outcome in found):
            capacity = f"at least {min(point['request_throughput'] for point in known):.3g}"
        row = [name, capacity, between(found, "sustained_rate", "saturated_rate")]
        row += [cell([point["output_throughput"] for point in known], 1, "{:,.0f}")]
        row += [cell([point["p50_normalized_latency_ms"] for point in known], 1, "{:.1f}")]
        if goodput:
            row += [between(found, "goodput_rate", "missed_rate")]
        rows.append(row)
    return markdown(rows)


def between(outcomes: Sequence[Mapping[str, Any]], low: str, high: str) -> str:
    """Where a border lies, of which sweeps know two rates of the lattice, one below and one above
    it: "8.72 to 9.51".

    Of several seeds the widest.
    """
    below = [outcome[low] for outcome in outcomes if outcome[low]]
    above = [outcome[high] for outcome in outcomes if outcome[high]]
    if len(below) < len(outcomes):
        return f"below {max(above):.3g}" if above else NONE
    return (
        f"{min(below):.3g} to {max(above):.3g}"
        if len(above) == len(outcomes)
        else f"above {min(below):.3g}"
    )


def points_table(points: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Every rate of a sweep, marked where it was beyond the capacity."""
    shown = {
        name: [{"requests": point["completed"] + point["failed"], **point} for point in mine]
        for name, mine in points.items()
    }
    columns = present(POINTS, [shown])
    rows = [["variant", *(key.heading for key in columns), "verdict"]]
    for name, mine in shown.items():
        for point in mine:
            cells = [cell_of(key, [point]) for key in columns]
            rows.append([name, *cells, point_verdict(point)])
    return markdown(rows)


def point_verdict(point: Mapping[str, Any]) -> str:
    verdict = (
        ["requests failed" if point["failed"] else "the queue only grows"]
        if point["saturated"]
        else ["sustained"]
    )
    if point["client_behind"]:
        verdict = ["the client is behind"]
    return ", ".join(verdict + ["client late"] * bool(point["client_limited"]))


def point_line(name: str, point: Mapping[str, Any]) -> str:
    """A point of a sweep in a line, as it is measured."""
    latency = point["p50_normalized_latency_ms"]
    text = (
        f"{name:>8} at {point['rate']:>6g} requests/s: {point['output_throughput']:>7,.0f} tok/s, "
    )
    text += f"{latency:,.1f} ms per token" if latency is not None else "no answer"
    if point["attainment"] is not None:
        text += f", {100 * point['attainment']:.0f}% within limits"
    return f"{text}; {point_verdict(point)}"


def result_line(name: str, result: Mapping[str, Any]) -> str:
    """A measurement in a line, as it ends."""
    text = (
        f"{name:>8}: {result['completed']} answered, {result['failed']} failed, "
        f"{result['output_throughput']:,.0f} tok/s"
    )
    return text + (
        ", interrupted" if result["partial"] else f", after {result['wall_clock_s']:.1f} s"
    )


def sweep_table(points: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Where a sweep stands, for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in (
        "variant", "rates", "capacity, requests/s", "queue grows, requests/s", "tok/s sustained",
        "ms per token there", "within limits, requests/s",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, mine in points.items():
        found = sweep.outcome(mine)
        best = found["point"] or {}
        cells = [
            cell_of(KEYS["capacity"], [found]),
            between([found], "sustained_rate", "saturated_rate"),
            *(
                cell_of(key, [best])
                for key in keys("output_throughput", "p50_normalized_latency_ms")
            ),
        ]
        table.add_row(name, str(len(mine)), *cells, between([found], "goodput_rate", "missed_rate"))
    return table
