"""Where an order by length helps, where it cannot, and who pays: every order of `dynamic` over row
limits, loads and errors of the predicted lengths.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.report.drawing import STYLE, Look, caption_of, plain_log
from compare.report.tables import formatted, markdown
from studies.orders.tools import (
    BLUE,
    FCFS,
    GREEN,
    ORANGE,
    PINK,
    PURPLE,
    Part,
    Serve,
    Settings,
    asked,
    capacity,
    data_of,
    latencies,
    part_of,
    serve,
    style_of,
)
from studies.runner import Case, Cases, apart, only, shown, times

LENGTHS = "lognormal:40:1.2:900"  # a long tail: the longest tenth has 45% of the tokens
BLOCKS = 20_000  # more than all requests need, since who is paused keeps his
ROWS, LOADS, SIGMAS = (4, 8, 32), (0.5, 0.9, 1.2), (0.0, 0.7, 1.5)
BINDING = 8, 1.2  # the row limit and the load at which who pays is drawn, and what noise costs
MORE_ROWS = (8, 12, 16, 24, 32)  # that serve the same arrivals


def of_length(order: str, sigma: float) -> tuple[str, Settings]:
    if sigma == 0:
        return order, {"order": order}
    return f"{order}, σ {sigma:g}", {"order": order, "length_predictor": f"noisy:{sigma:g}"}


VARIANTS: dict[str, Settings] = {
    "fcfs": {},
    "hrrn": {"order": "hrrn"},
    **dict(of_length("sjf", sigma) for sigma in SIGMAS),
    "sjf, at most 2 s": {"order": "sjf", "max_wait_s": 2.0},
    **dict(of_length("srpt", sigma) for sigma in SIGMAS),
    "mlfq": {"order": "mlfq"},
}
DRAWN = {
    "fcfs": FCFS,
    "hrrn": Look(PURPLE, "-", "o"),
    "mlfq": Look(GREEN, "-", "o"),
    "sjf": Look(ORANGE, "-", "o"),
    "srpt": Look(PINK, "-", "o"),
}
SHOWN = {  # measure: heading, format
    "mean_s": ("latency mean, s", "{:.2f}"),
    "median_s": ("median, s", "{:.2f}"),
    "p99_s": ("p99, s", "{:.2f}"),
    "shortest_s": ("mean of the shortest quarter, s", "{:.2f}"),
    "longest_s": ("mean of the longest quarter, s", "{:.2f}"),
    "answered": ("answers/s while requests come", "{:.1f}"),
    "throughput": ("tok/s", "{:,.0f}"),
}


def cases() -> list[dict[str, Any]]:
    """`of`: the row limit of whose capacity the load is a share."""
    grid = [
        {"table": "grid", "rows": rows, "of": rows, "load": load, "variant": variant}
        for rows, load, variant in itertools.product(ROWS, LOADS, VARIANTS)
    ]
    of, load = BINDING
    more = [
        {"table": "rows", "rows": rows, "of": of, "load": load, "variant": variant}
        for rows, variant in itertools.product(MORE_ROWS, DRAWN)
    ]
    return grid + more


def task(case: dict[str, Any], n: int, seed: int, serve: Serve = serve) -> dict[str, Any]:
    rate = case["load"] * capacity(case["of"], LENGTHS).requests
    requests = data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    inferences = asked(requests)
    settings = {
        "max_batch_size": case["rows"],
        "kv_cache": f"{BLOCKS}blocks",
        **VARIANTS[case["variant"]],
    }
    end = serve("dynamic", settings, requests, inferences)
    times_s = latencies(inferences)
    by_length = np.array(times_s)[np.argsort([r.num_tokens for r in requests], kind="stable")]
    last = requests[-1].at
    return {
        "mean_s": statistics.mean(times_s),
        "median_s": statistics.median(times_s),
        "p99_s": float(np.percentile(times_s, 99)),
        "shortest_s": float(by_length[: n // 4].mean()),
        "longest_s": float(by_length[-(n // 4) :].mean()),
        "answered": sum((i.answered_at or end) <= last for i in inferences) / last,
        "throughput": sum(len(i.tokens) for i in inferences) / end,
    }


def base_of(found: Cases, case: Case) -> Case:
    """`fcfs` in its place."""
    [base] = only(found, **{key: case[key] for key in ("table", "rows", "load")}, variant="fcfs")
    return base


def compared(found: Cases) -> str:
    """Means over seeds with their intervals; differences and ratios paired with `fcfs`."""
    gaps = ("mean_s", "p99_s", "longest_s")
    names = ("mean", "p99", "longest quarter")
    rows = [
        ["row limit", "load", "variant"]
        + [heading for heading, _ in SHOWN.values()]
        + [f"{name} − fcfs's, s" for name in names]
        + ["mean ÷ fcfs's", "answers/s ÷ fcfs's"]
    ]
    for case in found:
        cells = [formatted(shown(case, m), form) for m, (_, form) in SHOWN.items()]
        if case["variant"] == "fcfs":
            cells += ["–"] * 5
        else:
            base = base_of(found, case)
            cells += [apart(base, case, gap, SHOWN[gap][1]) for gap in gaps]
            cells += [formatted(times(base, case, m), "{:.2f}") for m in ("mean_s", "answered")]
        rows.append([str(case["rows"]), f"{case['load']:g}", case["variant"], *cells])
    return markdown(rows, left=3)


def tables(found: Cases) -> str:
    of, _ = BINDING
    return "\n\n".join(
        [
            "Quarters are by completion tokens. σ is the error of a predicted length: its true one "
            "times a log-normal of that sigma; without it lengths are exact. At a load above 1 the "
            "queue grows until the last request came, so that latencies there are of this trace's "
            "length. Differences and ratios are paired with `fcfs` at the same row limit and load.",
            "## By row limit and load",
            "Load: of what `dynamic` with `fcfs` completes at that row limit.",
            compared(only(found, table="grid")),
            "## More rows, the same arrivals",
            f"Load: of what `fcfs` completes with {of} rows, for all row limits.",
            compared(only(found, table="rows")),
        ]
    )


def figure(found: Cases, caption: str) -> Figure:
    """Mean latency as a share of fcfs's over load, a column a row limit; below it what wrong
    predictions cost, who pays, and what more rows leave of it.
    """
    grid = only(found, table="grid")
    of, load = BINDING
    binding = {case["variant"]: case for case in only(grid, rows=of, load=load)}
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(14.4, 9), layout="constrained")
        axes = drawn.subplots(2, 3)
        for axis, rows in zip(axes[0], ROWS):
            axis.sharey(axes[0, 0])
            _over_load(axis, grid, rows)
            axis.set_title(f"{rows} rows")
        axes[0, 0].set_ylabel("mean latency, % of fcfs's")
        axes[0, 0].set_ylim(0, 130)
        noise, pays, more = axes[1]
        _over_noise(noise, binding)
        noise.set_title("wrong predictions cost part of it")
        _who_pays(pays, binding)
        pays.set_title("the slowest hundredth pays")
        _over_rows(more, only(found, table="rows"))
        more.set_title("with more rows nobody waits")
        noise.set_xlabel(f"σ of a predicted length's error; {of} rows, load {100 * load:g}%")
        pays.set_xlabel(f"{of} rows, load {100 * load:g}%")
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        caption_of(drawn, caption)
    return drawn


def _over_load(axis: Axes, grid: Cases, rows: int) -> None:
    for variant, look in DRAWN.items():
        mine = only(grid, rows=rows, variant=variant)
        ratios = [times(base_of(grid, case), case, "mean_s") for case in mine]
        axis.errorbar(
            [100 * case["load"] for case in mine],
            [100 * ratio.mean for ratio in ratios],
            [100 * (ratio.half or 0.0) for ratio in ratios],
            label=variant,
            **style_of(look),
        )
    axis.set_xticks([100 * load for load in LOADS])
    axis.set_xlabel("load, % of what fcfs completes")
    axis.grid(alpha=0.25)


def _over_noise(axis: Axes, binding: dict[str, Case]) -> None:
    """Orders that predict have a point an error, the others a line."""
    for variant, look in DRAWN.items():
        if variant not in ("sjf", "srpt"):
            axis.axhline(shown(binding[variant], "mean_s").mean, color=look.colour, ls="--")
            continue
        known = [shown(binding[of_length(variant, sigma)[0]], "mean_s") for sigma in SIGMAS]
        halves = [k.half or 0.0 for k in known]
        axis.errorbar(SIGMAS, [k.mean for k in known], halves, **style_of(look))
    axis.set_xticks(SIGMAS)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("mean latency, s")
    axis.grid(alpha=0.25)


def _who_pays(axis: Axes, binding: dict[str, Case]) -> None:
    groups = {"shortest_s": "shortest\nquarter", "longest_s": "longest\nquarter", "p99_s": "p99"}
    width = 0.84 / len(DRAWN)
    for i, (variant, look) in enumerate(DRAWN.items()):
        known = [shown(binding[variant], measure) for measure in groups]
        at = [k + (i - (len(DRAWN) - 1) / 2) * width for k in range(len(groups))]
        axis.bar(
            at, [k.mean for k in known], 0.92 * width, color=look.colour,
            yerr=[k.half or 0.0 for k in known], ecolor=BLUE,
        )  # fmt: skip
    axis.set_xticks(range(len(groups)), list(groups.values()))
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.set_ylabel("latency, s")
    axis.grid(alpha=0.25, axis="y")


def _over_rows(axis: Axes, cases: Cases) -> None:
    for variant, look in DRAWN.items():
        mine = only(cases, variant=variant)
        known = [shown(case, "mean_s") for case in mine]
        halves = [k.half or 0.0 for k in known]
        axis.errorbar(MORE_ROWS, [k.mean for k in known], halves, **style_of(look))
    axis.set_xticks(MORE_ROWS)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("row limit; the same arrivals")
    axis.set_ylabel("mean latency, s")
    axis.grid(alpha=0.25)


PART = Part(
    part_of(
        "orders",
        "Every order of `dynamic`",
        "Mean latency by order over load and row limit, and what it costs whom",
    ),
    f"{{n}} requests of lengths {LENGTHS}; who is paused finds memory for its KV blocks",
    1000,
    {"variants": VARIANTS, "lengths": LENGTHS, "kv_blocks": BLOCKS},
    cases,
    task,
    tables,
    figure,
)
