"""Whether --find names the setting that exhaustive search does, and with how much of its work.

All settings serve all traces once; each run searches in this table by traces drawn from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from client.progress import Progress, Step
from compare.analysis import estimate
from lab.studies.study import Case, Cases, Study, Table, values
from simulate.find import Search
from simulate.program import parse
from simulate.space import Space, space_of
from simulate.trial import SEEDS, Traffic, Trial, TrialResult

SPACE = "max_batch_size=8,12,16,24,32,48 token_budget=16,32,64,128,256 order=fcfs,sjf"
LIMITS = "--slo ttft:150 e2el:p99:900 --attainment 0.9 --arrival poisson:80"
RUNS = 20


@functools.cache
def asked(n: int) -> tuple[Space, Trial]:
    """Return the settings, and a trial of traces with so many requests."""
    made = parse(["--find", *f"{SPACE} {LIMITS} --numsamples {n}".split()])
    assert made.question
    space, traffic = space_of(made, made.find), Traffic(made.workload, made.arrival)
    served = made.costs, made.layout, made.stream, traffic, made.question, 0
    return space, Trial("", space.default.config, *served)


def cases(n: int) -> list[dict[str, Any]]:
    return [{"setting": one.name} for one in asked(n)[0].settings]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return a setting's trial with the trace of a seed."""
    space, trial = asked(n)
    [one] = [each for each in space.settings if each.name == case["setting"]]
    return trial._replace(config=one.config, seed=seed).serve()._asdict()


def searched(found: Cases) -> list[dict[str, Any]]:
    """Return a case for each run: what the search found, beside the best of the whole table."""
    space, trial = asked(found[0]["seeds"][0]["requests"])
    table = {case["setting"]: [TrialResult(**each) for each in case["seeds"]] for case in found}

    def looked_up(call: Any, trials: Sequence[Trial]) -> Iterator[Any]:
        for each in trials:
            known = call is Trial.serve and each.name in table
            yield table[each.name][each.seed] if known else call(each)

    def result(k: int) -> dict[str, Any]:
        traces = np.random.default_rng(k).choice(len(found[0]["seeds"]), SEEDS, replace=False)
        seeds = tuple(sorted(traces.tolist()))
        of_run = trial._replace(question=replace(trial.question, seeds=seeds))
        search = Search(space, of_run, looked_up, Progress(Console(quiet=True)), Step(""))
        search.run()
        trials = sum(map(len, search.results.values()))
        search.results = {name: {s: of[s] for s in seeds} for name, of in table.items()}
        able = [one for one in space.settings if search.misses(one) <= search.allowed]
        best = max(able, key=lambda one: sum(search.values(one)))
        assert search.best
        named, winner = (estimate(search.values(one)) for one in (search.best, best))
        return {
            "named": search.best.name,
            "exhaustive": best.name,
            "behind": winner.mean - named.mean,
            "apart": (named.half or 0.0) + (winner.half or 0.0),
            "work": trials / len(space.settings) / len(seeds),
        }

    return [{"run": k + 1, "seeds": [result(k)]} for k in range(RUNS)]


def verdict(runs: Cases) -> str:
    behind, apart, work = ([values(run, k)[0] for run in runs] for k in ("behind", "apart", "work"))
    found = sum(gap <= limit for gap, limit in zip(behind, apart))
    return (
        f"In {found} of {len(runs)} runs the search names exhaustive search's winner, or a setting "
        f"whose interval overlaps its (in {behind.count(0.0)} one that is exactly as good), with "
        f"{min(work):.0%} to {max(work):.0%} of its trials."
    )


STUDY = Study(
    name="find",
    title="Does --find name the best setting?",
    question="How often does --find name the setting that exhaustive search does, and with how "
    "much of its work?",
    workload=f"60 settings (`--find {SPACE}`), `{LIMITS}`, in virtual time; {{n}} requests a "
    f"trace; each of {RUNS} runs has {SEEDS} traces, drawn from {{seeds}}",
    requests=60,
    seeds=100,
    cases=cases,
    run=run,
    summarized=searched,
    measures={
        "named": ("named", "{}"),
        "exhaustive": ("exhaustive search's", "{}"),
        "behind": ("behind by, requests/s", "{:.2f}"),
        "apart": ("intervals overlap up to, requests/s", "{:.2f}"),
        "work": ("trials, part of all", "{:.2f}"),
    },
    tables=[Table(("run",))],
    text=verdict,
)
