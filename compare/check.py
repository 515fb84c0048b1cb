"""Did it get worse? (--check): a saved run's traces again, each seed paired with the saved one.

Each seed gives one ratio, so that what a trace does to both runs cancels. A measure is worse if its
mean ratio is beyond its limit and its interval leaves out no change. That interval is wider than
95% by Bonferroni's correction (Dunn, Multiple Comparisons Among Means, JASA 1961), so that the
measures of a run raise one false alarm in twenty together. A measure is not worse if its 95%
interval ends within the limit. All of them must be, so that no correction is needed (Berger,
Multiparameter Hypothesis Testing and Acceptance Sampling, Technometrics 1982).

No chance excuses an answer that is missing: one more unanswered request than in the saved run is
worse (over all seeds: failed, refused, or left when a bound cut the replay), and so is a measure
that a seed of the saved run has and this run lacks. What the saved run lacks is not judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from rich.console import Console

from client import arguments
from client.results import KEYS, Result
from client.runs import SavedRun
from client.saving import written
from client.traces import Request, load_trace
from compare.analysis import CONFIDENCE, half_width
from compare.report.tables import NONE, Terminal
from config.settings import ConfigError

LIMIT = 0.05
JUDGED = ("mean_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "mean_tpot_ms", "output_throughput")
HIGHER = ("request_throughput", "output_throughput", "goodput", "attainment")  # is better
LIMITED = [name for name in KEYS if name in HIGHER or name.endswith("_ms")]
MOST = 100  # more seeds that a run can be expected to have
WORSE, CANNOT_TELL, NOT_WORSE = "worse", "cannot tell", "not worse"
# whatever ends a check that does not conclude, its file says this
UNFINISHED = "the check did not end, so it has no answer; its output says why"

Seeds = Sequence[Mapping[str, Result]]  # numbers of each variant, one entry a seed


class Change(NamedTuple):
    """A variant's measure in two runs of the same traces.

    saved, now: means, or numbers of requests. limit: the part by which it may get worse. ratio:
    now ÷ saved, with a 95% interval; NaN for an answer that `why` says instead. more: seeds of both
    runs that would tell; None if more than MOST.
    """

    variant: str
    measure: str
    saved: float
    now: float
    limit: float
    answer: str
    why: str = ""
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    more: int | None = None

    @property
    def interval(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"

    @property
    def of_limit(self) -> str:
        where = "beyond" if self.answer == WORSE else "within"
        return "" if self.why else f", {where} its limit of {100 * self.limit:g}%"

    def __str__(self) -> str:
        ratio = f"is {self.ratio:.3f} times the saved run's ({self.interval})"
        return f"{self.variant}'s {self.measure} {self.why or ratio}"


def judged(
    name: str, measure: str, pairs: Sequence[tuple[float, float | None]], limit: float,
    confidence: float,
) -> Change:  # fmt: skip
    """Return a measure's change. pairs: its saved value in each seed that has one, and that of now.
    confidence: that an alarm needs.
    """
    sign, n = -1 if measure in HIGHER else 1, len(pairs)
    both = [(a, b) for a, b in pairs if b is not None]
    saved = fmean(a for a, _ in pairs)
    now = fmean(b for _, b in both) if both else math.nan

    def without_ratio(answer: str, why: str) -> Change:
        return Change(name, measure, saved, now, limit, answer, why)

    if lost := n - len(both):
        return without_ratio(WORSE, f"is missing in {lost} of {n} seeds; the saved run has it")
    # a value that is 0 in one run alone has no ratio, but a direction
    if zeros := [sign * (b - a) > 0 for a, b in both if (a == 0) != (b == 0)]:
        better = not any(zeros) and sign * (now - saved) <= 0
        said = WORSE if all(zeros) else NOT_WORSE if better else CANNOT_TELL
        means = f"on average {saved:.4g} saved and {now:.4g} now"
        return without_ratio(said, f"is 0 in one run alone in {len(zeros)} of {n} seeds: {means}")
    if n < 2:
        return without_ratio(CANNOT_TELL, "has one seed in the saved run, and needs two")
    # logarithms of ratios, above 0 where it is worse
    worse = sign * np.array([math.log(b / a) if a else 0.0 for a, b in both])
    mean, deviation, most = worse.mean(), worse.std(ddof=1), sign * math.log1p(sign * limit)

    def answer(n: int) -> str:
        if mean > max(most, half_width(deviation, n, confidence)):
            return WORSE
        return NOT_WORSE if mean + half_width(deviation, n) <= most else CANNOT_TELL

    more = next((k for k in range(MOST + 1) if answer(n + k) != CANNOT_TELL), None)
    half = half_width(deviation, n)
    ratio, low, high = np.exp([sign * mean, sign * mean - half, sign * mean + half]).tolist()
    return Change(name, measure, saved, now, limit, answer(n), "", ratio, low, high, more)


def unanswered(name: str, before: Seeds, now: Seeds) -> Change | None:
    """Return the change of a variant's unanswered requests over all seeds; None without any."""
    saved = more = 0
    for old, new in ((a.get(name, Result()), b.get(name, Result())) for a, b in zip(before, now)):
        # how many requests fit into --max-seconds is a matter of speed, which measures tell
        cuts = not str((old.cut or {}).get("at")).startswith("--max-seconds")
        saved, more = saved + _unanswered(old, cuts), more + _unanswered(new, cuts)
    said = WORSE if more > saved else NOT_WORSE
    why = f"are {more:,}, and {saved:,} in the saved run"
    change = Change(name, "unanswered requests", saved, more, 0, said, why)
    return change if saved or more else None


