"""--check: what it says of two runs of the same traces, and how often it is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from client.results import Distribution, Result
from client.runs import RunError
from compare import check
from compare.check import CANNOT_TELL, NOT_WORSE, WORSE, Change, changes
from compare.measuring import GivenTraces
from compare.options import Options, parse
from compare.resume import begin, options_of
from config.settings import ConfigError
from simulate import program
from tests.programs import empty_figures, output, ran
from tests.servers import ROOT

LATENCY, THROUGHPUT = "mean_e2el_ms", "output_throughput"


def changed(before: Any, now: Any, limits: Mapping[str, float]) -> list[Change]:
    """The changes of numbers, by variant, a dictionary a seed."""
    saved, after = (
        [{n: Result.of(r) for n, r in seed.items()} for seed in run] for run in (before, now)
    )
    return changes(saved, after, limits)


def compared(ratios: Sequence[float], measure: str = LATENCY, measures: int = 1) -> Change:
    """The first of so many measures, of which each seed has this ratio to the saved run."""
    names = [measure, *check.LIMITED[: measures - 1]]
    before = [{"a": dict.fromkeys(names, 10.0 * (seed + 1))} for seed in range(len(ratios))]
    now = [{"a": {n: v * r for n, v in of["a"].items()}} for of, r in zip(before, ratios)]
    return changed(before, now, dict.fromkeys(names, 0.05))[0]


@pytest.mark.parametrize(("ratios", "measure", "answer"), [
    ([1.0, 1.0, 1.0], LATENCY, NOT_WORSE),
    ([0.7, 0.7, 0.8], LATENCY, NOT_WORSE),
    ([1.1, 1.1, 1.1], LATENCY, WORSE),
    ([1.10, 1.11, 1.09, 1.10], LATENCY, WORSE),
    ([1.04, 1.041, 1.039], LATENCY, NOT_WORSE),  # surely slower, but within the limit
    ([1.6, 0.9, 0.9, 1.1], LATENCY, CANNOT_TELL),
    ([1.2, 0.9, 0.9, 1.1], LATENCY, CANNOT_TELL),
    ([1.1, 1.1, 1.1], THROUGHPUT, NOT_WORSE),
    ([0.9, 0.9, 0.91], THROUGHPUT, WORSE),
    ([0.0, 0.0, 0.0], "goodput", WORSE),
])  # fmt: skip
def test_the_answer(ratios: list[float], measure: str, answer: str) -> None:
    change = compared(ratios, measure)
    assert change.answer == answer == check.answer([change])
    assert check.sentence([change]).startswith(answer.capitalize())


@pytest.mark.parametrize("ratios", [[1.15, 1.0, 1.1, 1.1], [1.1, 0.95, 1.05, 0.96]])
def test_the_seeds_that_would_tell_tell_and_one_fewer_do_not(ratios: list[float]) -> None:
    """Of a run with the same mean and deviation of its ratios."""
    first = compared(ratios)
    assert first.answer == CANNOT_TELL and first.more
    logs = np.log(ratios)
    for n, told in ((4 + first.more, True), (3 + first.more, False)):
        more = np.random.default_rng(0).standard_normal(n)
        more = (more - more.mean()) / more.std(ddof=1) * logs.std(ddof=1) + logs.mean()
        assert (compared([*np.exp(more)]).answer != CANNOT_TELL) == told
    assert f"{first.more} more seed" in check.sentence([first])


def test_many_measures_raise_no_more_false_alarms_than_one() -> None:
    """Without a limit; and judged one at a time they do."""
    few = compared([1.15, 1.05, 1.12, 1.08, 1.1])
    many = compared([1.15, 1.05, 1.12, 1.08, 1.1], measures=20)
    assert few.interval == many.interval and (few.answer, many.answer) == (WORSE, CANNOT_TELL)
    chance, limits = np.random.default_rng(0), dict.fromkeys(check.LIMITED[:10], 1e-9)
    together = alone = 0
    for _ in range(60):
        before, now = (
            [{"a": dict(zip(limits, np.exp(row)))} for row in chance.normal(0, 0.03, (5, 10))]
            for _ in range(2)
        )
        together += check.answer(changed(before, now, limits)) == WORSE
        alone += any(changed(before, now, {n: 1e-9})[0].answer == WORSE for n in limits)
    assert together <= 3 < 6 <= alone


def cut(at: str, unsent: int) -> dict[str, dict[str, object]]:
    return {"cut": {"at": at, "in_flight": 1, "unsent": unsent}}


@pytest.mark.parametrize(("saved", "now", "numbers"), [
    ({}, {"failed": 1}, "are 3, and 0"),  # as refused ones (429) are
    ({"failed": 2}, {"failed": 3}, "are 9, and 6"),
    ({"failed": 3}, {"failed": 3}, ""),
    ({"failed": 3}, {}, ""),
    # none of them is counted by the measures of those that were answered
    ({"failed": 1} | cut("--max-failures 1", 5), {"failed": 1} | cut("--max-failures 1", 30),
     "are 96, and 21"),
    ({}, cut("--max-seconds 9", 4), "are 15, and 0"),
    (cut("--max-seconds 9", 4), cut("--max-seconds 9", 7), ""),  # the throughput says that
    (cut("--max-seconds 9", 4), {"failed": 1}, "are 3, and 0"),
])  # fmt: skip
def test_one_more_unanswered_request_is_worse(
    saved: dict[str, object], now: dict[str, object], numbers: str
) -> None:
    """All of a run's requests failed but a few, and these were faster: "not worse"."""
    before, after = ([{"a": {LATENCY: ms} | of}] * 3 for ms, of in ((10.0, saved), (0.09, now)))
    found = changed(before, after, {LATENCY: 0.05})
    assert check.answer(found) == (WORSE if numbers else NOT_WORSE)
    if numbers:
        more = f"a's unanswered requests {numbers} in the saved run."
        assert check.sentence(found) == f"Worse, 1 of 2 measures: {more}"


