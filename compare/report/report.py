"""Reports of saved runs, made from their JSON alone: report.md with figures as PNG, and report.html
in one file.
"""

from __future__ import annotations

import base64
import html
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from rich.console import Console

from client import drawing
from client.machine import processor, save_json
from client.quoting import escape, unescape
from client.results import Json
from client.runs import FIGURES, LIVE, SavedRun
from client.saving import write as write_file
from client.summary import latency_line, line_text
from compare.analysis import Estimate
from compare.report import figures, foreseen, requests_csv, sections, sentences, tables
from stats import DEFINITIONS, LIMITED, ROW_KINDS, Times

Drawing = Callable[[], Figure]


def contents(run: SavedRun) -> str:
    """Return the text of report.md."""
    drawn, config, marked = drawings(run), run.first["config"], sentences.marked(run)

    def shown(*names: str) -> list[str]:
        return [f"![{FIGURES[name]}]({name}.png)" for name in names if name in drawn]

    model = f" on {escape(config['model'])}" if config else ""
    several = len(run.summaries) > 1 and len(run.names) > 1
    points = [(summary["seed"], summary["sweep"]) for summary in run.summaries if run.points]
    live = f"[Every row, iteration by iteration]({LIVE})" if (run.folder / LIVE).exists() else ""
    parts = [
        f"# {', '.join(run.names)}{model}{marked}",
        tables.headlines(run.variants, marked),
        " ".join(sentences.sentences(run)),
        tables.differences_table(run.variants, run.baseline) if several else "",
        sentences.conditions(run),
        *foreseen.section(run),
        *shown("latency_vs_tokens"),
        *sections.by_group(run.variants, shown("by_group")),
        *sections.rates(run, shown("latency_vs_throughput", "goodput")),
        "## Rows and latencies",
        *shown("occupancy", "rows", "distributions"),
        live,
        *sections.simulated_replicas(run, shown("replicas")),
        *sections.measured_replicas(run),
        "## How it was made",
        "\n".join(f"- {fact}" for fact in sentences.facts(run)),
        "## Every rate" if points else "",
        *(f"Seed {seed}:\n\n{tables.points_table(of_seed)}" for seed, of_seed in points),
    ]
    return document(parts)


def document(parts: Iterable[str]) -> str:
    """Return the text of a report: its parts, empty ones left out, and definitions of numbers."""
    definitions = "\n".join(f"- `{name}`: {text}" for name, text in DEFINITIONS.items())
    return "\n\n".join([*filter(None, parts), "## Definitions", definitions]) + "\n"


# ---- figures


def drawings(run: SavedRun) -> dict[str, Drawing]:
    """Return the figures that a run has: a name, and a function that draws it."""
    load = run.first["workload"]
    labels = tables.labels(run)
    results = {labels[name]: seeds for name, seeds in run.variants.items()}
    first = {labels[name]: result for name, result in run.results[0].items()}
    sent = [summary["workload"]["requests"] - run.warm_up for summary in run.summaries]
    requests = f"{sum(sent):,} requests" + (f" in {len(sent)} seeds" if len(sent) > 1 else "")
    caption = of_points = _caption(run, f"{requests}, {load['arrival']}")
    if sample := sentences.sample(run):
        of_points = _caption(run, f"{sample:,} of {requests}, {load['arrival']}")
    of_one = _caption(run, f"{sent[0]:,} requests, {load['arrival']}, seed {run.first['seed']}")

    lines, distributed = {}, {}
    for name in run.names:
        answered = run.answered(name)
        tokens = [r["completion_tokens"] for r in answered]
        seconds = [r["answered_at"] - r["sent_at"] for r in answered]
        lines[labels[name]] = (tokens, seconds, latency_line(tokens, seconds))
        distributed[labels[name]] = distributions(answered)
    groups = sections.groups_of(results).values()
    drawn: dict[str, Drawing] = {
        "latency_vs_tokens": partial(drawing.latency_vs_tokens, lines, of_points),
        "by_group": partial(figures.by_group, groups, caption),
        "distributions": partial(figures.distributions, distributed, of_points),
    }
    if points := run.points:
        n = sum(len(rates) for seeds in points.values() for rates in seeds)
        of_rates = _caption(run, f"{n} rates, lengths {load['lengths']}")
        drawn["latency_vs_throughput"] = partial(figures.latency_vs_throughput, points, of_rates)
        if limits := sections.limits_of(run):
            drawn["goodput"] = partial(figures.goodput, points, limits, of_rates)
    ours = {name: r for name, r in first.items() if r.config}
    over_time = {name: o for name, r in ours.items() if (o := r.occupancy_over_time)["live"]}
    if over_time:
        n_replicas = sections.number_of_replicas
        rows = max(r.config["max_batch_size"] * n_replicas(r) for r in ours.values())
        whole = {name: not r.partial for name, r in first.items()}
        drawn["occupancy"] = partial(figures.occupancy, over_time, whole, rows, of_one)
        seeds_of = {name: results[name] for name in ours}
        computed = {
            name: {kind: sum(r.number(f"{kind}_rows") or 0 for r in seeds) for kind in ROW_KINDS}
            for name, seeds in seeds_of.items()
        }
        expected = {name: seeds[0].expected_useful_fraction for name, seeds in seeds_of.items()}
        drawn["rows"] = partial(figures.computed_rows, computed, expected, caption)
    if changes := {labels[name]: each for name, each in sections.changes(run).items()}:
        ends_s = {name: first[name].wall_clock_s for name in changes}
        drawn["replicas"] = partial(figures.replicas, changes, ends_s, of_one)
    return drawn


