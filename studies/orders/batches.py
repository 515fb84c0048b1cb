"""Batches of alike lengths beside the closed forms: `static`, sorted and in bins, and `dynamic`, on
a queue that is never empty.

Lengths are uniform. A batch of B rows then uses mean(g) / E[max of B draws of g] of them; k bins of
equal mass complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times as much (Guldogan et al., 2024).
"""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.report.drawing import STYLE, caption_of
from compare.report.tables import formatted, markdown
from scheduling.inference import IterationRecord
from studies.orders.tools import (
    GREY,
    ORANGE,
    PURPLE,
    Part,
    Serve,
    Settings,
    asked,
    data_of,
    part_of,
    serve,
)
from studies.runner import Case, Cases, only, shown, times

LONGEST = 200
LENGTHS = f"uniform:1:{LONGEST}"
ROWS = (8, 32)
BINS = (2, 4, 8)
SIGMA = 0.7
COLOURS = dict(zip(ROWS, (PURPLE, ORANGE)))
NOISY = f"multibin, {BINS[-1]} bins, σ {SIGMA:g}"
PATIENCE_MS = 10_000.0  # of a bin that does not fill, which would otherwise starve
VARIANTS: dict[str, tuple[str, Settings]] = {
    "static": ("static", {}),
    **{f"multibin, {k} bins": ("multibin", {"bins": k}) for k in BINS},
    NOISY: ("multibin", {"bins": BINS[-1], "length_predictor": f"noisy:{SIGMA:g}"}),
    "static, sjf": ("static", {"order": "sjf", "prefill_weight": 0}),  # by length, as bins
    "dynamic": ("dynamic", {}),
}


def cases() -> list[dict[str, Any]]:
    return [{"rows": rows, "variant": v} for rows, v in itertools.product(ROWS, VARIANTS)]


def gain(rows: int, bins: float) -> float:
    """Throughput of so many bins over that of one, in batches of so many rows."""
    of_one = rows / (rows + 1)
    return of_one / ((bins - 1) / (2 * bins) + of_one / bins)


def closed_form(variant: str, rows: int, n: int) -> float | None:
    """Useful rows in %, of n requests; None where there is no closed form. A burst that is sorted
    as a whole has as many bins as batches.
    """
    mode, settings = VARIANTS[variant]
    if mode == "dynamic":
        return 100.0
    if "length_predictor" in settings:
        return None
    bins = n / rows if "order" in settings else settings.get("bins", 1)
    return 100 * (rows + 1) / (2 * rows) * gain(rows, bins)


def task(case: dict[str, Any], n: int, seed: int, serve: Serve = serve) -> dict[str, Any]:
    """All requests come at once. Measured while every row is taken, as it would be for ever if
    they kept coming.
    """
    mode, settings = VARIANTS[case["variant"]]
    settings = {"max_batch_size": case["rows"], "token_budget": 10**5, **settings}
    if mode == "multibin":
        settings |= {"batch_size_target": case["rows"], "max_batch_delay_ms": PATIENCE_MS}
    burst = data_of(LENGTHS, seed).requests(n, "burst", scaled=True)
    seconds = 0.0
    live = computed = 0

    def observed(record: IterationRecord) -> None:
        nonlocal seconds, live, computed
        if record.iteration.running == case["rows"]:
            seconds += record.seconds
            live += record.rows["live"]
            computed += len(record.iteration.rows)

    serve(mode, settings, burst, asked(burst), observed)
    return {
        "useful": 100 * live / computed,
        "closed_form": closed_form(case["variant"], case["rows"], n),
        "throughput": live / seconds,
    }


def form_of(case: Case) -> float | None:
    """Its closed form, which is every seed's."""
    return case["seeds"][0]["closed_form"]


def static_of(found: Cases, case: Case) -> Case:
    [static] = only(found, rows=case["rows"], variant="static")
    return static


def over_static(found: Cases, case: Case) -> float | None:
    """Useful rows over those of `static`, by the closed forms."""
    mine, its = form_of(case), form_of(static_of(found, case))
    return mine / its if mine is not None and its is not None else None


