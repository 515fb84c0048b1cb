"""Tables and lines of a comparison, for the terminal and for report.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from client import sweep
from client.analysis import Estimate, difference, estimate

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # of each server, a result a seed

# key of a result, heading in report.md, short heading for the terminal (none: not shown there),
# scale, format
COLUMNS = [
    ("output_throughput", "throughput, tok/s", "tok/s", 1, "{:,.0f}"),
    ("goodput", "goodput, requests/s", "", 1, "{:.2f}"),
    ("mean_e2el_ms", "latency mean, s", "mean\ns", 1e-3, "{:.2f}"),
    ("p99_e2el_ms", "latency p99, s", "p99\ns", 1e-3, "{:.2f}"),
    ("p50_ttft_ms", "first token p50, s", "ttft\np50 s", 1e-3, "{:.2f}"),
    ("mean_normalized_latency_ms", "latency per token mean, ms", "ms per\ntoken", 1, "{:.1f}"),
    ("useful_fraction", "useful rows, %", "useful\n%", 100, "{:.0f}"),
    ("occupancy", "occupancy, %", "", 100, "{:.0f}"),  # not in 80 columns
    ("largest_batch", "largest batch, rows", "largest\nbatch", 1, "{:.0f}"),
]
COMPARED = [  # of which differences are shown
    *COLUMNS[:6],
    ("capacity", "capacity, requests/s", "", 1, "{:.3g}"),
    ("goodput_rate", "highest rate within limits, requests/s", "", 1, "{:.3g}"),
]
STEPS = {"goodput_rate": sweep.STEP}  # of the lattices that values lie on
POINTS = [
    ("rate", "requests/s", 1, "{:g}"),
    ("requests", "requests", 1, "{:g}"),
    ("achieved_rate", "as sent, requests/s", 1, "{:.4g}"),
    ("offered_throughput", "asked for, tok/s", 1, "{:,.0f}"),
    ("output_throughput", "throughput, tok/s", 1, "{:,.0f}"),
    ("p50_normalized_latency_ms", "latency per token p50, ms", 1, "{:.1f}"),
    ("p50_ttft_ms", "first token p50, s", 1e-3, "{:.2f}"),
    ("p99_e2el_ms", "latency p99, s", 1e-3, "{:.2f}"),
    ("goodput", "goodput, requests/s", 1, "{:.2f}"),
    ("attainment", "within limits, %", 100, "{:.0f}"),
    ("occupancy", "occupancy, %", 100, "{:.0f}"),
    ("growth", "growth, s/s", 1, "{:.2f}"),
    ("growth_in_flight", "growth in flight, %", 100, "{:.0f}"),
]
NONE = "–"


def cell(values: Sequence[float | None], scale: float, form: str, step: float = 0.0) -> str:
    """A mean over seeds with its interval; a number alone for one seed. step: of the values'
    lattice.
    """
    known = [value * scale for value in values if value is not None]
    if not known:
        return NONE
    if len(known) < len(values):  # an interval of those that have it would claim too much
        return (
            f"{told(Estimate(estimate(known).mean, None), form)} ({len(known)} of {len(values)} "
            f"seeds)"
        )
    return told(estimate(known, step), form)


def told(value: Estimate, form: str) -> str:
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
    """The least-squares line of a mode: "0.03 s + 7.8 ms per token, r = 0.92"."""
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


def terminal_table(results: Results) -> Table:
    """Fits 80 columns; means over seeds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("variant", no_wrap=True)
    shown = [column for column in COLUMNS if column[2]]
    for _, _, short, _, _ in shown:
        table.add_column(short, justify="right", no_wrap=True)
    for name, mine in results.items():
        cells = [
            cell([r.get(key) for r in mine], scale, form).split(" ±")[0]
            for key, _, _, scale, form in shown
        ]
        table.add_row(label(name, mine), *cells)
    return table


def markdown_table(results: Results) -> str:
    """The headline table; a column that nobody has is left out."""
    columns = [
        c
        for c in COLUMNS
        if any(r.get(c[0]) is not None for mine in results.values() for r in mine)
    ]
    rows = [
        [
            "variant",
            *(heading for _, heading, _, _, _ in columns),
            "latency of a request",
            "answered",
        ]
    ]
    for name, mine in results.items():
        answered, failed = sum(r["completed"] for r in mine), sum(r["failed"] for r in mine)
        row = [
            label(name, mine),
            *(cell([r.get(key) for r in mine], scale, form) for key, _, _, scale, form in columns),
        ]
        row += [line_text(mine[0]["fairness"]) if len(mine) == 1 else mean_line(mine)]
        rows.append([*row, f"{answered}, {failed} failed" if failed else str(answered)])
    return markdown(rows)


