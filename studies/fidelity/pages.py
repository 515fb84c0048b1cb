"""Tables and a figure of how the simulator does beside real servers. Knows no server."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare.analysis import Estimate
from compare.report.drawing import PALETTE, STYLE, caption_of, plain_log
from compare.report.tables import NONE, formatted, markdown
from studies.fidelity.judging import BY_SPREAD, JUDGED, MET, MISSED, REPORTED
from studies.fidelity.tasks import PLAIN

Cells = Sequence[Mapping[str, Any]]
DRAWN = "simulated against measured latencies: p10, p50, p90 and p99 of each case"
BAND = 0.10
SIDES = ("measured", "simulated")
COLOURS = (*PALETTE, "#a6761d")  # of variants
GREY = "#e4e4e4"
MARKERS = ("v", "o", "s", "D", "^")  # of loads, from light to heavy
NAMES = {
    "capacity": "capacity, within 3%",
    "p50_e2e": f"median latency, within 5% up to {JUDGED:g}",
    "p99_e2e": f"p99 latency, within 10% up to {JUDGED:g}",
}
HOW = """\
Error: simulated ÷ measured − 1, in seconds where it says ms. Latencies are the client's, of all \
requests of all seeds together; ±: 95%, by leaving out a seed at a time. Spread: by how much two \
real runs of the same traces by fresh servers are apart, by the same measure. *met*: the error is \
below its target; *met by spread*: it is not, but below the spread; *missed*: neither; *reported*: \
no target at this load, or p99 of fewer than 2,000 real requests. Load: the rate of a trace as a \
part of the capacity, which is that of the case's first burst."""
MADE_OF = """\
Means over runs, simulated by real. Time in iterations: the sum of all iterations' seconds; if it \
is off while their number is not, iterations take other than the costs say. Cold: by how much the \
first hundred iterations of a fresh server took longer than the median of as many rows in the same \
run. Gap: from an iteration's end to the next one's beginning while a request is there, mean. \
HTTP: by how much the client's latency is beyond the server's own, median. Late: by how much the \
client sends later than scheduled, p99; a simulated one never does. Machine noise is the spread \
above."""


def body(cells: Cells) -> str:
    bursts = [cell for cell in cells if cell["load"] is None]
    loaded = [cell for cell in cells if cell["load"] is not None]
    made = [
        ("Capacity", capacities, bursts),
        ("Latency", latencies, loaded),
        ("First token, and time per token", tokens, loaded),
    ]
    sections = [f"## {heading}\n\n{table(mine)}" for heading, table, mine in made if mine]
    sections.append(f"## What the errors are made of\n\n{MADE_OF}\n\n{origins(cells)}")
    return "\n\n".join([f"{summary(cells)}\n\n{HOW}", *sections])


def summary(cells: Cells) -> str:
    rows = [["servers", "measure", MET, BY_SPREAD, MISSED, REPORTED, "mean |error|", "worst"]]
    for part in dict.fromkeys(cell["part"] for cell in cells):
        for name, heading in NAMES.items():
            errors = [
                cell["errors"][name]
                for cell in cells
                if cell["part"] == part and name in cell["errors"]
            ]
            judged = [abs(e["error"]) for e in errors if e["verdict"] != REPORTED]
            if judged:
                n = Counter(error["verdict"] for error in errors)
                counts = [str(n[verdict]) for verdict in (MET, BY_SPREAD, MISSED, REPORTED)]
                sizes = [f"{sum(judged) / len(judged):.1%}", f"{max(judged):.1%}"]
                rows.append([part, heading, *counts, *sizes])
    return markdown(rows, left=2)


def capacities(cells: Cells) -> str:
    heading = ["servers", "variant", "trace", "measured, tok/s", "simulated", "error", "spread"]
    rows = [[*heading, "verdict"]]
    for cell in cells:
        error = cell["errors"]["capacity"]
        sides = [f"{error[side]:,.0f}" for side in SIDES]
        rows.append([*_case(cell), *sides, *_percent(error), _shown(error["verdict"])])
    return markdown(rows, left=3)


def latencies(cells: Cells) -> str:
    heading = ["servers", "variant", "trace", "load"]
    for name in ("median", "p99"):
        heading += [f"{name}, ms", "simulated", "error", "spread", "verdict"]
    rows = [[*heading, "seeds × runs × requests"]]
    for cell in cells:
        row = [*_case(cell), f"{cell['load']:g}"]
        for name in ("p50_e2e", "p99_e2e"):
            error = cell["errors"][name]
            sides = [f"{1e3 * error[side]:,.0f}" for side in SIDES]
            row += [*sides, *_percent(error), _shown(error["verdict"])]
        n = [cell[of] for of in ("seeds", "repeats", "requests")]
        rows.append([*row, " × ".join(map(str, n))])
    return markdown(rows, left=3)


def tokens(cells: Cells) -> str:
    heading = ["servers", "variant", "trace", "load"]
    for name in ("TTFT p50", "TTFT p99"):
        heading += [f"{name}, ms", "error, ms", "spread"]
    rows = [[*heading, "TPOT p50, ms", "error", "spread"]]
    for cell in cells:
        errors, row = cell["errors"], [*_case(cell), f"{cell['load']:g}"]
        for name in ("p50_ttft", "p99_ttft"):
            error = errors[name]
            row += [f"{1e3 * error['measured']:,.1f}", *_scaled(error, 1e3, "{:+.1f}", "{:.1f}")]
        error = errors["p50_tpot"]
        rows.append([*row, f"{1e3 * error['measured']:,.2f}", *_percent(error)])
    return markdown(rows, left=3)