def tables(found: Cases) -> str:
    def told_of(form: float | None, text: str) -> str:
        return "–" if form is None else text.format(form)

    rows = [
        [
            *("rows", "variant", "useful rows, %", "closed form, %"),
            *("tok/s", "tok/s ÷ static's", "closed form"),
        ]
    ]
    for case in found:
        ratio = formatted(times(static_of(found, case), case, "throughput"), "{:.2f}")
        cells = [
            formatted(shown(case, "useful"), "{:.1f}"),
            told_of(form_of(case), "{:.1f}"),
            formatted(shown(case, "throughput"), "{:,.0f}"),
            "–" if case["variant"] == "static" else ratio,
            "–" if case["variant"] == "static" else told_of(over_static(found, case), "{:.2f}"),
        ]
        rows.append([str(case["rows"]), case["variant"], *cells])
    return "\n\n".join(
        [
            "All requests come at once, and what is measured is what happens while every row is "
            "taken. Closed forms: `static` uses mean(g) / E[max of B draws of g] of its rows, and "
            "k bins complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times what one does, B rows and "
            "lengths g uniform; `static` with `sjf` sorts the whole burst, so that it has as many "
            "bins as batches. An iteration costs the same whether its rows are useful or idle, so "
            "that ratios of tok/s are those of useful rows, but for prefill.",
            markdown(rows, left=2),
        ]
    )


def figure(found: Cases, caption: str) -> Figure:
    """What bins gain over one, with the closed form's line; beside it useful rows."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(14.4, 5.6), layout="constrained")
        over_bins, useful = drawn.subplots(1, 2)
        _over_bins(over_bins, found)
        _useful(useful, found)
        caption_of(drawn, caption)
    return drawn


def _over_bins(axis: Axes, found: Cases) -> None:
    curve = 2 ** np.linspace(0, 4, 60)
    axis.plot([], "k:", label="closed form")
    for rows, colour in COLOURS.items():
        binned = {k: f"multibin, {k} bins" for k in BINS}
        of = {case["variant"]: case for case in only(found, rows=rows)}
        style: dict[str, Any] = {"color": colour, "capsize": 3, "ls": "", "marker": "o"}
        for bins, look in ((binned, {}), ({BINS[-1]: NOISY}, {"mfc": "white"})):
            known = [times(of["static"], of[name], "throughput") for name in bins.values()]
            label = f"batches of {rows}" + (f", lengths predicted with σ {SIGMA:g}" if look else "")
            halves = [k.half or 0.0 for k in known]
            axis.errorbar([*bins], [k.mean for k in known], halves, label=label, **style | look)
        axis.plot(curve, [gain(rows, k) for k in curve], ":", color=colour)
        dynamic = times(of["static"], of["dynamic"], "throughput").mean
        axis.axhline(dynamic, color=colour, lw=1)
        axis.annotate(
            f"dynamic, {rows} rows", (1, dynamic), (0, 3), textcoords="offset points",
            color=colour, fontsize=10.5,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, *BINS, 16], ["1", *map(str, BINS), "16"])
    axis.set_ylim(0.6, 2.05)
    axis.set_xlabel("bins")
    axis.set_ylabel("tok/s, times static's")
    axis.set_title("bins come near dynamic, if lengths are known")
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", fontsize=10.5)


def _useful(axis: Axes, found: Cases) -> None:
    """A bar a variant and row limit; a line across it where the closed form is."""
    for i, (rows, colour) in enumerate(COLOURS.items()):
        for k, variant in enumerate(VARIANTS):
            [case] = only(found, rows=rows, variant=variant)
            known, at = shown(case, "useful"), k + (i - 0.5) * 0.4
            axis.barh(
                at, known.mean, 0.37, color=colour, xerr=known.half or 0.0, ecolor=GREY,
                label=f"batches of {rows}" if k == 0 else None,
            )  # fmt: skip
            if (form := form_of(case)) is not None:
                label = "closed form" if (i, k) == (1, 0) else None
                axis.plot([form] * 2, [at - 0.2, at + 0.2], "k-", lw=2, label=label)
    axis.set_yticks(range(len(VARIANTS)), list(VARIANTS))
    axis.invert_yaxis()
    axis.set_xlim(0, 103)
    axis.set_xlabel("useful rows, %")
    axis.set_title("rows that compute for somebody")
    axis.grid(alpha=0.25, axis="x")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


PART = Part(
    part_of(
        "batches",
        "Batches of alike lengths",
        "Throughput over the number of bins, and useful rows, beside the closed forms",
    ),
    f"{{n}} requests of lengths {LENGTHS}, all at once",
    4096,
    {"variants": VARIANTS, "lengths": LENGTHS},
    cases,
    task,
    tables,
    figure,
)
