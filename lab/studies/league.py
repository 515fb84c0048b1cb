"""League tables of the arena, and a figure of all cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.drawing import new_figure, styled
from compare.analysis import Estimate, difference
from compare.report.tables import formatted, markdown
from lab.studies.study import Case, Cases, mean, only, ratio, values

BASE = "fcfs"  # the policy that the others are compared with
SAME = "·"  # no difference shown
LEGEND = (
    "The first row of a table has the means of vLLM's default (`fcfs`). The other rows have the "
    "ratio of a policy to it (goodput and tokens computed again: the difference in percentage "
    "points; preemptions: the difference), paired by seed, ± "
    f"half of its 95% interval; {SAME} if the interval holds 1 (or 0), so that no difference is "
    "shown. The best policy of a trace is bold, and the policy that is better on most traces comes "
    "first. Load is the rate of requests ÷ what vLLM's default completes. To run a cell again: "
    "`python -m lab.arena --trace COLUMN --load LOAD --policy 'ROW'`."
)


class Question(NamedTuple):
    """A question, and the measure that answers it.

    more: more of it is better. apart: differences are shown, else ratios. full: the difference, or
    the logarithm of the ratio to base 2, that has the full colour in the figure.
    """

    title: str
    measure: str
    unit: str
    words: str
    more: bool = False
    apart: bool = False
    full: float = 2.0


QUESTIONS = (
    Question("First token", "ttft_ms", "ms", "mean time to the first token"),
    Question("Gaps", "gap_ms", "ms", "99th percentile of the gaps between tokens"),
    Question("Goodput", "good", "%", "share of the requests that met their limits", True, True, 50),
    Question("Fairness", "modest_ms", "ms", "mean time to the first token of the modest user"),
    Question(
        "Worst wait", "wait_ms", "ms", "longest time not computed (queued, preempted, paused)"
    ),
    Question("Recomputed", "recomputed", "%", "share of the tokens that were computed again",
             apart=True, full=20.0),
    Question("Preempted", "preemptions", "", "preemptions per request", apart=True, full=1.0),
    Question("Makespan", "makespan_s", "s", "time until the last answer of all jobs", full=0.5),
)  # fmt: skip


class Cell(NamedTuple):
    """A policy beside the base. gain: above 0 if it is better; verdict: its sign if shown, or 0."""

    text: str
    gain: float
    verdict: int


def asked(question: Question, cases: Cases) -> list[Case]:
    """Return the cases whose trace has an answer to a question."""
    return [case for case in cases if question.measure in case["seeds"][0]]


def cell_of(question: Question, base: Case, case: Case) -> Cell:
    measure = question.measure
    if question.apart:
        found = difference(values(base, measure), values(case, measure))
        form = "{:+.2f}" if question.full <= 1 else "{:+.0f}"
        gain, apart = found.mean if question.more else -found.mean, found
        text = formatted(found, form).replace("± +", "± ")
    else:
        found = ratio(base, case, measure)
        gain, text = -math.log2(found.mean), formatted(found, "{:.2f}")
        apart = Estimate(found.mean - 1, found.half)
    verdict = int(np.sign(gain)) if apart.shown else 0
    return Cell(text if verdict else SAME, gain, verdict)


def cells_of(question: Question, cases: Cases) -> dict[str, dict[str, Cell]]:
    """Return the cells of one load by policy and trace, the most often better policy first."""
    bases = {case["trace"]: case for case in only(cases, {"policy": BASE})}
    rows: dict[str, dict[str, Cell]] = {}
    for case in cases:
        if case["policy"] != BASE:
            cell = cell_of(question, bases[case["trace"]], case)
            rows.setdefault(case["policy"], {})[case["trace"]] = cell

    def rank(policy: str) -> tuple[int, float]:
        cells = rows[policy].values()
        return sum(cell.verdict for cell in cells), sum(cell.gain for cell in cells)

    return {policy: rows[policy] for policy in sorted(rows, key=rank, reverse=True)}


def table(question: Question, cases: Cases, rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """Return the table of one load; the base's row has its own values."""
    own = {case["trace"]: case for case in only(cases, {"policy": BASE})}
    traces = list(next(iter(rows.values())))
    best = {trace: max(rows, key=lambda policy: _shown(rows[policy][trace])) for trace in traces}
    lines = [["policy", *traces], [f"{BASE}: {question.unit}"]]
    form = "{:,.2f}" if question.full <= 1 else "{:,.0f}"
    lines[1] += [formatted(mean(own[trace], question.measure), form) for trace in traces]
    shown = {policy: c for policy, c in rows.items() if any(cell.verdict for cell in c.values())}
    for policy, cells in shown.items():
        texts = [
            f"**{cell.text}**" if best[trace] == policy and cell.verdict > 0 else cell.text
            for trace, cell in cells.items()
        ]
        lines.append([policy, *texts])
    alike = ", ".join(f"`{short(policy)}`" for policy in rows if policy not in shown)
    return markdown(lines) + (f"\n\nNo difference shown on any trace: {alike}." if alike else "")