def origins(cells: Cells) -> str:
    heading = ["servers", "variant", "trace", "load", "iterations", "time in iterations"]
    heading += ["cold", "gap, µs", "simulated", "HTTP, ms", "simulated", "late, ms"]
    rows = [[*heading, "preemptions", "simulated", "failed"]]
    for cell in cells:
        real, mine = cell["made_of"]["measured"], cell["made_of"]["simulated"]
        whole = [side["iterations"] * side["iteration_s"] for side in (mine, real)]
        row = [*_case(cell), "burst" if cell["load"] is None else f"{cell['load']:g}"]
        row.append(_signed(mine["iterations"] / real["iterations"] - 1))
        row.append(_signed(whole[0] / whole[1] - 1))
        fresh = cell["load"] is None
        row.append(_signed(real["cold"] - 1) if fresh else NONE)
        row += [f"{1e6 * side['gap_s']:,.0f}" for side in (real, mine)]
        row += [f"{1e3 * side['http_s']:.2f}" for side in (real, mine)]
        row.append(f"{1e3 * real['lag_s']:.1f}")
        row += [f"{side['preemptions']:,.0f}" for side in (real, mine)]
        rows.append([*row, str(sum(cell["failed"].values()))])
    return markdown(rows, left=3)


def _case(cell: Mapping[str, Any]) -> list[str]:
    return [cell["part"], cell["variant"], cell["kind"]]


def _shown(verdict: str) -> str:
    return f"**{verdict}**" if verdict == MISSED else verdict


def _signed(part: float) -> str:
    return f"{part:+.1%}".replace("-", "−")


def _percent(error: Mapping[str, Any]) -> list[str]:
    return _scaled(error, 100, "{:+.1f}%", "{:.1f}%")


def _scaled(error: Mapping[str, Any], scale: float, form: str, size: str) -> list[str]:
    """An error with its interval, and the spread."""
    half, spread = error["half"], error["spread"]
    text = formatted(Estimate(scale * error["error"], None), form)
    return [
        text if half is None else f"{text} ± {size.format(scale * half)}",
        NONE if spread is None else size.format(scale * spread),
    ]


def figure(cells: Cells, caption: str) -> Figure:
    """Simulated against measured latency, and the error below: a column of each model's servers, a
    colour a variant, a marker a load.
    """
    cells = [cell for cell in cells if cell["load"] is not None]
    parts = list(dict.fromkeys(cell["part"] for cell in cells))
    colours = dict(zip(dict.fromkeys(cell["variant"] for cell in cells), COLOURS))
    loads = dict(zip(sorted({cell["load"] for cell in cells}), MARKERS))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(5.4 * max(1, len(parts)) + 2.6, 7.6), layout="constrained")
        panels = drawn.subplots(
            2, max(1, len(parts)), squeeze=False, sharex="col", height_ratios=(2.4, 1)
        )
        for (upper, lower), part in zip(panels.T, parts):
            mine = [cell for cell in cells if cell["part"] == part]
            for cell in mine:
                measured, simulated = (1e3 * np.array(cell["quantiles_s"][side]) for side in SIDES)
                colour = colours[cell["variant"]]
                look = {"color": colour, "mfc": colour if cell["kind"] == PLAIN else "none"}
                for axis, values in ((upper, simulated), (lower, 100 * (simulated / measured - 1))):
                    axis.plot(measured, values, loads[cell["load"]], **look, ms=6, alpha=0.8)
            _identity(
                upper, [s for cell in mine for of in cell["quantiles_s"].values() for s in of]
            )
            upper.set(title=f"{part} servers")
            lower.axhspan(-100 * BAND, 100 * BAND, color=GREY, lw=0, zorder=0)
            lower.axhline(0, color="#555555", lw=1, zorder=0)
            lower.set(xlabel="measured latency, ms (log scale)")
            lower.grid(alpha=0.25)
        panels[0, 0].set_ylabel("simulated latency, ms (log scale)")
        panels[1, 0].set_ylabel("error, %")
        drawn.legend(handles=_keys(colours, loads), loc="outside right center", fontsize=11)
        fits = 75 * max(1, len(parts))
        caption_of(drawn, textwrap.fill(f"p10, p50, p90 and p99 of each case; {caption}", fits))
    return drawn


def _identity(axis: Any, seconds: Sequence[Sequence[float]]) -> None:
    """Where simulated is measured, and a band about it."""
    ends = np.array([np.min(seconds) / 1.25, np.max(seconds) * 1.25]) * 1e3
    axis.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=GREY, lw=0, zorder=0)
    axis.plot(ends, ends, color="#555555", lw=1, zorder=0)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for text, x, y, side in (
        ("simulated is too slow", 0.04, 0.96, ("left", "top")),
        ("simulated is too fast", 0.96, 0.04, ("right", "bottom")),
    ):
        axis.text(x, y, text, transform=axis.transAxes, ha=side[0], va=side[1], color="#777777")
    plain_log(axis.xaxis)
    plain_log(axis.yaxis)
    axis.grid(alpha=0.25)


def _keys(colours: Mapping[str, str], loads: Mapping[float, str]) -> list[Any]:
    def key(marker: str, label: str, **look: Any) -> Line2D:
        return Line2D([], [], ls="", marker=marker, label=label, **look)

    keys: list[Any] = [key("o", name, color=colour) for name, colour in colours.items()]
    keys += [key(marker, f"load {load:g}", color="#555555") for load, marker in loads.items()]
    keys.append(key("o", "other traces: hollow", color="#555555", mfc="none"))
    return [*keys, Patch(color=GREY, label=f"± {BAND:.0%}")]
