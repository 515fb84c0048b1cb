"""How many replicas? The fewest that meet latency limits, by simulation, with what chance does to
the answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from client.data import PromptData, Request, save_json
from client.draws import WorkloadError
from client.load import Watch
from client.report.drawing import STYLE, caption_of, looks
from client.report.tables import markdown
from client.simulated import Simulated
from client.summary import meet
from config import Config
from simulate.costs import Costs
from simulate.fleet import Layout

MOST = 1024  # replicas that are tried
SURE = 0.95  # the probability with which the fewest must suffice
ATTAINMENT = 0.99  # unless it is said
SEEDS = 40  # the least and the most of so many hold 95% of others (`predicted`)
FEW = 3  # seeds by which the number is looked for, before all of them judge its neighbours
LONG_S = 60.0  # of arrivals, unless --numsamples says how many requests
FEWEST, MOST_REQUESTS = 1_000, 20_000


def requests_for(rate: float) -> int:
    """Requests of a trace at so many a second."""
    return min(MOST_REQUESTS, max(FEWEST, math.ceil(LONG_S * rate)))


class PlanError(WorkloadError):
    """No number of replicas is the answer; the message says why."""


@dataclass(frozen=True)
class Question:
    """What must be met: `attainment` of the requests within the limits `slo` (ms), and by what.

    uncertainty: relative standard deviation of what the costs say as a whole, from their fit.
    """

    slo: dict[str, float]
    attainment: float
    arrival: str
    requests: int
    seeds: tuple[int, ...]
    uncertainty: float


class Case(NamedTuple):
    """A trace that so many replicas serve; picklable, since several processes serve them."""

    name: str
    config: Config
    costs: Costs
    layout: Layout
    stream: bool
    data: dict[str, Any]  # of PromptData
    question: Question
    seed: int


class Found(NamedTuple):
    """What came of a case."""

    attainment: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    requests: int


@dataclass(frozen=True)
class Judged:
    """So many replicas, over seeds."""

    replicas: int
    attainments: list[float]
    p99_ttft_ms: float
    p99_e2el_ms: float
    suffices: float  # the probability
    suffices_between: tuple[float, float]  # Wilson's interval of it, 95%
    attainment_between: tuple[float, float]  # where that of another trace is expected


@dataclass(frozen=True)
class Answer:
    """Of one variant: the fewest replicas, None where none is enough, and what was tried."""

    name: str
    fewest: int | None
    why_not: str
    judged: list[Judged]
    tried: dict[int, float]  # mean share within the limits, of a few traces or of all
    simulated_requests: int


def serve(case: Case) -> Found:
    """Serve one trace. The uncertainty of the costs is drawn with the seed."""
    rng = np.random.default_rng([case.seed, 11])
    factor = math.exp(case.question.uncertainty * rng.standard_normal())
    data = PromptData(**case.data, seed=case.seed)
    requests = data.requests(case.question.requests, case.question.arrival)
    return found(case, requests, case.costs.scaled(factor))


def found(case: Case, requests: Sequence[Request], costs: Costs) -> Found:
    layout = replace(case.layout, seed=case.seed)
    server = Simulated(case.name, case.config, costs, layout, stream=case.stream)
    outcomes = server.replay(requests, math.inf, Watch())
    answers = outcomes.answers

    def p99_ms(seconds: np.ndarray) -> float:
        return 1e3 * float(np.percentile(seconds, 99)) if len(seconds) else math.inf

    return Found(
        int(meet(answers, case.question.slo).sum()) / len(requests),
        p99_ms(answers.ttft_s),
        p99_ms(answers.e2e_s),
        len(requests),
    )


class Planner:
    """Asks for one variant how many replicas suffice."""

    def __init__(
        self,
        case: Case,
        processes: ProcessPoolExecutor,
        say: Callable[[str], None],
    ):
        self._case, self._processes, self._say = case, processes, say
        self._found: dict[int, dict[int, Found]] = {}  # by replicas and seed
        self._judged: dict[int, Judged] = {}

    def answer(self) -> Answer:
        """Look for the fewest by a few seeds, then judge them and one fewer by all."""
        case, question = self._case, self._case.question
        if (alone := self._alone()) < question.attainment:
            limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in question.slo.items())
            why = (
                f"no number of replicas meets {limits}: of requests that come one at a time, each "
                f"alone on its replica, {100 * alone:.1f}% do; relax the limits, or use a faster "
                "engine"
            )
            return Answer(case.name, None, why, [], {}, self._spent())
        most = 1
        while not self._enough(most):
            most *= 2
            if most > MOST:
                why = f"{MOST} replicas do not suffice; name a lower rate"
                return Answer(case.name, None, why, [], {}, self._spent())
        least = most // 2  # does not suffice
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if self._enough(middle) else (middle, most)
        fewest = most
        while self.judge(fewest).suffices < SURE:
            fewest += 1
            if fewest > min(MOST, 2 * most):
                why = (
                    f"{fewest - 1} replicas suffice in only {self.judge(fewest - 1).suffices:.0%} "
                    f"of the traces, and more are no better: the limits are within what the costs "
                    f"are uncertain by; relax them"
                )
                return Answer(case.name, None, why, [], {}, self._spent())
        while fewest > 1 and self.judge(fewest - 1).suffices >= SURE:
            fewest -= 1
        self.judge(fewest + 1)  # what one more is good for
        judged = [self._judged[n] for n in sorted(self._judged)]
        tried = {
            n: statistics.mean(each.attainment for each in by_seed.values())
            for n, by_seed in sorted(self._found.items())
        }
        return Answer(case.name, fewest, "", judged, tried, self._spent())

    def judge(self, replicas: int) -> Judged:
        """So many replicas by all seeds."""
        if replicas in self._judged:
            return self._judged[replicas]
        question = self._case.question
        self._serve(replicas, question.seeds)
        found = list(self._found[replicas].values())
        attained = [each.attainment for each in found]
        met = sum(each >= question.attainment for each in attained)
        self._say(
            f"{self._case.name}, {replicas} replica{'s' * (replicas > 1)}: "
            f"{100 * statistics.mean(attained):.1f}% within the limits, enough in {met} of "
            f"{len(found)} traces"
        )
        self._judged[replicas] = Judged(
            replicas,
            attained,
            statistics.mean(each.p99_ttft_ms for each in found),
            statistics.mean(each.p99_e2el_ms for each in found),
            met / len(found),
            wilson(met, len(found)),
            predicted(attained),
        )
        return self._judged[replicas]

    def _enough(self, replicas: int) -> bool:
        """By a few seeds, half of which must meet it."""
        seeds = self._case.question.seeds[:FEW]
        self._serve(replicas, seeds)
        attained = [self._found[replicas][seed].attainment for seed in seeds]
        return statistics.median(attained) >= self._case.question.attainment

    def _serve(self, replicas: int, seeds: Sequence[int]) -> None:
        known = self._found.setdefault(replicas, {})
        layout = replace(self._case.layout, replicas=replicas)
        missing = [seed for seed in seeds if seed not in known]
        cases = [self._case._replace(layout=layout, seed=seed) for seed in missing]
        known.update(zip(missing, self._processes.map(serve, cases)))

    def _alone(self) -> float:
        """The share of requests that meet the limits on an idle replica."""
        data = PromptData(**self._case.data, seed=self._case.question.seeds[0])
        requests = data.requests(FEWEST, "closed:1")
        layout = replace(self._case.layout, replicas=1, autoscaling=None)
        mine = found(self._case._replace(layout=layout), requests, self._case.costs)
        self._idle = mine.requests
        return mine.attainment

    def _spent(self) -> int:
        by_seed = [each for seeds in self._found.values() for each in seeds.values()]
        return self._idle + sum(each.requests for each in by_seed)


def wilson(met: int, n: int) -> tuple[float, float]:
    """The 95% interval of a probability of which `met` of n trials are known (Wilson, 1927)."""
    z = 1.959964
    centre = (met + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(met * (n - met) / n + z * z / 4)
    return max(0.0, round(centre - half, 9)), min(1.0, round(centre + half, 9))


def predicted(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value lies that comes about as these did: between the least and the most of
    them, with probability `coverage(n)` or more, whatever their distribution (order statistics;
    Wilks, 1941), as far as the costs are right.
    """
    return min(values), max(values)