def short(policy: str) -> str:
    """Return a policy's name for a figure: of a class in a file its own."""
    return policy.rpartition(":")[2]


def _shown(cell: Cell) -> float:
    return cell.gain * (cell.verdict > 0)


def page(cases: Cases, traces: Mapping[str, str]) -> str:
    """Return all tables of all questions."""
    parts = [
        "## All tables",
        LEGEND,
        "\n".join(f"- `{name}`: {words}" for name, words in traces.items()),
    ]
    for question in QUESTIONS:
        known = asked(question, cases)
        parts += [f"### {question.title}: {question.words}"] if known else []
        for load in sorted({case["load"] for case in known}, reverse=True):
            at_load = only(known, {"load": load})
            rows = cells_of(question, at_load)
            parts += [f"At a load of {load:g}:", table(question, at_load, rows)] if rows else []
    files = {case["policy"]: case["file"] for case in cases if case["file"]}
    named = ", ".join(f"`{policy}` {sha256}" for policy, sha256 in files.items())
    return "\n\n".join([*parts, *([f"Files by their SHA-256: {named}."] if files else [])])


@styled
def figure(cases: Cases, caption: str) -> Figure:
    """Draw all cells, a panel for each question: a row for each policy, and a column for each trace
    and load. Blue is better, red worse, white no difference shown.
    """
    policies = [p for p in dict.fromkeys(case["policy"] for case in cases) if p != BASE]
    of = {question: known for question in QUESTIONS if (known := asked(question, cases))}
    widths = [max(5, len(only(known, {"policy": BASE}))) for known in of.values()]
    drawn = new_figure((16, 2.5 + 0.22 * len(policies)), caption)
    panels = drawn.subplots(1, len(of), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (question, known) in zip(panels, of.items()):
        mesh = _draw(axes, question, known, policies)
    panels[0].set_yticks(np.arange(len(policies)) + 0.5, map(short, policies), fontsize=9)
    panels[0].invert_yaxis()
    bar = drawn.colorbar(mesh, ax=panels, ticks=[-1, 0, 1], aspect=30, pad=0.01)
    ends = ["4 times,\n−50%: worse", "no difference\nshown", "a quarter,\n+50%: better"]
    bar.ax.set_yticklabels(ends, fontsize=9)
    return drawn


def _draw(axes: Axes, question: Question, cases: Cases, policies: Sequence[str]) -> Any:
    columns = [(case["trace"], case["load"]) for case in only(cases, {"policy": BASE})]
    shades = np.zeros((len(policies), len(columns)))
    for load in {load for _, load in columns}:
        for policy, cells in cells_of(question, only(cases, {"load": load})).items():
            for trace, cell in cells.items():
                place = policies.index(policy), columns.index((trace, load))
                shades[place] = cell.gain / question.full if cell.verdict else 0.0
    names = [trace for trace, _ in columns]
    firsts = [names.index(trace) for trace in dict.fromkeys(names)]
    middles = [(first + last) / 2 for first, last in pairwise([*firsts, len(names)])]
    axes.set_title(question.title, fontsize=12)
    axes.set_xticks(middles, dict.fromkeys(names), rotation=90, fontsize=9)
    axes.tick_params(length=0)
    axes.vlines(firsts[1:], 0, len(policies), "#555555", lw=0.8)
    return axes.pcolormesh(shades, cmap="RdBu", vmin=-1, vmax=1, edgecolors="#dddddd", lw=0.3)
