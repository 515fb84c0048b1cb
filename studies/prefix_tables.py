"""What `studies.prefixes` found, as tables and as a figure. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.report.drawing import PALETTE, STYLE, Look, caption_of, plain_log
from compare.report.tables import formatted, markdown
from studies.runner import Cases, apart, shown, times

FCFS = "dynamic, caching"
SHOWN = {  # measure: heading, format
    "computed": ("prompt tokens computed, %", "{:.1f}"),
    "hits": ("hit rate, %", "{:.1f}"),
    "prefill": ("time in prefill, %", "{:.1f}"),
    "ttft_ms": ("TTFT mean, ms", "{:,.1f}"),
    "ttft_p99_ms": ("TTFT p99, ms", "{:,.1f}"),
    "wait_ms": ("longest wait, ms", "{:,.0f}"),
    "rare_ms": ("TTFT mean of the rarest quarter, ms", "{:,.1f}"),
    "mean_ms": ("latency mean, ms", "{:,.0f}"),
    "throughput": ("tok/s", "{:,.0f}"),
}
TITLES = {
    "shared": "16 shared prefixes of 256 tokens",
    "conversations": "conversations of four turns",
    "random": "random prompts: no difference",
}
GREEN, ORANGE, PINK, GREY = PALETTE[3], PALETTE[1], PALETTE[5], PALETTE[0]
DRAWN = {  # variant: its look
    "static": Look("#f0c4a0", "--", "s"),
    "static, caching": Look(ORANGE, "-", "o"),
    "dynamic": Look("#a3d4c5", "--", "s"),
    FCFS: Look(GREEN, "-", "o"),
    "dynamic, caching, prefix order": Look(PINK, "-", "o"),
}


def without_caching(variant: str) -> str:
    return variant.split(",")[0]


def compared(
    found: Cases, measures: Sequence[str], gaps: Sequence[str], base_of: Callable[[str], str]
) -> str:
    """Means over seeds with their intervals; paired differences, and ratios of throughput."""
    base = "`dynamic, caching`" if base_of(FCFS) == FCFS else "the same mode without"
    headings = [SHOWN[measure][0] for measure in measures]
    headings += [f"{SHOWN[gap][0].removesuffix(', ms')} − that of {base}, ms" for gap in gaps]
    rows = [["trace", "load", "variant", *headings, f"tok/s ÷ that of {base}"]]
    for case in found:
        cells = [formatted(shown(case, measure), SHOWN[measure][1]) for measure in measures]
        [its] = [
            c
            for c in found
            if (c["trace"], c["load"]) == (case["trace"], case["load"])
            and c["variant"] == base_of(case["variant"])
        ]
        if its is case:
            cells += ["–"] * (len(gaps) + 1)
        else:
            cells += [apart(its, case, gap, SHOWN[gap][1]) for gap in gaps]
            cells.append(formatted(times(its, case, "throughput"), "{:.2f}"))
        rows.append([case["trace"], case["load"], case["variant"], *cells])
    return markdown(rows, left=3)


def pools(found: Cases) -> str:
    """Hits as a share of the oracle's, over the size of the pool."""
    sizes = list(dict.fromkeys(case["pool"] for case in found))
    rows = [["trace", "variant", "KV blocks in use", *(f"{size:g} times" for size in sizes)]]
    for trace, variant in dict.fromkeys((case["trace"], case["variant"]) for case in found):
        mine = [c for c in found if (c["trace"], c["variant"]) == (trace, variant)]
        cells = [formatted(shown(case, "hits_to_oracle"), "{:.1f}") for case in mine]
        rows.append([trace, variant, f"{mine[0]['blocks_in_use']:.0f}", *cells])
    return markdown(rows, left=2)


def tables(found: Cases) -> str:
    mine = {name: [c for c in found if c["table"] == name] for name in ("caching", "order", "pool")}
    blocks = {case["trace"]: case["kv_blocks"] for case in mine["order"]}
    small = " and ".join(f"{n} blocks ({trace})" for trace, n in blocks.items())
    caching = ["computed", "hits", "prefill", "ttft_ms", "ttft_p99_ms", "mean_ms", "throughput"]
    ordered = ["computed", "ttft_ms", "ttft_p99_ms", "wait_ms", "rare_ms", "mean_ms", "throughput"]
    gaps = ["ttft_ms", "mean_ms"]
    asked = min(seed["requests"] for case in found for seed in case["seeds"])
    return "\n\n".join(
        [
            "## With and without, where all prefixes fit",
            "Load: of what `dynamic` without caching completes. Differences are paired with the "
            f"same mode without caching. A turn whose conversation has outgrown the context is not "
            f"asked; {asked:,} requests are at least.",
            compared(mine["caching"], caching, gaps, without_caching),
            "## Orders on a small pool",
            f"{small}: eight mean requests and a third of the 64 prefixes. Load: of what `fcfs` "
            "with caching completes there, which differences are paired with too.",
            compared(mine["order"], ordered, ["ttft_ms", "wait_ms"], lambda variant: FCFS),
            "## What the size of the pool costs",
            "Tokens found, % of what an unlimited pool would hold. Pools are multiples of the KV "
            "blocks that are in use on average without caching, at 0.8 of what that completes.",
            pools(mine["pool"]),
        ]
    )