def mean_line(results: Sequence[Mapping[str, Any]]) -> str:
    """The lines of several seeds, averaged."""
    lines = [result["fairness"] for result in results if result["fairness"]]
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
        for key, _, _, scale, _ in COMPARED:
            pairs = [
                (a[key], b[key])
                for a, b in zip(one, two)
                if a.get(key) is not None and b.get(key) is not None
            ]
            if pairs:
                apart = difference(
                    [a * scale for a, _ in pairs],
                    [b * scale for _, b in pairs],
                    STEPS.get(key, 0.0),
                )
                whole = len(pairs) == len(one) == len(two)
                entry[key] = apart if whole else Estimate(apart.mean, None)
        found.append(entry)
    return found


def differences_table(results: Results, baseline: str) -> str:
    """The differences in words: with their intervals, and "no difference shown" where one spans
    zero or there is none.
    """
    found = differences(results, baseline)
    columns = [c for c in COMPARED if any(c[0] in entry for entry in found)]
    rows = [["second − first", *(heading for _, heading, _, _, _ in columns)]]
    for entry in found:
        cells = [
            _difference(entry[key], form) if key in entry else NONE
            for key, _, _, _, form in columns
        ]
        rows.append([f"{entry['second']} − {entry['first']}", *cells])
    return markdown(rows)


def _difference(value: Estimate, form: str) -> str:
    text = told(value, form)
    text = text if text.startswith("−") else f"+{text}"
    if value.half is None:
        text += ", not of all seeds"
    return text if value.shown else f"no difference shown ({text})"


def runs_table(runs: Mapping[str, Results], paired: bool) -> str:
    """Each server's headlines in several runs, and how they changed from the first that has it.

    paired: all ran the same traces, so that with several seeds the change has an interval.
    """
    columns = [
        c
        for c in COMPARED
        if any(
            r.get(c[0]) is not None for run in runs.values() for mine in run.values() for r in mine
        )
    ]
    rows = [["variant", "run", *(heading for _, heading, _, _, _ in columns)]]
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        base: dict[str, list[float]] = {}
        for run, results in runs.items():
            if name not in results:
                continue
            cells = []
            for key, _, _, scale, form in columns:
                step = STEPS.get(key, 0.0)
                text = cell([r.get(key) for r in results[name]], scale, form, step)
                values = [r[key] * scale for r in results[name] if r.get(key) is not None]
                if (
                    values
                    and (first := base.setdefault(key, values)) is not values
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
            "capacity, requests/s",
            "its queue begins to grow, requests/s",
            "throughput sustained, tok/s",
            "latency per token p50 there, ms",
        ]
    ]
    if goodput:
        rows[0].append("highest rate within the limits, requests/s")
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
    known = {"requests"} | {
        key
        for mine in points.values()
        for p in mine
        for key, value in p.items()
        if value is not None
    }
    columns = [column for column in POINTS if column[0] in known]
    rows = [["variant", *(heading for _, heading, _, _ in columns), "verdict"]]
    for name, mine in points.items():
        for point in mine:
            told_of = {"requests": point["completed"] + point["failed"], **point}
            cells = [cell([told_of.get(key)], scale, form) for key, _, scale, form in columns]
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
    for heading in ("variant", "rates", "capacity, requests/s", "queue grows, requests/s", "tok/s "
                                                                                           "sustained",
                    "ms per token there", "within limits, requests/s"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, mine in points.items():
        found = sweep.outcome(mine)
        best = found["point"] or {}
        cells = [
            cell([found["capacity"]], 1, "{:.3g}"),
            between([found], "sustained_rate", "saturated_rate"),
        ]
        cells += [
            cell([best.get(key)], 1, form)
            for key, form in (
                ("output_throughput", "{:,.0f}"),
                ("p50_normalized_latency_ms", "{:.1f}"),
            )
        ]
        table.add_row(name, str(len(mine)), *cells, between([found], "goodput_rate", "missed_rate"))
    return table
