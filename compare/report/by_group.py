"""Section "Latency by group": effect of each variant on short and long requests, users, priorities
and classes.

Groups are those of client.groups; of many users or levels those with the most requests are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from client.drawing import INK, legend_below, looks, new_figure, plain_log, styled
from client.quoting import escape
from client.results import Key, keys
from compare.report import tables
from compare.report.tables import Result, Results

LATENCIES = keys("mean_e2el_ms", "p50_e2el_ms", "p99_e2el_ms")
SET_ASIDE = keys("mean_preempted_ms", "mean_paused_ms")
FIRST_TOKENS = keys("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms")
RATES = keys("output_throughput", "goodput", "attainment")
COLUMNS = [*RATES, *LATENCIES, *FIRST_TOKENS, *SET_ASIDE]
HEAD = {"by_length": "length", "by_user": "user", "by_priority": "priority", "by_class": "class"}
QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
LEVELS = {"0": "default level", "1": "level 1 (highest)"}
WIDTH = 4  # panels side by side
FEW = 100  # answers, of fewer than which p99 lies between the two slowest
MOST = 8  # users, or levels, which are shown
LONGEST = 24  # letters of a name above a panel
TEXT = (
    "The same requests in every variant, grouped by their number of completion tokens: quarters of "
    "the trace, or one group for each length if there are at most four."
)
SEEDS = " Each seed has quarters of its own; the borders shown are means over seeds."


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one kind. numbers: measures by variant and seed. size: tokens, or requests."""

    name: str
    size: str
    requests: int
    numbers: dict[str, list[Result]]


def groups(results: Results, kind: str) -> list[Group]:
    """Return the groups of a kind that are shown; none where the trace has none."""
    by_seed = [result.get(kind, {}) for seeds in results.values() for result in seeds]
    every = []
    for name in _names(results, kind):
        numbers = {v: [each[kind].get(name, {}) for each in seeds] for v, seeds in results.items()}
        # an interrupted variant has fewer than others
        requests = max(_sum(each, "completed") + _sum(each, "failed") for each in numbers.values())
        shown, size = name or "no user", f"{requests:,} request{'s' * (requests != 1)}"
        if kind == "by_priority":
            shown = LEVELS.get(name, f"level {name}")
        if kind == "by_length":
            of_few = all(n["least_tokens"] == n["most_tokens"] for s in by_seed for n in s.values())
            shown = "" if of_few else QUARTERS[int(name) - 1]  # of few lengths, each is a group
            size = _tokens([seed[name] for seed in by_seed if name in seed])
        every.append(Group(shown, size, requests, numbers))
    most = sorted(every, key=lambda group: -group.requests)[:MOST]
    return every if len(every) <= MOST else most


def _names(results: Results, kind: str) -> list[str]:
    """Return the names of all groups of a kind, in their own order."""
    return [
        *dict.fromkeys(
            name for seeds in results.values() for r in seeds for name in r.get(kind, ())
        )
    ]


def _title(results: Results, kind: str) -> str:
    """Return the name of a kind, and which of its groups are shown where that is not all."""
    n = len(_names(results, kind))
    return HEAD[kind] + (f": the {MOST} of {n} with most requests" if n > MOST else "")


def _tokens(numbers: Sequence[Result]) -> str:
    """Return the lengths of a quarter, averaged over seeds, whose traces differ a little."""
    least, most = (round(mean(n[f"{end}_tokens"] for n in numbers)) for end in ("least", "most"))
    return f"{least}–{most} tokens" if least < most else f"{least} token{'s' * (least > 1)}"


def _sum(numbers: Sequence[Result], what: str) -> int:
    return sum(n.get(what, 0) for n in numbers)


def table(results: Results, kind: str) -> str:
    """A row for each variant and group; columns without a number are left out."""
    columns = [*LATENCIES, *SET_ASIDE] if kind == "by_length" else COLUMNS
    columns = tables.present(columns, [group.numbers for group in groups(results, kind)])
    rows = _rows(results, kind, {key: key.heading for key in columns})
    return tables.markdown([rows[0], *([row[0], escape(row[1]), *row[2:]] for row in rows[1:])], 2)


def terminal_table(results: Results, kind: str) -> tables.Terminal | None:
    """Users or levels, for the terminal, without refusals; None where the trace has none."""
    if not groups(results, kind):
        return None
    numbers = [group.numbers for group in groups(results, kind)]
    shown = {key: key.short for key in tables.present([*RATES, *LATENCIES], numbers) if key.short}
    rows = _rows(results, kind, shown, refusals=False)
    return tables.Terminal(rows, left=2, caption=few(results, kind) or None)


def _rows(
    results: Results, kind: str, headings: Mapping[Key, str], refusals: bool = True
) -> list[list[str]]:
    rows = [["variant", _title(results, kind), "answered", *headings.values()]]
    for variant, seeds in results.items():
        for group in groups(results, kind):
            numbers = group.numbers[variant]
            name = ": ".join(filter(None, (group.name, group.size if kind == "by_length" else "")))
            cells = [tables.cell_of(key, numbers) for key in headings]
            rows.append([tables.label(variant, seeds), name, _answered(numbers, refusals), *cells])
    return rows


