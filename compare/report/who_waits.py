"""Who waits: what each variant does to short and long requests, to users and to priorities.

Groups are those of client.groups; of several seeds numbers are means over seeds, as in every table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.table import Table
from rich.text import Text

from client.columns import NOBODY
from client.quoting import escape
from compare.report import tables
from compare.report.drawing import STYLE, caption_of, looks, plain_log
from compare.report.tables import Results
from compare.results import Key, keys

LATENCIES = keys("mean_e2el_ms", "p50_e2el_ms", "p99_e2el_ms")
FIRST_TOKENS = keys("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms")
SET_ASIDE = keys("mean_preempted_ms", "mean_paused_ms")
SHARES = keys("output_throughput")
COLUMNS = [*SHARES, *LATENCIES, *FIRST_TOKENS, *SET_ASIDE]
QUARTERS = {
    "1": "shortest quarter", "2": "second quarter", "3": "third quarter", "4": "longest quarter",
}  # fmt: skip
WIDTH = 4  # panels side by side
MOST = 8  # users, or levels, who are shown
LONGEST = 24  # letters of a name above a panel
HEAD = {"by_length": "length", "by_user": "user", "by_priority": "priority"}


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one kind, and of each variant what they got, a mapping a seed; an empty one of a
    seed that has none of them. `of`: their tokens, or where these say nothing, their number.
    """

    name: str
    of: str
    requests: int
    numbers: dict[str, list[Mapping[str, Any]]]


def groups(results: Results, kind: str) -> list[Group]:
    """The groups of a kind, in their own order; none of runs whose trace, or version, has none."""
    seeds = [result.get(kind) or {} for mine in results.values() for result in mine]
    names = sorted(dict.fromkeys(name for seed in seeds for name in seed), key=_order(kind))
    # of few lengths, each is a group by itself
    quarters = any(g.get("least_tokens") != g.get("most_tokens") for s in seeds for g in s.values())
    found = []
    for name in names:
        numbers = {
            variant: [(result.get(kind) or {}).get(name, {}) for result in mine]
            for variant, mine in results.items()
        }
        # an interrupted variant has fewer than others
        requests = max(_sum(mine, "completed") + _sum(mine, "failed") for mine in numbers.values())
        told, of = _name(kind, name), f"{requests} request{'s' * (requests != 1)}"
        if kind == "by_length":
            of = _tokens([seed[name] for seed in seeds if name in seed])
            told = told if quarters else ""
        found.append(Group(told, of, requests, numbers))
    return found


def _order(kind: str) -> Callable[[str], float]:
    """Quartiles and levels by number, the default level last; users as they came."""
    return (lambda _: 0.0) if kind == "by_user" else lambda name: int(name) or float("inf")


def _name(kind: str, name: str) -> str:
    if kind == "by_length":
        return QUARTERS[name]
    if kind == "by_user":
        return name if name != NOBODY else "nobody"
    return {"0": "default level", "1": "level 1 (highest)"}.get(name, f"level {name}")


def _tokens(numbers: Sequence[Mapping[str, Any]]) -> str:
    """The lengths of a quarter; of several seeds, whose traces differ a little, on average."""
    least, most = (round(mean(n[f"{end}_tokens"] for n in numbers)) for end in ("least", "most"))
    return f"{least}–{most} tokens" if least < most else f"{least} token{'s' * (least > 1)}"


def _sum(numbers: Iterable[Mapping[str, Any]], what: str) -> int:
    return sum(n.get(what, 0) for n in numbers)


def shown(results: Results, kind: str) -> tuple[list[Group], str]:
    """The groups that are shown, and what to say where that is not all of them."""
    found = groups(results, kind)
    if len(found) <= MOST:
        return found, ""
    busiest = sorted(found, key=lambda group: -group.requests)[:MOST]
    return busiest, f"the {MOST} of {len(found)} who ask most often"


def table(results: Results, kind: str) -> str:
    """A row for each variant and group; what nobody has is left out."""
    found, only = shown(results, kind)
    columns = tables.present(
        [*LATENCIES, *SET_ASIDE] if kind == "by_length" else COLUMNS,
        [group.numbers for group in found],
    )
    head = f"{HEAD[kind]}: {only}" if only else HEAD[kind]
    rows = [["variant", head, "answered", *(key.heading for key in columns)]]
    for variant, results_of in results.items():
        for group in found:
            told = [group.name, group.of] if kind == "by_length" else [group.name]
            mine = group.numbers[variant]
            row = [tables.label(variant, results_of), escape(": ".join(filter(None, told)))]
            rows.append([*row, _answered(mine), *(tables.cell_of(key, mine) for key in columns)])
    return tables.markdown(rows, left=2)


def _answered(numbers: Sequence[Mapping[str, Any]]) -> str:
    """Over all seeds: "40", or "38, 2 failed (1 refused)"."""
    answered, failed, refused = (_sum(numbers, n) for n in ("completed", "failed", "refused"))
    text = f"{answered}, {failed} failed" if failed else str(answered)
    return f"{text} ({refused} refused)" if refused else text


