"""Did it get worse? (--check): a saved run's traces again, each seed paired with the saved one.

Each seed gives one ratio, so that what a trace does to both runs cancels. A measure is worse if its
mean ratio is beyond its limit and its interval leaves out no change. That interval is wider than
95% by Bonferroni's correction (Dunn, Multiple Comparisons Among Means, JASA 1961), so that the
measures of a run raise one false alarm in twenty together. A measure is not worse if its 95%
interval ends within the limit. All of them must be, so that no correction is needed (Berger,
Multiparameter Hypothesis Testing and Acceptance Sampling, Technometrics 1982).
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
from client.results import KEYS
from client.runs import Run
from client.traces import Request, load_trace
from compare.analysis import CONFIDENCE, half_width
from compare.report.tables import Terminal
from config import ConfigError

LIMIT = 0.05
JUDGED = ("mean_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "mean_tpot_ms", "output_throughput")
HIGHER = ("request_throughput", "output_throughput", "goodput", "attainment")  # is better
LIMITED = [name for name in KEYS if name in HIGHER or name.endswith("_ms")]
LEAST = 1e-9  # of a value: 0, as a goodput can be, has no logarithm
MOST = 100  # more seeds that a run can be expected to have
WORSE, CANNOT_TELL, NOT_WORSE = "worse", "cannot tell", "not worse"

Seeds = Sequence[Mapping[str, Mapping[str, Any]]]  # numbers of each variant, one entry a seed


class Change(NamedTuple):
    """A variant's measure in two runs of the same traces.

    saved, now: means. ratio: now ÷ saved, with a 95% interval. limit: the part by which it may get
    worse. more: seeds of both runs that would tell; None if more than MOST.
    """

    variant: str
    measure: str
    saved: float
    now: float
    ratio: float
    low: float
    high: float
    limit: float
    answer: str
    more: int | None

    @property
    def interval(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"

    def __str__(self) -> str:
        of = f"{self.variant}'s {self.measure}"
        return f"{of} is {self.ratio:.3f} times the saved run's ({self.interval})"


def judged(
    name: str, measure: str, saved: Sequence[float], now: Sequence[float], limit: float,
    confidence: float,
) -> Change:  # fmt: skip
    """Return a measure's change, with a value of each seed. confidence: that an alarm needs."""
    sign, n = -1 if measure in HIGHER else 1, len(saved)
    # logarithms of ratios, above 0 where it is worse
    worse = sign * np.log(np.maximum(now, LEAST) / np.maximum(saved, LEAST))
    mean, deviation, most = worse.mean(), worse.std(ddof=1), sign * math.log1p(sign * limit)

    def answer(n: int) -> str:
        if mean > max(most, half_width(deviation, n, confidence)):
            return WORSE
        return NOT_WORSE if mean + half_width(deviation, n) <= most else CANNOT_TELL

    more = next((k for k in range(MOST + 1) if answer(n + k) != CANNOT_TELL), None)
    half = half_width(deviation, n)
    ratio, low, high = np.exp([sign * mean, sign * mean - half, sign * mean + half]).tolist()
    means = fmean(saved), fmean(now)
    return Change(name, measure, *means, ratio, low, high, limit, answer(n), more)


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """Return {"mean_e2el_ms": 0.05} for ["mean_e2el_ms:5%"]. Raises ConfigError."""
    form = f"NAME:PERCENT, above 0 and below 100, with one of {', '.join(LIMITED)}"
    limits = arguments.parse_limits(texts, "--limit", LIMITED, form, 100, "%")
    return {name: limit / 100 for name, limit in limits.items()} or dict.fromkeys(JUDGED, LIMIT)


def changes(before: Seeds, now: Seeds, limits: Mapping[str, float]) -> list[Change]:
    """Compare the measures with limits, of each variant whose every seed has a value of them.
    Raises ConfigError if none has.
    """
    pairs = dict[tuple[str, str], tuple[list[Any], list[Any]]]()
    for name, measure in itertools.product(before[0], limits):
        old, new = ([seed.get(name, {}).get(measure) for seed in run] for run in (before, now))
        if None not in (*old, *new):
            pairs[name, measure] = old, new
    if not pairs:
        raise ConfigError(f"the runs have no {', '.join(limits)}; name other measures by --limit")
    confidence = 1 - (1 - CONFIDENCE) / len(pairs)
    return [judged(*key, *pair, limits[key[1]], confidence) for key, pair in pairs.items()]


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
        return f"Worse, {count}: {which[0]}, beyond its limit of {100 * which[0].limit:g}%."
    if said == CANNOT_TELL:
        last = max(which, key=lambda change: change.more or MOST + 1)
        seeds = f"{last.more} more seed" if last.more else f"more than {MOST} more seed"
        plural = "s" * (last.more != 1)
        return f"Cannot tell, {count}: {seeds}{plural} of both runs would; {last}."
    if len(found) == 1:
        return f"Not worse: {found[0]}, within its limit of {100 * found[0].limit:g}%."
    return f"Not worse: all {len(found)} measures are within their limits."


def table(found: Sequence[Change]) -> Terminal:
    rows = [["variant", "measure", "saved", "now", "ratio", "interval", "answer"]]
    for each in found:
        numbers = f"{each.saved:,.4g}", f"{each.now:,.4g}", f"{each.ratio:.3f}", each.interval
        rows.append([each.variant, each.measure, *numbers, each.answer])
    caption = f"now ÷ saved, 95% interval; an alarm needs a wider one, for {len(found)} measures"
    return Terminal(rows, 2, caption)


def junit(found: Sequence[Change]) -> ElementTree.ElementTree:
    """Return a JUnit report: a test for each measure, failed if worse, skipped if unknown."""
    suite = ElementTree.Element("testsuite", name="check")
    for each in found:
        test = ElementTree.SubElement(suite, "testcase", classname=each.variant, name=each.measure)
        if each.answer != NOT_WORSE:
            kind = "failure" if each.answer == WORSE else "skipped"
            ElementTree.SubElement(test, kind, message=str(each))
    for count, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        suite.set(count, str(len([*suite.iter(tag)])))
    return ElementTree.ElementTree(suite)


@dataclass(frozen=True, slots=True)
class Check:
    """A check against a saved run.

    words: the command line that makes its requests and servers again.
    """

    saved: Run
    limits: Mapping[str, float]
    junit: Path | None
    words: Sequence[str]

    def trace(self, seed: int) -> list[Request] | None:
        """Return the saved trace of a seed; None if it was too large to be saved."""
        path = self.saved.folder / f"seed-{seed}" / "trace.jsonl"
        return load_trace(path) if path.exists() else None

    def compared(self, run: Run) -> list[Change]:
        """Return the changes from the saved run."""
        saved, now = ({s["seed"]: s["variants"] for s in r.summaries} for r in (self.saved, run))
        return changes([*saved.values()], [now[seed] for seed in saved], self.limits)

    def conclude(self, run: Run, console: Console) -> bool:
        """Print the answer and write --junit; return whether a measure is worse."""
        found = self.compared(run)
        console.print(table(found))
        console.print(sentence(found), soft_wrap=True, markup=False, highlight=False)
        if self.junit:
            junit(found).write(self.junit, encoding="unicode", xml_declaration=True)
        return answer(found) == WORSE
