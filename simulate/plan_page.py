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
from client.drawing import looks, new_figure, styled
from client.machine import save_json
from compare.report.tables import markdown
from simulate.plan import SURE, PlanAnswer, coverage
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
    text += "probability "
    text += _share(by_number[n].suffices, by_number[n].suffices_between)
    if fewer := by_number.get(n - 1):
        text += f"; {n - 1} with {_share(fewer.suffices, fewer.suffices_between)}"
        if fewer.growing:
            text += f"; its queue grows in {fewer.growing} of {len(question.seeds)}"
    text += f" ({answer.simulated_requests:,} simulated requests, {answer.requests:,} a trace"
    text += f" in {answer.arrivals_s:,.3g} s)" if answer.arrivals_s else ")"
    if answer.requests < answer.growth_needs:
        text += "; whether the queue grows is not known, since that takes traces of "
        text += f"{answer.growth_needs:,} requests"
    return f"{text}."


def _share(value: float, between: tuple[float, float]) -> str:
    return f"{value:.2f} ({between[0]:.2f} to {between[1]:.2f})"


def table(answers: Sequence[PlanAnswer], question: Question) -> list[list[str]]:
    another = f"of another trace, {coverage(len(question.seeds)):.0%}"
    rows = [
        ["variant", "replicas", "within the limits, %", another, "queue grows",
         "suffices with probability", "95%", "first token p99, ms", "latency p99, ms"],
    ]  # fmt: skip
    for answer in answers:
        growth_is_known = answer.requests >= answer.growth_needs
        for judged in answer.judged:
            n = len(judged.attainments)
            low, high = judged.attainment_between
            from_, to = judged.suffices_between
            mark = " ←" * (judged.replicas == answer.fewest)
            rows.append([
                answer.name, f"{judged.replicas}{mark}",
                f"{100 * statistics.mean(judged.attainments):.2f}",
                f"{100 * low:.1f} to {100 * high:.1f}",
                f"in {judged.growing} of {n}" if growth_is_known else "not known",
                f"{judged.suffices:.2f}", f"{from_:.2f} to {to:.2f}",
                f"{judged.p99_ttft_ms:,.0f}", f"{judged.p99_e2el_ms:,.0f}",
            ])  # fmt: skip
    return rows


@styled
def figure(answers: Sequence[PlanAnswer], question: Question, caption: str) -> Figure:
    """Draw the share within the limits against replicas, of every trace."""
    fig = new_figure((9, 5.2), caption)
    axes = fig.subplots()
    look_of = looks(answer.name for answer in answers)
    for answer in answers:
        look = look_of[answer.name]
        means = [100 * share for share in answer.tried.values()]
        axes.plot(
            [*answer.tried], means, look.line,
            color=look.colour, marker=look.marker, label=answer.name,
        )  # fmt: skip
        for judged in answer.judged:
            low, high = (100 * share for share in judged.attainment_between)
            axes.vlines(judged.replicas, low, high, color=look.colour, lw=6, alpha=0.25)
    growing = [
        (n, 100 * answer.tried[n])
        for answer in answers
        for n, share in answer.grows.items()
        if share > 0.5
    ]
    if growing:
        axes.plot(*zip(*growing), "x", color="#c00000", ms=14, label="the queue grows")
    goal = 100 * question.attainment
    axes.axhline(goal, color="#222222", lw=1, ls=":")
    axes.annotate(
        f"asked for: {goal:g}%", (0.99, goal), xycoords=("axes fraction", "data"),
        xytext=(0, -14), ha="right", textcoords="offset points", fontsize=10,
    )  # fmt: skip
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