def figure(found: Cases, caption: str) -> Figure:
    """Time to the first token over load, a column a trace; below it what a burst gains, by trace
    and by order, and hits over the size of the pool.
    """
    caching = [c for c in found if c["table"] == "caching"]
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(14.4, 8.6), layout="constrained")
        axes = drawn.subplots(2, 3)
        paced = [c for c in caching if c["load"] != "burst"]
        for axis, (trace, title) in zip(axes[0], TITLES.items()):
            axis.sharey(axes[0, 0])
            _over_load(axis, [c for c in paced if c["trace"] == trace])
            axis.set_title(title)
        axes[0, 0].set_ylabel("mean time to first token, ms")
        bursts, order, pool = axes[1]
        _bars(bursts, [c for c in caching if c["load"] == "burst"])
        bursts.set_title("a burst on a large pool")
        _bars(order, [c for c in found if (c["table"], c["load"]) == ("order", "burst")])
        order.set_title("64 prefixes on a small pool")
        order.set_xticks(order.get_xticks(), ["answers of 50 tokens", "of 1 to 8 tokens"])
        _over_pool(pool, [c for c in found if c["table"] == "pool"])
        pool.set_title("what a small pool forgets")
        named = [axis.get_legend_handles_labels() for axis in (bursts, order)]
        legend = {name: bar for bars, names in named for bar, name in zip(bars, names)}
        drawn.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5)
        caption_of(drawn, caption)
    return drawn


def _look(variant: str) -> dict[str, Any]:
    its = DRAWN[variant]
    return {"color": its.colour, "ls": its.line, "marker": its.marker, "capsize": 3}


def _over_load(axis: Axes, cases: Cases) -> None:
    for variant in ("dynamic", FCFS):
        mine = [c for c in cases if c["variant"] == variant]
        known = [shown(c, "ttft_ms") for c in mine]
        loads = [100 * float(c["load"]) for c in mine]
        halves = [k.half or 0.0 for k in known]
        axis.errorbar(loads, [k.mean for k in known], halves, **_look(variant))
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.grid(alpha=0.25)
    axis.set_xticks(loads)
    axis.set_xlabel("load, % of capacity without caching")


def _bars(axis: Axes, cases: Cases) -> None:
    """Throughput, a group a trace; above a bar how many times what it is without caching."""
    traces = list(dict.fromkeys(c["trace"] for c in cases))
    variants = list(dict.fromkeys(c["variant"] for c in cases))
    by = {(c["trace"], c["variant"]): c for c in cases}
    width = 0.84 / len(variants)
    for i, variant in enumerate(variants):
        at = [k + (i - (len(variants) - 1) / 2) * width for k in range(len(traces))]
        known = [shown(by[trace, variant], "throughput") for trace in traces]
        halves, colour = [k.half or 0.0 for k in known], DRAWN[variant].colour
        heights = [k.mean for k in known]
        axis.bar(at, heights, 0.92 * width, color=colour, yerr=halves, ecolor=GREY, label=variant)
        for x, trace, top in zip(at, traces, map(sum, zip(heights, halves))):
            if (base := without_caching(variant)) != variant:
                ratio = times(by[trace, base], by[trace, variant], "throughput").mean
                axis.annotate(
                    f"×{ratio:.2f}", (x, top), (0, 3), textcoords="offset points", ha="center",
                    fontsize=10.5,
                )  # fmt: skip
    axis.set_xticks(range(len(traces)), traces)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylabel("tok/s")


def _over_pool(axis: Axes, cases: Cases) -> None:
    """Of `fcfs`, to which the order by prefix is equal here."""
    for trace in dict.fromkeys(case["trace"] for case in cases):
        mine = [c for c in cases if (c["trace"], c["variant"]) == (trace, FCFS)]
        known, sizes = [shown(c, "hits_to_oracle") for c in mine], [c["pool"] for c in mine]
        halves = [k.half or 0.0 for k in known]
        look = _look(FCFS) | ({"ls": ":", "mfc": "white"} if trace == "conversations" else {})
        axis.errorbar(sizes, [k.mean for k in known], halves, label=trace, **look)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.set_ylim(0, 105)
    axis.grid(alpha=0.25)
    axis.set_xlabel("KV blocks, times those in use")
    axis.set_ylabel("hits, % of an unlimited pool's")
    axis.legend(loc="lower right")
