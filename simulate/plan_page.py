"""The report of a plan: sentences, a table, a figure and the page that holds them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from client import drawing
from client.drawing import new_figure, styled, styles
from client.machine import save_json
from compare.report.tables import markdown
from simulate.plan import SURE, Judged, PlanAnswer, coverage
from simulate.trial import Question

FILES = ("plan.json", "plan.md", "plan.png")
SAME = (
    " The requests and their times are the same in each: what differs is the costs, as uncertain "
    "as they are, and the choices of a router that draws."
)


def sentences(answers: Sequence[PlanAnswer], question: Question) -> list[str]:
    """Return the answers in words, the fewest replicas first."""
    ordered = sorted(answers, key=lambda answer: answer.fewest or math.inf)
    return [_sentence(answer, question) for answer in ordered]


def _sentence(answer: PlanAnswer, question: Question) -> str:
    if (n := answer.fewest) is None:
        return f"{answer.name}: {answer.why_not}."
    by_number = {judged.replicas: judged for judged in answer.judged}
    text = f"{answer.name}: {n} replica{'s' * (n > 1)}, which suffice{'s' * (n == 1)} with "
    text += f"probability {_share(by_number[n])}"
    if fewer := by_number.get(n - 1):
        text += f"; {n - 1} with {_share(fewer)}"
        if fewer.growing:
            text += f"; its queue grows in {fewer.growing} of {len(question.seeds)}"
    text += f" ({answer.simulated_requests:,} simulated requests, {answer.requests:,} a trace"
    text += f" in {answer.arrivals_s:,.3g} s)" if answer.arrivals_s else ")"
    if answer.requests < answer.growth_needs:
        text += "; whether the queue grows is not known, since that takes traces of "
        text += f"{answer.growth_needs:,} requests"
    return f"{text}."


def _share(judged: Judged) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(judged.suffices, *judged.suffices_between)


def table(answers: Sequence[PlanAnswer], question: Question) -> list[list[str]]:
    """Return a row for each number that all traces judged, below the names of the columns."""
    n, rows = len(question.seeds), list[dict[str, str]]()
    for answer in answers:
        growth_is_known = answer.requests >= answer.growth_needs
        for judged in answer.judged:
            low, high = (100 * share for share in judged.attainment_between)
            row = {
                "variant": answer.name,
                "replicas": f"{judged.replicas}{' ←' * (judged.replicas == answer.fewest)}",
                "within the limits, %": f"{100 * statistics.mean(judged.attainments):.2f}",
                f"of another trace, {coverage(n):.0%}": f"{low:.1f} to {high:.1f}",
                "queue grows": f"in {judged.growing} of {n}" if growth_is_known else "not known",
                "suffices with probability": f"{judged.suffices:.2f}",
                "95%": "{:.2f} to {:.2f}".format(*judged.suffices_between),
                "first token p99, ms": f"{judged.p99_ttft_ms:,.0f}",
                "latency p99, ms": f"{judged.p99_e2el_ms:,.0f}",
            }
            rows.append(row)
    return [[*rows[0]], *([*row.values()] for row in rows)]


@styled
def figure(answers: Sequence[PlanAnswer], question: Question, caption: str) -> Figure:
    """Draw the share within the limits against replicas, of every trace."""
    fig = new_figure((9, 5.2), caption)
    axes = fig.subplots()
    style_of = styles(answer.name for answer in answers)
    for answer in answers:
        style = style_of[answer.name]
        means = [100 * share for share in answer.tried.values()]
        how: dict[str, Any] = {"color": style.colour, "marker": style.marker, "label": answer.name}
        axes.plot([*answer.tried], means, style.line, **how)
        for judged in answer.judged:
            low, high = (100 * share for share in judged.attainment_between)
            axes.vlines(judged.replicas, low, high, color=style.colour, lw=6, alpha=0.25)
    pairs = ((answer, n) for answer in answers for n, share in answer.grows.items() if share > 0.5)
    if growing := [(n, 100 * answer.tried[n]) for answer, n in pairs]:
        axes.plot(*zip(*growing), "x", color="#c00000", ms=14, label="the queue grows")
    goal = 100 * question.attainment
    axes.axhline(goal, color="#222222", lw=1, ls=":")
    beside = axes.get_yaxis_transform()  # x: share of the width
    axes.text(0.99, goal, f"asked for: {goal:g}%", transform=beside, ha="right", va="top")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("replicas")
    axes.set_ylabel("requests within the limits, %")
    axes.set_title(f"How many replicas for {question.limits}?")
    axes.legend(title=f"mean, and where\n{coverage(len(question.seeds)):.0%} of traces lie")
    return fig


def write(
    out: Path,
    answers: Sequence[PlanAnswer],
    question: Question,
    facts: dict[str, Any],
    caption: str,
) -> None:
    """Write plan.json, plan.md and plan.png."""
    out.mkdir(parents=True, exist_ok=True)
    results = {"question": asdict(question), "answers": [asdict(answer) for answer in answers]}
    save_json(out / "plan.json", results | facts)
    drawing.save(figure(answers, question, caption), out / "plan.png")
    parts = [
        "# How many replicas? (simulated)",
        f"{100 * question.attainment:g}% of the requests of `{question.arrival}` must have "
        f"{question.limits}, and the queue must not grow; {len(question.seeds)} traces, costs "
        f"uncertain by {100 * question.uncertainty:.1f}% (standard deviation). Each number is "
        f"judged by all traces; the answer is the fewest that suffice in {100 * SURE:g}% of them."
        + ("" if question.drawn else SAME),
        "\n".join(f"- {sentence}" for sentence in sentences(answers, question)),
        markdown(table(answers, question)),
        "![The share of requests within the limits against replicas](plan.png)",
        f"{caption}, {facts['date']}, `{facts['command']}`",
    ]
    (out / "plan.md").write_text("\n\n".join(parts) + "\n")