def _answered(numbers: Sequence[Result], refusals: bool) -> str:
    """Return answered requests over all seeds: "40", or "38, 2 failed (1 refused)"."""
    answered, failed, refused = (_sum(numbers, n) for n in ("completed", "failed", "refused"))
    text = f"{answered:,}, {failed:,} failed" if failed else f"{answered:,}"
    return f"{text} ({refused:,} refused)" if refused and refusals else text


def few(results: Results, *kinds: str) -> str:
    """Return a remark on p99 where a group of these kinds has few answers, else nothing."""
    numbers = [
        n for kind in kinds for group in groups(results, kind) for n in group.numbers.values()
    ]
    if not any(0 < seed.get("completed", 0) < FEW for seeds in numbers for seed in seeds):
        return ""
    each = " a seed" if len(numbers[0]) > 1 else ""
    return f"In a group of fewer than {FEW} requests{each}, p99 lies between the two slowest."


def of_groups(results: Sequence[Result]) -> dict[str, Any]:
    """Return estimates of each group of one variant, by kind and name. results: one a seed."""
    return {
        kind: {
            name: tables.estimates(COLUMNS, [each[kind].get(name, {}) for each in results])
            for name in dict.fromkeys(name for each in results for name in each.get(kind, ()))
        }
        for kind in HEAD
    }


def part(results: Results, figure: Sequence[str]) -> list[str]:
    """Return the section of report.md, with `figure` in it."""
    shown = [table(results, kind) for kind in HEAD if groups(results, kind)]
    several = len(next(iter(results.values()))) > 1
    return ["## Latency by group", TEXT + SEEDS * several, *figure, *shown, few(results, *HEAD)]


@styled
def figure(results: Results, caption: str) -> Figure:
    """Mean and p99 of latency, a panel for each group and a row for each variant: quarters always,
    users and levels if there are several. All panels share one logarithmic scale: a mark further to
    the right is a longer wait in any of them.
    """
    drawn: list[tuple[str, list[Group]]] = []
    for kind in HEAD:
        title = "length of the completion" if kind == "by_length" else _title(results, kind)
        if len(section := groups(results, kind)) > (kind != "by_length"):
            rows = [section[i : i + WIDTH] for i in range(0, len(section), WIDTH)]
            drawn += zip([f"Latency by {title}", *[""] * len(rows)], rows)
    shown = [group for _, row in drawn for group in row]
    seconds = [s for group in shown for both in _seconds(group).values() for s in both if s > 0]
    height = (0.46 * len(results) + 1.35) * len(drawn) + 0.8
    whole = new_figure((13, height), caption)
    parts = whole.subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for part, (title, row) in zip(parts, drawn):
        part.suptitle(title, x=0.01, ha="left", fontweight="bold")
        axes = part.subplots(1, WIDTH, sharey=True)
        for axis, group in zip(axes, row):
            _panel(axis, group)
            if seconds:  # with room for the numbers beside the outermost
                axis.set(xscale="log", xlim=(min(seconds) / 2, max(seconds) * 3))
                plain_log(axis.xaxis)
        for axis in axes[len(row) :]:
            axis.set_visible(False)
        axes[0].set_xlabel("seconds (log scale)", loc="left")
    handles = [
        Line2D([], [], marker="o", ms=8, ls="", color=INK),
        Line2D([], [], marker="|", ms=12, mew=2, lw=3, alpha=0.6, color=INK),
    ]
    labels = ["mean end-to-end latency", "up to p99: one request in a hundred takes longer"]
    legend_below(whole, handles, labels, 2)
    return whole


def _seconds(group: Group) -> dict[str, list[float]]:
    """Return mean and p99 of latency of each variant; empty where it answered no request."""
    return {
        variant: [
            mean(values) / 1e3
            for key in ("mean_e2el_ms", "p99_e2el_ms")
            if (values := [n[key] for n in numbers if n.get(key) is not None])
        ]
        for variant, numbers in group.numbers.items()
    }


def _panel(axis: Any, group: Group) -> None:
    look = looks(group.numbers)
    for y, (variant, seconds) in enumerate(_seconds(group).items()):
        colour = look[variant].colour
        text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "color": colour}
        if not seconds:
            at = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
            axis.annotate("none answered", (0, y), (6, 0), **text, **at)
            continue
        average, slowest = seconds
        axis.plot(seconds, [y, y], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
        axis.plot(average, y, look[variant].marker, color=colour, ms=8)
        axis.plot(slowest, y, "|", color=colour, ms=12, mew=2)
        above = {"ha": "center", "va": "bottom", "fontweight": "bold"}
        axis.annotate(_two_digits(average), (average, y), (0, 6), **text, **above)
        axis.annotate(_two_digits(slowest), (slowest, y), (7, 0), **text, va="center")
    axis.set_yticks(range(len(group.numbers)), list(group.numbers))
    for tick, variant in zip(axis.get_yticklabels(), group.numbers):
        tick.set_color(look[variant].colour)
    axis.set_ylim(len(group.numbers) - 0.5, -0.8)
    name = group.name if len(group.name) <= LONGEST else f"{group.name[: LONGEST - 1]}…"
    title = "\n".join(filter(None, (name, group.size)))
    axis.set_title(title, fontsize=11.5, fontweight="normal")
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", which="both", length=3, pad=3)
    axis.grid(axis="x", alpha=0.25)


def _two_digits(seconds: float) -> str:
    """0.0053, 0.72, 7.0, 72."""
    return f"{seconds:#.2g}" if seconds < 9.95 else f"{seconds:.0f}"