ONE = {"a": Result(e2el=Distribution(10.0))}
NONE = {"a": Result()}


@pytest.mark.parametrize(("saved", "now", "answer", "words"), [
    ([ONE] * 3, [ONE, NONE, ONE], WORSE, "is missing in 1 of 3 seeds; the saved run has it"),
    ([ONE] * 3, [NONE] * 3, WORSE, "is missing in 3 of 3 seeds"),
    ([ONE] * 3, [ONE, {}, ONE], WORSE, "is missing in 1 of 3 seeds"),  # the variant, or the seed
    ([{}, ONE, ONE], [ONE, ONE, {}], WORSE, "is missing in 1 of 2 seeds"),
    ([ONE, NONE, ONE], [ONE] * 3, NOT_WORSE, "is 1.000 times the saved run's (1.000 to 1.000), w"),
    ([ONE, NONE, NONE], [ONE] * 3, CANNOT_TELL, "has one seed in the saved run, and needs two"),
])  # fmt: skip
def test_a_measure_that_is_missing_now_is_worse(
    saved: check.Seeds, now: check.Seeds, answer: str, words: str
) -> None:
    found = changes(saved, now, {LATENCY: 0.05})
    assert check.answer(found) == answer and words in check.sentence(found)
    assert len(found) == 1


