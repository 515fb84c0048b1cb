"""Replicas of a run: of a simulated one how many there were when, and what each got; of real ones
what each did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from client.quoting import escape
from compare.report.drawing import STYLE, caption_of, looks
from compare.report.tables import markdown
from compare.runs import Run

OF_EACH = {  # of a real replica: heading, form, and what it is multiplied with
    "completed": ("answered", "{:,}", 1),
    "total_output_tokens": ("tokens", "{:,}", 1),
    "useful_fraction": ("useful rows, %", "{:.0f}", 100),
    "occupancy": ("occupancy, %", "{:.0f}", 100),
    "largest_batch": ("largest batch, rows", "{:,}", 1),
    "kv_blocks": ("KV blocks", "{:,}", 1),
    "busy_s": ("busy, s", "{:.2f}", 1),
}
OTHERS = "#cfcfcf"  # replicas that are paid for, and take no requests


def told(run: Run) -> dict[str, Mapping[str, Any]]:
    """What each variant's servers say of their replicas, by the first seed; none of a single one
    that was up all the time.
    """
    servers = {name: result.get("server", {}) for name, result in run.results[0].items()}
    return {
        name: mine
        for name, server in servers.items()
        if (mine := server.get("replicas"))
        and (len(mine["requests"]) > 1 or _changed(mine) or mine["missed"])
    }


def _over_time(mine: Mapping[str, Any]) -> list[tuple[float, int, int]]:
    """Seconds, replicas that take requests, and others: the last of several changes at a time."""
    return list({change[0]: tuple(change) for change in mine["changes"]}.values())


def _changed(mine: Mapping[str, Any]) -> bool:
    return len(_over_time(mine)) > 1


def has_changes(run: Run) -> bool:
    """Whether it was not the same number all the time."""
    return any(map(_changed, told(run).values()))


def part(run: Run, shown: Sequence[str]) -> list[str]:
    """The section on replicas; of a run that has one all the time nothing."""
    mine = told(run)
    if not mine:
        return []
    rows = [["variant", "replicas", "paid for, replica-seconds", "requests of one, least to most"]]
    sentences = []
    for name, its in mine.items():
        up = [up for _, up, _ in _over_time(its)]
        requests = its["requests"].values()
        rows.append(
            [
                escape(name),
                f"{min(up)} to {max(up)}" if len(up) > 1 else f"{up[0]}",
                f"{its['replica_s']:,.0f}",
                f"{min(requests, default=0):,} to {max(requests, default=0):,}",
            ]
        )
        sentences += [
            f"In {escape(name)} the failure of replica {number} at {at_s:g} s hit nobody: it was "
            f"not up, or nothing was left to do."
            for number, at_s in its["missed"]
        ]
    return ["## Replicas", markdown(rows), *sentences, *shown]


def measured_part(run: Run) -> list[str]:
    """The section on real replicas, and which numbers of all of them are what; of a run whose
    servers were alone nothing.
    """
    rows = [["variant", "replica", *(heading for heading, _, _ in OF_EACH.values())]]
    for name, result in run.results[0].items():
        for replica, its in result.get("server", {}).get("by_replica", {}).items():
            cells = [form.format(scale * its[key]) for key, (_, form, scale) in OF_EACH.items()]
            rows.append([escape(name), escape(replica), *cells])
    if len(rows) == 1:
        return []
    told = (
        "Rows, tokens and KV blocks of a variant are sums over its replicas, and its largest "
        "batch is the largest of any. Its occupancy is of the rows of those that compute: each "
        "replica's own, weighted by the time that it was busy. How many useful rows theory expects "
        "is left out, since batches of two replicas may begin at one instant, and so is what they "
        "complete while requests are always waiting, which is of a single queue."
    )
    seed = "" if len(run.results) == 1 else f"By replica, seed {run.first['seed']}:"
    return ["## Replicas", told, *filter(None, [seed]), markdown(rows)]


def figure(run: Run, caption: str) -> Figure:
    """Replicas over time of the first seed, a panel a variant, until its last request ended."""
    mine = told(run)
    ends_s = {name: run.results[0][name]["wall_clock_s"] for name in mine}
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(11, 1.75 * len(mine) + 1.4), layout="constrained")
        panels = drawn.subplots(len(mine), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        look = looks(mine)
        for axes, (name, its) in zip(panels, mine.items()):
            at, up, others = zip(*[each for each in _over_time(its) if each[0] < ends_s[name]])
            edges, every = [*at, ends_s[name]], [a + b for a, b in zip(up, others)]
            axes.stairs(every, edges, fill=True, color=OTHERS)
            axes.stairs(up, edges, fill=True, color=look[name].colour)
            axes.set_title(name, color=look[name].colour, fontsize=12, loc="left")
            axes.yaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("seconds since the first request")
        panels[-1].set_xlim(0, max(ends_s[name] for name in mine))
        panels[-1].set_ylim(bottom=0)
        drawn.supylabel("replicas")
        keys = {"#444444": "take requests (in the variant's colour)",
                OTHERS: "start, or finish what they have"}  # fmt: skip
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in keys]
        drawn.legend(handles, list(keys.values()), loc="outside lower center", ncols=2)
        caption_of(drawn, caption)
    return drawn