def distributions(answered: Sequence[Json]) -> dict[str, np.ndarray]:
    """Return `latencies` of answered requests."""
    names = ("sent_at", "first_token_at", "last_token_at", "answered_at", "completion_tokens")
    return latencies(*(np.array([r[name] for r in answered], float) for name in names))


def latencies(start: Any, first: Any, last: Any, end: Any, tokens: Any) -> dict[str, np.ndarray]:
    """Return TTFT, TPOT and latency by stamps, in seconds; NaN where undefined."""
    times = Times(start, np.nan, first, last, end, tokens)
    return {measure.name: measure.of(times) for measure in LIMITED.values()}


def _caption(run: SavedRun, what: str) -> str:
    config, simulated = run.first["config"], run.first.get("simulated")
    model = f"{config['model']}, {config['dtype']}, " if config else ""
    by = processor(run.first["hardware"], config)
    if simulated:
        by = f"simulated, costs {simulated['costs']}"
    if deployed := sentences.deployed(run.first):
        what += f", {deployed}"
    return f"{model}{what} · {by} · commit {run.first['commit']}"


# ---- files


def write(run: SavedRun, svg: bool = False) -> None:
    """Write the report, its figures (svg: as SVG, too), the data, and seeds' summary.json."""
    write_files(run.folder, contents(run), drawings(run), svg)
    requests_csv.write(run)
    if len(run.summaries) > 1:
        save_json(run.folder / "summary.json", over_seeds(run))


def over_seeds(run: SavedRun) -> Json:
    """Return summary.json of several seeds: estimates, also in groups, and paired differences."""
    keys = dict.fromkeys([*tables.OF_RUN, *tables.PERCENTILES, *tables.COMPARED])
    return {
        "seeds": [summary["seed"] for summary in run.summaries],
        "variants": {
            name: {**tables.estimates(keys, seeds), **sections.estimates_by_group(seeds)}
            for name, seeds in run.variants.items()
        },
        "differences": [
            {k: asdict(v) if isinstance(v, Estimate) else v for k, v in entry.items()}
            for entry in tables.differences(run.variants, run.baseline)
        ],
    }


def write_files(folder: Path, text: str, drawn: Mapping[str, Drawing], svg: bool = False) -> None:
    """Write report.md and report.html, and its figures; make the folder if need be."""
    write_file(folder / "report.md", text)
    vectors = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, draw in drawn.items():
            vector = (folder if svg else Path(scratch)) / f"{name}.svg"
            drawing.save(draw(), folder / f"{name}.png", vector)
            vectors[name] = vector.read_bytes()
    write_file(folder / "report.html", as_page(text, vectors))


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1300px; margin: 2rem auto }
body { padding: 0 1.2rem; color: #222; background: #fff }
:root { color-scheme: light dark }
h1 { font-size: 1.6rem }
h2 { font-size: 1.25rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd }
.wide { overflow-x: auto; margin-bottom: 1.2rem }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .4rem; border-bottom: 1px solid #e5e5e5; text-align: left }
th { vertical-align: bottom; background: #f7f7f7 }
td[style*=right] { white-space: nowrap }
img { max-width: 100%; height: auto }
code { background: #f3f3f3; padding: 0 .2em; font-size: .9em }
li { overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1c1c1c }
  h2, th, td { border-color: #3a3a3a }
  th, code { background: #2b2b2b }
  /* white becomes the page's colour, black the text's, and each hue remains */
  img { filter: invert(.89) hue-rotate(180deg) }
}
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def as_page(markdown: str, vectors: Mapping[str, bytes]) -> str:
    """Return a report as one HTML file that needs no network, with figures as SVG in it."""
    sources = {f"{name}.png" for name in vectors}
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = lambda url: url in {*sources, LIVE}  # type: ignore[method-assign]  # nothing else is looked at or linked
    body = parser.render(markdown)
    for name, vector in vectors.items():
        data = base64.b64encode(_shortened(vector)).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/svg+xml;base64,{data}"')
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    title = html.escape(unescape(markdown.split("\n", 1)[0].removeprefix("# ")))
    return PAGE.format(title=title, style=STYLE, body=body)


def _shortened(vector: bytes) -> bytes:
    """Return an SVG with two decimals in coordinates, not six: a third of the page's size."""
    return re.sub(
        rb' (?:d|x|y)="[^"]*"',
        lambda attribute: re.sub(rb"(\.\d\d)\d+", rb"\1", attribute[0]),
        vector,
    )


def show(run: SavedRun, console: Console) -> None:
    """Print the tables and sentences that end a comparison."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    console.print(*tables.terminal_tables(run.variants, sentences.marked(run)), sep="")
    if len(run.summaries) == 1:
        say("Latency of a request by its completion tokens, fitted:")
        for name, [result] in run.variants.items():
            say(f"{name:>8}: {line_text(result.latency_line)}")
    for table in sections.terminal_groups(run.variants):
        console.print(table)
    if run.points:
        console.print(tables.sweep_table(run.points))
    say("\n" + "\n".join(map(sentences.plain, sentences.sentences(run))))