@pytest.mark.parametrize(("measure", "saved", "now", "answer"), [
    ("goodput", [2.0, 2.0, 2.0], [2.0, 2.0, 0.0], WORSE),
    ("goodput", [2.0, 0.0, 2.0], [2.0, 3.0, 2.0], NOT_WORSE),
    ("goodput", [2.0, 0.0, 2.0], [0.0, 2.0, 2.0], CANNOT_TELL),
    ("goodput", [5.0, 0.0, 2.0], [0.5, 1.0, 2.0], CANNOT_TELL),
    ("goodput", [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], NOT_WORSE),
    ("mean_queue_time_ms", [0.0, 2.0, 2.0], [9.0, 2.0, 2.0], WORSE),
    ("mean_queue_time_ms", [0.0, 2.0, 2.0], [0.0, 2.0, 2.0], NOT_WORSE),
    ("mean_queue_time_ms", [9.0, 2.0, 2.0], [0.0, 2.0, 2.0], NOT_WORSE),
])  # fmt: skip
def test_a_measure_that_is_0_has_a_sentence_and_no_absurd_ratio(
    measure: str, saved: Sequence[float], now: Sequence[float], answer: str
) -> None:
    """It was "0.000 to 600243542803.638"."""
    before, after = ([{"a": {measure: value}} for value in run] for run in (saved, now))
    found = changed(before, after, {measure: 0.05})
    alone = sum((a == 0) != (b == 0) for a, b in zip(saved, now))
    words = f"0 in one run alone in {alone} of 3 seeds" if alone else "1.000 (1.000 to 1.000)"
    assert check.answer(found) == answer
    assert words in check.sentence(found).replace("1.000 times the saved run's", "1.000")


def suite_of(junit: Path) -> list[str | None]:
    suite = ElementTree.parse(junit).getroot()
    return [suite.get(key) for key in ("tests", "failures", "errors", "skipped")]


