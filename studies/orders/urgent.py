"""Urgent requests among others: what a priority is worth, with KV blocks reserved or on demand, and
what a queue policy does to those who wait.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.report.drawing import STYLE, Look, caption_of, plain_log
from compare.report.tables import formatted, markdown
from scheduling.inference import Inference
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
from studies.runner import Cases, apart, only, shown

LENGTHS = "exponential:100:800"
ROWS = 64  # more than the pool holds, so that memory is what binds
POOL = 8  # requests of mean length, at their whole lives
URGENT = 0.1  # of the requests
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5)
TIMEOUT_MS = 500
DEMAND: Settings = {"kv_reservation": "demand"}
LEVELS: Settings = {"order": "priority", "priority_levels": 2, "default_priority_level": 2}
VARIANTS: dict[str, Settings] = {
    "fcfs": {},
    "fcfs, demand": DEMAND,
    "priority": LEVELS,
    "priority, demand": LEVELS | DEMAND,
    "priority, late ones delayed": LEVELS
    | {"queue_policy": f"2:timeout_ms={TIMEOUT_MS},action=delay"},
    "priority, late ones rejected": LEVELS
    | {"queue_policy": f"2:timeout_ms={TIMEOUT_MS},action=reject"},
}
DRAWN = {
    "fcfs": FCFS,
    "fcfs, demand": Look(BLUE, "--", "s"),
    "priority": Look(ORANGE, "-", "o"),
    "priority, demand": Look(GREEN, "-", "o"),
    "priority, late ones delayed": Look(PINK, "-", "o"),
    "priority, late ones rejected": Look(PURPLE, "-", "o"),
}
SHOWN = {  # measure: heading, format
    "urgent_s": ("latency of urgent ones, mean, s", "{:.3f}"),
    "urgent_p99_s": ("p99, s", "{:.2f}"),
    "others_s": ("latency of the others, mean, s", "{:.2f}"),
    "others_p99_s": ("p99, s", "{:.2f}"),
    "wait_s": ("longest of all, s", "{:.2f}"),
    "refused": ("refused, %", "{:.1f}"),
    "preempted_urgent": ("preemptions of an urgent one", "{:.2f}"),
    "preempted_others": ("of another one", "{:.2f}"),
    "throughput": ("tok/s", "{:,.0f}"),
}


@functools.cache
def blocks() -> int:
    """KV blocks of so many requests of mean length, and at least of the longest."""
    requests = data_of(LENGTHS, 2**31).requests(2000, "burst")
    life = statistics.mean(len(r.ids) + r.num_tokens for r in requests)
    return max(round(POOL * life / 16), 1024 // 16)


def cases() -> list[dict[str, Any]]:
    return [{"load": load, "variant": v} for load, v in itertools.product(LOADS, VARIANTS)]


def task(case: dict[str, Any], n: int, seed: int, serve: Serve = serve) -> dict[str, Any]:
    rate = case["load"] * capacity(ROWS, LENGTHS, blocks()).requests
    requests = data_of(LENGTHS, seed).requests(n, f"poisson:{rate:g}", scaled=True)
    inferences = asked(requests)
    rng = np.random.default_rng([seed, 7])
    for chosen in rng.choice(n, round(URGENT * n), replace=False):
        inferences[chosen].priority = 1
    urgent = [i for i in inferences if i.priority == 1]
    others = [i for i in inferences if i.priority != 1]
    settings = {
        "max_batch_size": ROWS,
        "kv_cache": f"{blocks()}blocks",
        **VARIANTS[case["variant"]],
    }
    end = serve("dynamic", settings, requests, inferences)
    return {
        **_latency("urgent", urgent),
        **_latency("others", others),
        "wait_s": max(latencies(inferences)),
        "refused": 100 * statistics.mean(i.error is not None for i in inferences),
        "preempted_urgent": statistics.mean(i.interruptions.preemptions for i in urgent),
        "preempted_others": statistics.mean(i.interruptions.preemptions for i in others),
        "throughput": sum(len(i.tokens) for i in inferences) / end,
    }


def _latency(name: str, inferences: Sequence[Inference]) -> dict[str, float]:
    found = latencies(inferences)
    return {f"{name}_s": statistics.mean(found), f"{name}_p99_s": float(np.percentile(found, 99))}


def tables(found: Cases) -> str:
    gaps = {"urgent_s": "urgent mean", "others_s": "others' mean", "wait_s": "longest"}
    rows = [
        ["load", "variant"]
        + [heading for heading, _ in SHOWN.values()]
        + [f"{name} − fcfs's, s" for name in gaps.values()]
    ]
    for case in found:
        [fcfs] = only(found, load=case["load"], variant="fcfs")
        cells = [formatted(shown(case, measure), form) for measure, (_, form) in SHOWN.items()]
        cells += ["–" if case is fcfs else apart(fcfs, case, g, SHOWN[g][1]) for g in gaps]
        rows.append([f"{case['load']:g}", case["variant"], *cells])
    return "\n\n".join(
        [
            f"A tenth of the requests is urgent (level 1 of 2). The pool holds {POOL} mean "
            f"requests; load: of what `fcfs` with `whole` completes on it. `demand` takes KV "
            f"blocks as they fill. Late: a request of level 2 that has waited {TIMEOUT_MS} ms goes "
            "behind all others, or is refused; latencies are of those that were answered.",
            markdown(rows, left=2),
        ]
    )


def figure(found: Cases, caption: str) -> Figure:
    """Latency of urgent requests and of the others over load, and who waits longest."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(14.4, 5.6), layout="constrained")
        axes = drawn.subplots(1, 3)
        titles = {
            "urgent_s": ("a tenth is urgent: it hardly waits", "mean latency, s"),
            "others_s": ("the others pay little", "mean latency, s"),
            "wait_s": ("who is put behind all may starve", "longest latency, s"),
        }
        for axis, (measure, (title, label)) in zip(axes, titles.items()):
            _over_load(axis, found, measure)
            axis.set_title(title)
            axis.set_ylabel(label)
        axes[1].sharey(axes[0])
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        caption_of(drawn, caption)
    return drawn


def _over_load(axis: Axes, found: Cases, measure: str) -> None:
    for variant, look in DRAWN.items():
        mine = only(found, variant=variant)
        known = [shown(case, measure) for case in mine]
        axis.errorbar(
            [100 * case["load"] for case in mine],
            [k.mean for k in known],
            [k.half or 0.0 for k in known],
            label=variant,
            **style_of(look),
        )
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.set_xticks([100 * load for load in LOADS])
    axis.set_xlabel("load, % of what fcfs completes")
    axis.grid(alpha=0.25)


PART = Part(
    part_of(
        "urgent",
        "Urgent requests",
        "Latency of urgent requests and of the others over load",
    ),
    f"{{n}} requests of lengths {LENGTHS}, a tenth urgent, a pool of {POOL} mean requests",
    1000,
    {"variants": VARIANTS, "lengths": LENGTHS, "rows": ROWS},
    cases,
    task,
    tables,
    figure,
)