def coverage(n: int) -> float:
    """Of an interval by n values (`predicted`)."""
    return (n - 1) / (n + 1)


def plan(
    cases: Sequence[Case], say: Callable[[str], None], processes: int | None = None
) -> list[Answer]:
    """The answer of each variant. Raises PlanError if none has one."""
    with ProcessPoolExecutor(processes) as pool:
        answers = [Planner(case, pool, say).answer() for case in cases]
    if all(answer.fewest is None for answer in answers):
        raise PlanError("; ".join(f"{answer.name}: {answer.why_not}" for answer in answers))
    return answers


def sentences(answers: Sequence[Answer], question: Question) -> list[str]:
    """The answers in words, the fewest replicas first."""
    found = []
    for answer in sorted(answers, key=lambda answer: answer.fewest or math.inf):
        if answer.fewest is None:
            found.append(f"{answer.name}: {answer.why_not}.")
            continue
        by_number = {judged.replicas: judged for judged in answer.judged}
        mine, n = by_number[answer.fewest], answer.fewest
        text = (
            f"{answer.name}: {n} replica{'s' * (n > 1)}, which suffice{'s' * (n == 1)} with "
            f"probability {_share(mine.suffices, mine.suffices_between)}"
        )
        if fewer := by_number.get(n - 1):
            text += f"; {n - 1} with {_share(fewer.suffices, fewer.suffices_between)}"
        found.append(f"{text} ({answer.simulated_requests:,} simulated requests).")
    return found