def compare(*argv: str) -> Options:
    return options_of(argv, parse, "./compare.sh")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured its rate."""
    out = tmp_path_factory.mktemp("check") / "saved"
    words = f"--modes static,dynamic --numsamples 40 --repeats 3 --jobs 1 --out {out}"
    with empty_figures():
        output("simulate", f"{words} --goodput e2el:900")
    return out


def checked(saved: Path, words: str) -> CompletedProcess[str]:
    return ran("simulate", *shlex.split(f"--check {saved} {words}"))


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_the_same_as_itself_and_a_slower_one_is_worse(saved: Path, tmp_path: Path) -> None:
    same, slower, junit = tmp_path / "same", tmp_path / "slower", tmp_path / "junit.xml"
    junit.write_text("<testsuite name='of another'/>")
    done = checked(saved, f"--out {same} --junit {junit}")
    assert done.returncode == 2 and f"{junit} is there already; name another, or" in done.stderr
    junit.unlink()  # an earlier check's is written anew, as CI does
    done = checked(saved, f"--out {same} --junit {junit}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Not worse: all 10 measures are within their limits.\n")
    assert max(map(len, done.stdout[done.stdout.index(" variant  measure") :].splitlines())) <= 80
    assert suite_of(junit) == ["10", "0", "0", "0"]
    # of the run that checked, which is a run like any other
    done = checked(
        same, f"--out {slower} --fake-slowdown 1.1 --limit mean_tpot_ms:5% --junit {junit}"
    )
    assert done.returncode == 1
    assert "Worse, 1 of 2 measures: dynamic's mean_tpot_ms is 1.1" in done.stdout
    assert done.stdout.endswith(", beyond its limit of 5%.\n")
    suite = ElementTree.parse(junit).getroot()
    cases = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
    assert cases == [("static", "mean_tpot_ms"), ("dynamic", "mean_tpot_ms")]
    assert suite_of(junit) == ["2", "1", "0", "1"]
    for seed in ("seed-0", "seed-2"):
        traces = [(run / seed / "trace.jsonl").read_text() for run in (saved, same, slower)]
        assert traces[0] == traces[1] == traces[2]


@pytest.mark.usefixtures("undrawn")
def test_junit_says_what_the_exit_code_says_of_failures(saved: Path, tmp_path: Path) -> None:
    """Those that the saved run had, too, are no reason to fail."""
    junit, failing = tmp_path / "junit.xml", tmp_path / "failing"
    words = f"--limit mean_e2el_ms:5% --junit {junit}"
    done = checked(saved, f"{words} --request-timeout-s 0.4 --out {failing}")
    assert done.returncode == 1 and "unanswered requests are" in done.stdout, done.stderr
    assert suite_of(junit)[:3] == ["4", "2", "0"]
    done = checked(failing, f"{words} --out {tmp_path / 'again'}")
    assert done.returncode == 0 and suite_of(junit) == ["4", "0", "0", "0"], done.stderr


@pytest.mark.parametrize(
    "words", ["--seed 3", "--limit latency:5%", "--check", "--out {saved}", ""]
)
def test_a_check_that_does_not_end_leaves_an_error_and_no_earlier_answer(
    words: str, saved: Path, tmp_path: Path
) -> None:
    """Refused, or interrupted at any moment after its flags were read."""
    junit = tmp_path / "junit.xml"
    check.junit(junit, [compared([1.0, 1.0])])
    given = shlex.split(f"--check {saved} --junit {junit} {words.format(saved=saved)}")
    with contextlib.suppress(ConfigError):
        begin(given, program.parse, "./simulate.sh")
    assert suite_of(junit) == ["1", "0", "1", "0"]


def test_a_check_has_the_saved_traces_and_settings(saved: Path, tmp_path: Path) -> None:
    """Whatever would be drawn by now; and of compare.sh, too, without its sweep."""
    run = tmp_path / "saved"
    shutil.copytree(saved, run)
    trace, summary = run / "seed-1" / "trace.jsonl", run / "seed-0" / "summary.json"
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:7]))
    command = "./compare.sh --sweep --seconds 9 --out /none"
    text = summary.read_text().replace("./simulate.sh", command)
    summary.write_text(text.replace("--jobs 1", ""))
    options = compare("--check", str(run), "--token-budget", "99")
    assert options.names == ["static", "dynamic"] and options.repeats == 3
    assert options.arrival == json.loads(text)["workload"]["arrival"] != "auto"
    assert not options.sweep and options.goodput == {"e2el": 900}
    assert options.flags == {"token_budget": "99"}
    traces = GivenTraces(options)
    assert [len(traces.requests(seed)) for seed in options.seeds] == [40, 7, 40]


def test_the_workflow_for_github_has_commands_that_are_understood(saved: Path) -> None:
    text = (ROOT / "docs" / "examples" / "check.yml").read_text()
    measure, again = re.findall(r"bench/compare.sh (.*)", text)
    assert compare(*shlex.split(measure)).names == ["dynamic", "mine"]
    with pytest.raises(RunError, match="runs/before holds no run"):
        compare(*shlex.split(again))


@pytest.mark.parametrize(("words", "sentence"), [
    ("--check {saved}", "is a run of ./simulate.sh; name one of ./compare.sh"),
    ("--check {saved}/seed-0", "a run of one seed has no interval; measure it again with --rep"),
    ("--check {saved}/none", "holds no run"),
    ("--check {saved} --seed 3", "leave out --seed"),
    ("--check {saved} --modes=static", "leave out --modes"),
    ("--check {saved} --out {saved} --overwrite", "--out would replace this run"),
    ("--check {saved} --limit mean_preempted_ms:5%", "the runs have no mean_preempted_ms; name"),
    ("--check {saved} --limit latency:5%", "'latency:5%': give NAME:PERCENT"),
    ("--check {saved} --limit mean_e2el_ms", "give NAME:PERCENT"),
    ("--check {saved} --limit mean_e2el_ms:0%", "above 0 and below 100"),
    ("--limit mean_e2el_ms:5%", "belong to --check; add it"),
    ("--junit junit.xml", "belong to --check; add it"),
])  # fmt: skip
def test_a_check_that_cannot_be_made_is_refused(words: str, sentence: str, saved: Path) -> None:
    given = shlex.split(words.format(saved=saved))
    with pytest.raises((ConfigError, RunError), match=sentence):
        if "./" in sentence:
            compare(*given)
        options_of(given, program.parse, "./simulate.sh")
