"""The report of --find: sentences, tables, a figure and the page that holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from client import drawing
from client.machine import save_json
from client.results import KEYS, Json, Key, keys, share
from client.runs import FOUND
from client.saving import write as write_file
from compare.analysis import Estimate, difference, estimate
from compare.report import panels
from compare.report.tables import PRICE, cell, formatted, markdown, signed
from simulate.find import SURE, Search
from simulate.space import REPLICAS

SHOWN, LISTED, LINES = 5, 40, 8  # settings in the terminal and in the table; lines of the figure


def key_of(search: Search) -> Key:
    """Return the heading and the form of the measure by which the best is chosen."""
    name = search.question.measure
    return KEYS.get(name) or Key(name, name.replace("_", " "), form="{:,.2f}")


def lines(search: Search) -> Iterator[str]:
    """Yield the best few with intervals, what each limit costs, and what is not known."""
    key, best, limits = key_of(search), search.best, search.question.limits
    if search.stopped:
        yield "interrupted: what follows is of the trials until then"
    if best:
        what, _, unit = key.heading.partition(", ")
        for place, row in enumerate(rows(search)[:SHOWN], 1):
            name, value, gap, _, met, *_ = row.values()
            beside = "" if place == 1 else f" ({gap})"
            name, value = name.removesuffix(" ←"), f"{value} {unit}".strip()
            yield f"{place}. {name}: {what} {value}{beside}, enough within the limits in {met}"
        default = search.space.default
        if default.name in search.results and search.misses(default) <= search.allowed:
            gained = search.gap(default, best)
            is_better = gained.shown and search.question.sign * gained.mean > 0
            if not (is_better or search.is_best(default)):
                yield f"{default.name} is not shown to be worse than the best"
    else:
        yield search.why_not
    for limit, other in search.without.items():
        without = f"without {limits([limit])}"
        if other is None:
            yield f"{without}: none meets the others"
        elif best and other.name == best.name:
            yield f"{without}: the same"
        else:
            values = search.values(other, limit)
            text = f"{without}: {other.name}, {formatted(_scaled(values, key), key.form)}"
            if best:
                gained = difference(search.values(best), values).times(key.scale)
                text += f" ({signed(gained, key.form)})"
            yield text
    if search.requests < search.growth_needs:
        yield f"whether a queue grows is not known; that takes {search.growth_needs:,} requests"


def _scaled(values: list[float], key: Key) -> Estimate:
    return estimate(values).times(key.scale)


def rows(search: Search) -> list[dict[str, str]]:
    """Return a row of the table for each setting, the best first."""
    key, found = key_of(search), list[dict[str, str]]()
    for one in search.ranked()[:LISTED]:
        results = search.results[one.name].values()
        n, met = len(results), len(results) - search.misses(one)
        gap = search.gap(search.best, one).times(key.scale) if search.best else None
        shares = estimate([100 * each.shares[""] for each in results])
        row = {
            "setting": f"{one.name}{' ←' * search.is_best(one)}",
            key.heading: formatted(_scaled(search.values(one), key), key.form),
            "− the best's": signed(gap, key.form) if gap else "–",
            "within the limits, %": formatted(shares, "{:.1f}", share(shares.mean, 1)),
            "enough in": f"{met} of {n} traces",
            "queue grows in": f"{sum(map(search.grows, results))}",
            "first token p99, ms": f"{sum(each.p99_ttft_ms for each in results) / n:,.0f}",
            "latency p99, ms": f"{sum(each.p99_e2el_ms for each in results) / n:,.0f}",
        }
        costs = [each.costs for each in results]
        bought = keys(PRICE) if costs[0] else []
        found.append(row | {k.heading: cell(k, [cost[k.name] for cost in costs]) for k in bought})
    return found


def figure(search: Search, caption: str) -> Figure:
    """Draw the measure of all that was tried, or with replicas the share within the limits; ticks
    where it tried, and a star at the answer.
    """
    key, is_share = key_of(search), bool(search.space.replicas)
    tried = [one for one in search.ranked() if one.values]
    taken = {name: {one.values.get(name) for one in tried} for one in tried for name in one.values}
    x = REPLICAS if is_share else max(taken, key=lambda name: len(taken[name]), default="")
    by_line: dict[str, list[panels.Point]] = defaultdict(list)
    for one in tried:
        others = [f"{name}={value}" for name, value in one.values.items() if name != x]
        line = " ".join([one.base, *others]).strip() or "tried"
        if x in one.values and (line in by_line or len(by_line) < LINES):
            values = [100 * each.shares[""] for each in search.results[one.name].values()]
            y = estimate(values) if is_share else _scaled(search.values(one), key)
            starred = search.is_best(one)
            by_line[line].append(panels.Point(one.values[x], y, starred=starred))
    ylabel = "requests within the limits, %" if is_share else key.heading
    panel = panels.FigurePanel(
        title=search.question.limits(), xlabel=x.replace("_", " "), ylabel=ylabel,
        lines={line: sorted(points) for line, points in by_line.items()},
        log=False,
    )  # fmt: skip
    fig = panels.figure([panel], {}, caption)
    fig.set_size_inches(9, 5.6)
    if is_share:
        fig.axes[0].set_ylim(0, 102)
        fig.axes[0].axhline(100 * search.question.attainment, color="#222222", lw=1, ls=":")
    return fig


def write(
    out: Path, search: Search, caption: str, served: str, left_out: str, facts: Json,
    svg: bool,
) -> None:  # fmt: skip
    """Write FOUND, the last of it with `svg`. served: by which command the best is. Raises
    Unwritten.
    """
    question, n = search.question, len(search.question.seeds)
    results = {
        "question": asdict(question),
        "best": search.best and search.best.name,
        "served_by": served,
        "without": {limit: one and one.name for limit, one in search.without.items()},
        "stopped": search.stopped and "interrupted before its end",
        "requests": search.requests,
        "growth_needs": search.growth_needs,
        "tried": [
            {"name": one.name, "settings": dict(one.values), "misses": search.misses(one)}
            | {"traces": [each._asdict() for each in search.results[one.name].values()]}
            for one in search.ranked()
        ],
    }
    save_json(out / "find.json", {**results, **facts})
    drawing.save(figure(search, caption), *(out / name for name in FOUND[2 : 3 + svg]))
    possible = len(search.space.settings) * max(1, len(search.space.replicas))
    if not search.space.replicas and search.space.default not in search.space.settings:
        possible += 1  # served as well
    every = n * possible
    trials, table = sum(map(len, search.results.values())), rows(search)
    parts = [
        "# Which setting? (simulated)",
        f"{100 * question.attainment:g}% of the requests of `{question.arrival}` must be within "
        f"{question.limits()}, and the queue must not grow: in {100 * SURE:g}% of {n} traces of "
        f"{search.requests:,} requests, with costs uncertain by {100 * question.uncertainty:.1f}% "
        "(standard deviation)."
        + (" Its requests and their times are the same in each trace." * (not question.drawn)),
        "\n".join(f"- {line}" for line in lines(search)),
        f"    {served}" if served else "",
        markdown([[*table[0]], *([*row.values()] for row in table)]),
        "![What was tried](find.png)",
        f"{trials:,} trials were made, of {every:,} possible ones. {left_out}",
        f"{caption}, {facts['date']}, `{facts['command']}`",
    ]
    write_file(out / "find.md", "\n\n".join(filter(None, parts)) + "\n")
