"""`--check` of a run against itself (an A/A run), and against a server that is 10% slower.

Virtual time has no noise, so that it is drawn: each replay's costs have a factor of their own, and
in one part each run has one, too, as a machine has slower days. Then the same on real servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from client.load import Watch
from client.measure import Target, measure, warm_up
from client.traces import Request
from client.wire import Plain
from client.workloads import Workload
from compare.check import CANNOT_TELL, WORSE, answer, changes, limits_of
from compare.report.tables import markdown
from compare.servers import server
from lab.studies import virtual
from lab.studies.runner import FinishedRuns
from lab.studies.study import Case, Cases, Study, grid, values
from simulate.costs import FAKE

NOISE = {  # deviation of the logarithm of a replay's costs, and of a run's
    "1% a replay": (0.01, 0.0),
    "3% a replay": (0.03, 0.0),
    "1% a replay, 1% a run": (0.01, 0.01),
}
REAL = "real servers"
MODES = {"static": 30, "dynamic": 50}  # requests per second: two thirds of what each can do
SEEDS = 5  # of a run
RUNS = {"saved": 1.0, "the same again": 1.0, "10% slower": 1.1}
TIMEOUT_S = 60.0


def trace(mode: str, n: int, seed: int) -> Sequence[Request]:
    return Workload(seed=seed).requests(n, f"poisson:{MODES[mode]}", scaled=True)


def run(case: Case, n: int, check: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return the answer of a check of each run against the saved one, and its measures."""
    seeds = range(SEEDS * check, SEEDS * (check + 1))
    if case["noise"] == REAL:
        runs = {name: real(n, seeds, slowdown) for name, slowdown in RUNS.items()}
    else:
        chance = np.random.default_rng(check)
        noise = (chance, *NOISE[case["noise"]])
        runs = {name: simulated(n, seeds, slowdown, *noise) for name, slowdown in RUNS.items()}
    saved, answers = runs.pop("saved"), dict[str, Any]()
    for name, now in runs.items():
        found = changes(saved, now, limits_of(()))
        answers |= {name: answer(found), f"{name}, of each": [f"{c}: {c.answer}" for c in found]}
    return answers


def simulated(
    n: int, seeds: Sequence[int], slowdown: float, chance: np.random.Generator, of_replay: float,
    of_run: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a run's measures of each mode, a dictionary for each seed."""
    slowdown *= np.exp(chance.normal(0, of_run))

    def measures(mode: str, seed: int) -> dict[str, Any]:
        costs = FAKE.scaled(slowdown * np.exp(chance.normal(0, of_replay)))
        return virtual.measures(virtual.server({"mode": mode}, costs), trace(mode, n, seed))

    return [{mode: measures(mode, seed) for mode in MODES} for seed in seeds]


def real(n: int, seeds: Sequence[int], slowdown: float) -> list[dict[str, Any]]:
    """Return the measures of a fresh server with the fake engine: dynamic alone, to be short."""
    results = []
    with server("dynamic", {"model": "fake", "fake_slowdown": slowdown}) as url:
        warm_up(target := Target("dynamic", url, Plain()))
        for seed in seeds:
            result, _ = measure(target, trace("dynamic", n, seed), {}, TIMEOUT_S, Watch())
            if result["partial"]:
                raise KeyboardInterrupt
            results.append({"dynamic": result})
    return results


def text(cases: Cases) -> str:
    columns = [(name, said) for name in [*RUNS][1:] for said in (WORSE, CANNOT_TELL)]
    rows = [["noise", "checks", *(f"{name}: {said}" for name, said in columns)]]
    for case in cases:
        counts = [values(case, name).count(said) for name, said in columns]
        rows.append([case["noise"], *map(str, (len(case["seeds"]), *counts))])
    return f"{markdown(rows)}\n\n{HOW}"


HOW = """\
- Noise: the deviation of iteration times as a whole from one replay to the next; and from run to
  run, where all of a run's replays share it.
- A check judges five measures each of `static` and `dynamic`, and on real servers of `dynamic`."""
STUDY = Study(
    name="checks",
    title="A run against itself, and against a slower one",
    question="How often does a check say worse of the same server, and of one slower by a tenth?",
    workload=f"each check: runs of {SEEDS} traces of {{n}} requests; limits of 5%",
    requests=50,
    seeds=20,
    cases=grid(noise=(*NOISE, REAL)),
    run=run,
    servers=True,
    measures={},
    tables=(),
    text=text,
)
