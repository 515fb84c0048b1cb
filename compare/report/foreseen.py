"""How well a server is foreseen: beside what was recorded of it, and with other costs."""

from __future__ import annotations

from client.quoting import escape
from client.results import Result
from client.runs import SavedRun
from compare.report import tables
from compare.report.tables import markdown

NEAR_KEYS = {
    "output_throughput": "throughput, tok/s",
    "p99_ttft_ms": "TTFT p99, ms",
    "p99_e2el_ms": "latency p99, ms",
}
APART = 1.3  # largest ÷ smallest of a number: costs themselves are 1.1 apart
NEAR = (
    "How near to capacity a prediction lies: the first seed again, with costs 5% lower and 5% "
    "higher. Where these are far apart, small errors of the costs become large ones of latency."
)
Numbers = dict[str, dict[str, float | None]]  # by factor of the costs


def number(value: float | None) -> str:
    """Return a measure of any size in some four characters."""
    if value is None:
        return tables.NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def by_factor(result: Result) -> Numbers:
    """Return a result's numbers by the factor of its costs; empty where only 1 is known."""
    if not result.costs_changed:
        return {}
    known = {"1": result.json(NEAR_KEYS), **result.costs_changed}
    return dict(sorted(known.items(), key=lambda each: float(each[0])))


def near_capacity(run: SavedRun) -> list[str]:
    """Return for each variant that small errors of the costs change much by how much they do."""
    said = []
    for name, result in run.results[0].items():
        ranges = []
        for key, heading in NEAR_KEYS.items():
            values = [of[key] or 0.0 for of in by_factor(result).values()]
            if values and max(values) > APART * min(values):
                ranges.append(f"{heading} {number(min(values))} to {number(max(values))}")
        if ranges:
            said.append(
                f"**Near capacity**: {escape(name)}, with costs 5% lower to 5% higher: "
                f"{'; '.join(ranges)}."
            )
    return said


def section(run: SavedRun) -> list[str]:
    """Return the section on how well servers are foreseen; empty where nothing says it."""
    labels, of_first = tables.labels(run), run.results[0].items()
    changed = [["variant", "costs", *NEAR_KEYS.values()]]
    for name, result in of_first:
        for factor, of in by_factor(result).items():
            cells = [number(of[key]) for key in NEAR_KEYS]
            changed.append([labels[name], f"× {factor}", *cells])
    near = [NEAR, markdown(changed, left=2)] if changed[1:] else []
    if not (recorded := (run.first.get("simulated") or {}).get("recorded")):
        return ["## Other costs", *near] if near else []
    rows = [["", "recorded", "simulated", "simulated ÷ recorded"]]
    for words, was, now in recorded["table"]:
        ratio = f"{now / was:.2f}" if was and now is not None else tables.NONE
        rows.append([words, number(was), number(now), ratio])
    most, remarks = recorded["rows"], " ".join(map(escape, recorded["remarks"]))
    beyond = [escape(name) for name, r in of_first if (r.largest_batch or 0) > most]
    straight = (
        f"{', '.join(beyond)}: more rows than the {most} that were recorded, whose times lie on a "
        "straight line through those of fewer."
    )
    title = "## How well your server is foreseen"
    return [title, remarks, markdown(rows), *near, straight if beyond else ""]