def of_groups(
    results: Sequence[Mapping[str, Any]],
    estimates: Callable[[Iterable[Key], Sequence[Mapping[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Of one variant the estimates of each group, by kind and name; a result a seed."""
    return {
        kind: {
            name: estimates(COLUMNS, [(r.get(kind) or {}).get(name, {}) for r in results])
            for name in dict.fromkeys(name for r in results for name in r.get(kind) or {})
        }
        for kind in HEAD
    }


def part(results: Results, figure: Sequence[str]) -> list[str]:
    """The section of report.md; `figure` stands in it."""
    if not groups(results, "by_length"):
        return []
    text = (
        "The same requests in every variant, by how many completion tokens they ask for: a quarter "
        "of the trace each, where it has more than four lengths."
    )
    if len(next(iter(results.values()))) > 1:
        text += " Each seed has quarters of its own; their borders are means over seeds."
    parts = ["## Who waits", text, *figure, table(results, "by_length")]
    for kind in ("by_user", "by_priority"):
        if groups(results, kind):
            parts.append(table(results, kind))
    return parts


def terminal_table(results: Results, kind: str) -> Table | None:
    """Users or levels, for the terminal; None where the trace has none."""
    found, only = shown(results, kind)
    if not found:
        return None
    columns = [key for key in (*SHARES, *LATENCIES) if key.short]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=only or None)
    for heading in ("variant", HEAD[kind]):
        table.add_column(heading, no_wrap=True)
    for heading in ("answered", *(key.short for key in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant, results_of in results.items():
        for group in found:
            mine = group.numbers[variant]
            cells = [tables.cell_of(key, mine).split(" ±")[0] for key in columns]
            name = tables.label(variant, results_of)
            table.add_row(name, Text(group.name), _answered(mine), *cells)
    return table


def sections(results: Results) -> dict[str, list[Group]]:
    """What is drawn, by its title: quarters always, users and levels where there are several."""
    found = {}
    for kind, title in (
        ("by_length", "length of the completion"), ("by_user", "user"), ("by_priority", "priority")
    ):  # fmt: skip
        mine, only = shown(results, kind)
        if len(mine) > 1 or kind == "by_length":
            found[", ".join(filter(None, (title, only)))] = mine
    return found


def figure(results: Results, caption: str) -> Figure:
    """Mean and p99 of latency, a panel a group and a row a variant; all panels share one
    logarithmic scale, so that what lies further right has waited longer, whichever panel it is in.
    """
    drawn = [
        (f"Who waits: latency by {what}" if not i else "", mine[i : i + WIDTH])
        for what, mine in sections(results).items()
        for i in range(0, len(mine), WIDTH)
    ]
    seconds = [
        value
        for _, mine in drawn
        for group in mine
        for values in _seconds(group).values()
        for value in values
        if value > 0
    ]
    with matplotlib.rc_context(STYLE):
        height = (0.46 * len(results) + 1.35) * len(drawn) + 0.8
        whole = Figure(figsize=(13, height), layout="constrained")
        parts = whole.subfigures(len(drawn), 1, squeeze=False)[:, 0]
        for part, (title, mine) in zip(parts, drawn):
            part.suptitle(title, x=0.01, ha="left", fontweight="bold")
            axes = part.subplots(1, WIDTH, sharey=True)
            for axis, group in zip(axes, mine):
                _panel(axis, group)
                if seconds:  # with room for the numbers beside the outermost
                    axis.set(xscale="log", xlim=(min(seconds) / 2, max(seconds) * 3))
                    plain_log(axis.xaxis)
            for axis in axes[len(mine) :]:
                axis.set_visible(False)
            axes[0].set_xlabel("seconds (log scale)", loc="left")
        handles: list[Any] = [
            Line2D([], [], color="#444444", marker="o", ms=8, ls=""),
            Line2D([], [], color="#444444", marker="|", ms=12, mew=2, lw=3, alpha=0.6),
        ]
        said = ["mean end-to-end latency", "up to p99: one request in a hundred takes longer"]
        whole.legend(handles, said, loc="outside lower center", ncols=2)
        caption_of(whole, caption)
    return whole


def _seconds(group: Group) -> dict[str, list[float]]:
    """Of each variant mean and p99 of latency; nothing of one that answered none of them."""
    return {
        name: [
            mean(values) / 1e3
            for key in ("mean_e2el_ms", "p99_e2el_ms")
            if (values := [n[key] for n in mine if n.get(key) is not None])
        ]
        for name, mine in group.numbers.items()
    }


def _panel(axis: Any, group: Group) -> None:
    look = looks(group.numbers)
    for y, (name, values) in enumerate(_seconds(group).items()):
        colour = look[name].colour
        kind: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "color": colour}
        if not values:
            at = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
            axis.annotate("none answered", (0, y), (6, 0), **kind, **at)
            continue
        average, slowest = values
        axis.plot(values, [y, y], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
        axis.plot(average, y, look[name].marker, color=colour, ms=8)
        axis.plot(slowest, y, "|", color=colour, ms=12, mew=2)
        above = {"ha": "center", "va": "bottom", "fontweight": "bold"}
        axis.annotate(_told(average), (average, y), (0, 6), **kind, **above)
        axis.annotate(_told(slowest), (slowest, y), (7, 0), **kind, va="center")
    axis.set_yticks(range(len(group.numbers)), list(group.numbers))
    for tick, name in zip(axis.get_yticklabels(), group.numbers):
        tick.set_color(look[name].colour)
    axis.set_ylim(len(group.numbers) - 0.5, -0.8)
    name = group.name if len(group.name) <= LONGEST else f"{group.name[: LONGEST - 1]}…"
    title = "\n".join(filter(None, (name, group.of)))
    axis.set_title(title, fontsize=11.5, fontweight="normal")
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", which="both", length=3, pad=3)
    axis.grid(axis="x", alpha=0.25)


def _told(seconds: float) -> str:
    """Two digits: 0.0053, 0.72, 7.0, 72."""
    return f"{seconds:#.2g}" if seconds < 9.95 else f"{seconds:.0f}"
