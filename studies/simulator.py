"""How fast the simulator is, and how its time and memory grow with requests and replicas.

    python -m studies.simulator [--requests 10000 100000] [--replicas 1 8 64] [--costs fake]
                                   [--out DIR]

Real time on one core, each case in a process of its own: what ./simulate.sh does for `dynamic` at
0.8 of the capacity that a burst shows, from the drawing of the trace to all measures, without
reports. Stepping computes each iteration, jumping those between which nothing changes at once, to
the same end; runs of more than 100,000 requests are jumped alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import psutil
from matplotlib.figure import Figure

from client.load import Watch
from client.outcomes import Outcome
from client.workloads import Workload
from compare.measure import measure
from compare.report.drawing import LOOKS, STYLE, caption_of, plain_log
from compare.report.tables import markdown
from config import Config, build
from simulate.costs import load
from simulate.fleet import Layout
from simulate.simulated import Simulated
from studies.runner import Case, Cases, Study, only, write

STUDY = Study(
    "studies.simulator", "simulator", "How fast the simulator is",
    "seconds and memory against requests, by replicas, jumping and stepping",
)  # fmt: skip
ROWS = 32
LOAD = 0.8  # of capacity
BURST = 2000  # requests that show it
SAMPLES = 100  # of memory
STEPPED = 100_000  # requests of a run that is stepped, at most: beyond, it takes half an hour
WAYS = {"jump": "jumping", "step": "stepping"}


def settings(requests: int) -> Config:
    given = {"model": "fake", "max_batch_size": ROWS, "max_waiting": requests}
    return build("dynamic", given, {})


class _Memory(Watch):
    """The most memory that this process has while n requests are served."""

    def __init__(self, n: int):
        self.peak_mb, self._ended = 0.0, 0
        self._each, self._process = max(1, n // SAMPLES), psutil.Process()

    def ended(self, outcome: Outcome) -> None:
        self._ended += 1
        if self._ended % self._each == 0:
            self.peak_mb = max(self.peak_mb, self._process.memory_info().rss / 1e6)


def capacity(costs: str) -> float:
    """Requests a second that a replica answers while its rows are full."""
    server, data = Simulated("dynamic", settings(BURST), load(costs)), Workload()
    result, _ = measure(server, data.requests(BURST), {}, math.inf, Watch())
    return float(result["busy_throughput"]) / data.mean_num_tokens


def serve(replicas: int, requests: int, way: str, costs: str, rate: float) -> dict[str, Any]:
    """Simulate so many requests, and say what that took."""
    layout, jump = Layout(replicas), way == "jump"
    server = Simulated("dynamic", settings(requests), load(costs), layout, jump=jump)
    memory = _Memory(requests)
    start = time.perf_counter()
    trace = Workload().requests(requests, f"poisson:{rate:g}")
    result, _ = measure(server, trace, {}, math.inf, memory)
    taken = time.perf_counter() - start
    assert result["completed"] == requests
    told = json.dumps(result, sort_keys=True, default=str)
    return {
        "replicas": replicas,
        "requests": requests,
        "way": way,
        "seconds": taken,
        "peak_mb": memory.peak_mb,
        "virtual_s": result["wall_clock_s"],
        "measures": hashlib.sha256(told.encode()).hexdigest(),
    }


def exponent(mine: Cases) -> float | None:
    """Of requests, to whose power seconds grow; None for one number of requests."""
    if len(mine) < 2:
        return None
    n, taken = ([case[name] for case in mine] for name in ("requests", "seconds"))
    return float(np.polyfit(np.log(n), np.log(taken), 1)[0])


def tables(found: Cases) -> str:
    rows = [
        ["replicas", "requests", "", "s", "requests a second", "µs a request", "peak MB",
         "virtual time, s"],
    ]  # fmt: skip
    growth = [["replicas", "", "seconds grow as requests to the", "bytes a request"]]
    for case in found:
        n = case["requests"]
        rows.append(
            [
                str(case["replicas"]),
                f"{n:,}",
                WAYS[case["way"]],
                f"{case['seconds']:.1f}",
                f"{n / case['seconds']:,.0f}",
                f"{1e6 * case['seconds'] / n:.0f}",
                f"{case['peak_mb']:.0f}",
                f"{case['virtual_s']:,.0f}",
            ]
        )
    for replicas, way in _lines(found):
        mine = only(found, replicas=replicas, way=way)
        if (power := exponent(mine)) is not None:
            first, last = mine[0], mine[-1]
            more = 1e6 * (last["peak_mb"] - first["peak_mb"])
            each = more / (last["requests"] - first["requests"])
            growth.append([str(replicas), WAYS[way], f"{power:.2f}", f"{each:.0f}"])
    return markdown(rows, left=0) + ("\n\n" + markdown(growth) if len(growth) > 1 else "")


def _lines(found: Cases) -> list[tuple[int, str]]:
    return list(dict.fromkeys((case["replicas"], case["way"]) for case in found))


def figure(found: Cases, caption: str) -> Figure:
    numbers = sorted({case["replicas"] for case in found})
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(12, 4.8), layout="constrained")
        left, right = fig.subplots(1, 2)
        for replicas, way in _lines(found):
            mine = only(found, replicas=replicas, way=way)
            label = f"{replicas} replica{'s' * (replicas > 1)}, {WAYS[way]}"
            for axes, what in ((left, "seconds"), (right, "peak_mb")):
                axes.plot(
                    [case["requests"] for case in mine],
                    [case[what] for case in mine],
                    color=LOOKS[numbers.index(replicas) % len(LOOKS)].colour,
                    ls="-" if way == "jump" else "--",
                    marker="o" if way == "jump" else "s",
                    label=label,
                )
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xlabel("requests (log scale)")
            axes.grid(alpha=0.25)
        left.set_yscale("log")
        plain_log(left.yaxis)
        left.set(ylabel="s (log scale)", title="What a run takes")
        right.set(ylabel="MB", title="Most memory of its process")
        right.set_ylim(bottom=0)
        left.legend(fontsize=9.5)
        caption_of(fig, caption)
    return fig


def measured(tasks: Sequence[tuple[int, int, str]], costs: str, rate: float) -> Iterator[Case]:
    """Each task (replicas, requests, way) in a process of its own, one after another.

    rate: requests a second of one replica.
    """
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as alone:
        for replicas, requests, way in tasks:
            case = alone.apply(serve, (replicas, requests, way, costs, replicas * rate))
            print(
                f"{replicas} replicas, {requests:,} requests, {WAYS[way]}: {case['seconds']:.1f} s",
                flush=True,
            )
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {STUDY.module}", description="How fast the simulator is."
    )
    add = parser.add_argument
    add("--requests", type=int, nargs="+", default=[10_000, 100_000], help="of each run")
    add("--replicas", type=int, nargs="+", default=[1, 8, 64])
    add("--costs", default="fake", help="of iterations, as simulate.sh's (default: fake)")
    add("--out", type=Path, default=Path("runs") / STUDY.name, help="folder")
    options = parser.parse_args()
    rate = LOAD * capacity(options.costs)
    every = itertools.product(sorted(options.replicas), sorted(options.requests), WAYS)
    tasks = [task for task in every if task[2] == "jump" or task[1] <= STEPPED]
    found = list(measured(tasks, options.costs, rate))
    for stepped in only(found, way="step"):
        same = {name: stepped[name] for name in ("replicas", "requests", "measures")}
        assert only(found, way="jump", **same), "jumping came to something else"
    told_of = (
        f"One core: dynamic, {ROWS} rows a replica, costs {options.costs}, {rate:.1f} requests a "
        f"second and replica ({LOAD:g} of capacity), router power_of_two"
    )
    result = {"cases": found, "costs": options.costs, "rate": rate}
    write(STUDY, options.out, told_of, tables(found), figure(found, told_of), result)


if __name__ == "__main__":
    main()