def _unanswered(result: Result, cuts: bool) -> int:
    cut = (cuts and result.cut) or {}
    return sum((result.failed, cut.get("in_flight", 0), cut.get("unsent", 0)))


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """Return {"mean_e2el_ms": 0.05} for ["mean_e2el_ms:5%"]. Raises ConfigError."""
    form = f"NAME:PERCENT, above 0 and below 100, with one of {', '.join(LIMITED)}"
    limits = arguments.parse_limits(texts, "--limit", LIMITED, form, 100, "%")
    return {name: limit / 100 for name, limit in limits.items()} or dict.fromkeys(JUDGED, LIMIT)


def changes(before: Seeds, now: Seeds, limits: Mapping[str, float]) -> list[Change]:
    """Compare unanswered requests, and the measures with limits, of each variant that was saved.
    Raises ConfigError if the saved run has none of these measures.
    """
    pairs = dict[tuple[str, str], list[tuple[Any, Any]]]()
    names = dict.fromkeys(name for seed in before for name in seed)
    for name, measure in itertools.product(names, limits):
        both = [
            [s.get(name, Result()).number(measure) for s in seeds] for seeds in zip(before, now)
        ]
        if known := [(old, new) for old, new in both if old is not None]:
            pairs[name, measure] = known
    if not pairs:
        raise ConfigError(f"the runs have no {', '.join(limits)}; name other measures by --limit")
    confidence = 1 - (1 - CONFIDENCE) / len(pairs)
    counts = filter(None, (unanswered(name, before, now) for name in names))
    return [*counts, *(judged(*k, both, limits[k[1]], confidence) for k, both in pairs.items())]


def answer(found: Sequence[Change]) -> str:
    """Return the answer over all measures."""
    answers = [change.answer for change in found]
    return next((each for each in (WORSE, CANNOT_TELL) if each in answers), NOT_WORSE)


def sentence(found: Sequence[Change]) -> str:
    """Return the answer in a sentence, with a measure that decides it."""
    said = answer(found)
    which = [change for change in found if change.answer == said]
    count = f"{len(which)} of {len(found)} measures"
    if said == WORSE:
        return f"Worse, {count}: {which[0]}{which[0].of_limit}."
    if said == CANNOT_TELL:
        last = max(which, key=lambda change: change.more or MOST + 1)
        if last.why:
            return f"Cannot tell, {count}: {last}."
        seeds = f"{last.more} more seed" if last.more else f"more than {MOST} more seed"
        plural = "s" * (last.more != 1)
        return f"Cannot tell, {count}: {seeds}{plural} of both runs would; {last}."
    if len(found) == 1:
        return f"Not worse: {found[0]}{found[0].of_limit}."
    return f"Not worse: all {len(found)} measures are within their limits."


def table(found: Sequence[Change]) -> Terminal:
    rows = [["variant", "measure", "saved", "now", "ratio", "interval", "answer"]]
    for each in found:
        numbers = f"{each.saved:,.4g}", f"{each.now:,.4g}", f"{each.ratio:.3f}", each.interval
        shown = [NONE if "nan" in number else number for number in numbers]
        rows.append([each.variant, each.measure, *shown, each.answer])
    n = sum(each.limit > 0 for each in found)
    caption = f"now ÷ saved, 95% interval; an alarm needs a wider one, for {n} measures"
    return Terminal(rows, 2, caption)


def junit(path: Path, found: Sequence[Change] = ()) -> None:
    """Write a JUnit report: a test for each measure, failed if worse, skipped if unknown; without
    measures an error, which stays until a check has an answer.
    """
    tags = {WORSE: "failure", CANNOT_TELL: "skipped"}
    cases = [(each.variant, each.measure, tags.get(each.answer), str(each)) for each in found]
    suite = ElementTree.Element("testsuite", name="check")
    for of, name, kind, message in cases or [("check", "check", "error", UNFINISHED)]:
        test = ElementTree.SubElement(suite, "testcase", classname=of, name=name)
        if kind:
            ElementTree.SubElement(test, kind, message=message)
    counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for count, tag in counted.items():
        suite.set(count, str(len([*suite.iter(tag)])))
    with written(path) as file:
        ElementTree.ElementTree(suite).write(file, encoding="unicode", xml_declaration=True)


@dataclass(frozen=True, slots=True)
class Check:
    """A check against a saved run.

    words: the command line that makes its requests and servers again.
    """

    saved: SavedRun
    limits: Mapping[str, float]
    junit: Path | None
    words: Sequence[str]

    def trace(self, seed: int) -> list[Request] | None:
        """Return the saved trace of a seed; None if it was too large to be saved."""
        path = self.saved.folder / f"seed-{seed}" / "trace.jsonl"
        return load_trace(path) if path.exists() else None

    def compared(self, run: SavedRun) -> list[Change]:
        """Return the changes from the saved run."""
        saved, now = ({s["seed"]: s["variants"] for s in r.summaries} for r in (self.saved, run))
        return changes([*saved.values()], [now.get(seed, {}) for seed in saved], self.limits)

    def conclude(self, run: SavedRun, console: Console) -> bool:
        """Print the answer and write --junit; return whether a measure is worse."""
        found = self.compared(run)
        console.print(table(found))
        console.print(sentence(found), soft_wrap=True, markup=False, highlight=False)
        if self.junit:
            junit(self.junit, found)
        return answer(found) == WORSE