def _share(value: float, between: tuple[float, float]) -> str:
    return f"{value:.2f} ({between[0]:.2f} to {between[1]:.2f})"


def table(answers: Sequence[Answer], question: Question) -> list[list[str]]:
    another = f"of another trace, {coverage(len(question.seeds)):.0%}"
    rows = [
        ["variant", "replicas", "within the limits, %", another,
         "suffices with probability", "95%", "first token p99, ms", "latency p99, ms"],
    ]  # fmt: skip
    for answer in answers:
        for judged in answer.judged:
            low, high = judged.attainment_between
            from_, to = judged.suffices_between
            mark = " ←" if judged.replicas == answer.fewest else ""
            rows.append(
                [
                    answer.name,
                    f"{judged.replicas}{mark}",
                    f"{100 * statistics.mean(judged.attainments):.2f}",
                    f"{100 * low:.1f} to {100 * high:.1f}",
                    f"{judged.suffices:.2f}",
                    f"{from_:.2f} to {to:.2f}",
                    f"{judged.p99_ttft_ms:,.0f}",
                    f"{judged.p99_e2el_ms:,.0f}",
                ]
            )
    return rows


def figure(answers: Sequence[Answer], question: Question, caption: str) -> Figure:
    """The share within the limits against replicas, of every trace."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9, 5.2), layout="constrained")
        axes = fig.subplots()
        own = looks(answer.name for answer in answers)
        for answer in answers:
            look = own[answer.name]
            at, means = list(answer.tried), [100 * share for share in answer.tried.values()]
            axes.plot(
                at, means, look.line, color=look.colour, marker=look.marker, label=answer.name
            )
            for judged in answer.judged:
                low, high = (100 * share for share in judged.attainment_between)
                axes.vlines(judged.replicas, low, high, color=look.colour, lw=6, alpha=0.25)
        axes.axhline(100 * question.attainment, color="#222222", lw=1, ls=":")
        axes.annotate(
            f"asked for: {100 * question.attainment:g}%",
            (0.99, 100 * question.attainment), xycoords=("axes fraction", "data"),
            xytext=(0, -14), ha="right", textcoords="offset points", fontsize=10,
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("replicas")
        axes.set_ylabel("requests within the limits, %")
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in question.slo.items())
        axes.set_title(f"How many replicas for {limits}?")
        axes.legend(title=f"mean, and where\n{coverage(len(question.seeds)):.0%} of traces lie")
        caption_of(fig, caption)
    return fig


def write(
    out: Path,
    answers: Sequence[Answer],
    question: Question,
    told: dict[str, Any],
    drawn: Callable[[Figure, Path], None],
    caption: str,
) -> None:
    """plan.json, plan.md and plan.png."""
    out.mkdir(parents=True, exist_ok=True)
    kept = {"question": asdict(question), "answers": [asdict(answer) for answer in answers]}
    save_json(out / "plan.json", kept | told)
    drawn(figure(answers, question, caption), out / "plan.png")
    limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in question.slo.items())
    parts = [
        "# How many replicas? (simulated)",
        f"{100 * question.attainment:g}% of the requests must have {limits}, at "
        f"`{question.arrival}`; {question.requests:,} requests a trace, {len(question.seeds)} "
        f"traces, costs uncertain by {100 * question.uncertainty:.1f}% (standard deviation). Each "
        f"number is judged by all traces; the answer is the fewest that suffice in {100 * SURE:g}% "
        "of them.",
        "\n".join(f"- {sentence}" for sentence in sentences(answers, question)),
        markdown(table(answers, question)),
        "![The share of requests within the limits against replicas](plan.png)",
        f"{caption}, {told['date']}, `{told['command']}`",
    ]
    (out / "plan.md").write_text("\n\n".join(parts) + "\n")
