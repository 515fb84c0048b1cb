"""How fast the simulator is, and how its time and memory grow with requests and replicas.

    python -m benchmarks.simulator [--requests 10000 100000] [--replicas 1 8 64] [--costs fake]
                                   [--out DIR]

Real time on one core, each case in a process of its own: `dynamic`, 0.8 of the capacity that a
burst shows, with every measure that ./simulate.sh takes. Arrivals are drawn as they come and
answered requests are dropped; of each answer a few numbers are kept. Stepping computes each
iteration, jumping those between which nothing changes at once, to the same end.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import psutil
from matplotlib.figure import Figure

from benchmarks.studies import Case, Cases, Study, only, write
from client.draws import folded_normal, lengths
from client.occupancy import Occupancy
from client.report.drawing import LOOKS, STYLE, caption_of, plain_log
from client.report.tables import markdown
from config import build
from observers.server_stats import ServerStats
from scheduling import scheduler
from scheduling.inference import Inference, IterationRecord
from simulate import PS, Arrival, Loop, seconds
from simulate.costs import load
from simulate.fleet import Fleet, Layout
from simulate.replica import Stretch
from stats import times_of

STUDY = Study(
    "benchmarks.simulator", "simulator", "How fast the simulator is",
    "seconds and memory against requests, by replicas, jumping and stepping",
)  # fmt: skip
ROWS = 32
LOAD = 0.8  # of capacity
BURST = 2000  # requests that show it
CHUNK = 1000  # requests drawn at once
WORD = 5  # tokens of a prompt's word
SAMPLES = 100  # of memory
WAYS = {"jump": "jumping", "step": "stepping"}


def arrivals(n: int, rate: float, seed: int = 0) -> Iterator[Arrival]:
    """n requests, so many a second at random (Poisson), of lengths as compare.sh's default."""
    rng, draw, at = np.random.default_rng(seed), lengths("normal"), 0.0
    for first in range(0, n, CHUNK):
        size = min(CHUNK, n - first)
        times = at + np.cumsum(rng.exponential(1 / rate, size))
        prompts = WORD * folded_normal(rng, size, mean=10, std=10, most=64)
        for at, prompt, tokens in zip(times.tolist(), prompts.tolist(), draw(rng, size).tolist()):
            yield at, [Inference([0] * prompt, tokens)]


class Measures:
    """What ./simulate.sh measures of a run, and the most memory that the process had meanwhile."""

    def __init__(self, n: int):
        self.stats, self.occupancy = ServerStats(ROWS), Occupancy()
        self.ttft_s, self.e2e_s = array("d"), array("d")
        self.iterations = self.stretches = 0
        self.peak_mb = 0.0
        self._each, self._process = max(1, n // SAMPLES), psutil.Process()

    def computed(self, replica: int, stretch: Stretch) -> None:
        self.stretches += 1
        self.iterations += stretch.n
        took = stretch.end(stretch.n - 1) - stretch.begun - (stretch.n - 1) * stretch.gap
        record = IterationRecord(seconds(stretch.begun), took / PS, stretch.iteration, stretch.n)
        self.stats.iteration(record)
        self.occupancy.add(stretch, record)

    def ended(self, now: float, inference: Inference) -> Iterator[Arrival]:
        self.stats.answered(inference)
        times = times_of(inference)
        self.ttft_s.append(times.ttft_s)
        self.e2e_s.append(times.e2e_s)
        if len(self.e2e_s) % self._each == 0:
            self.peak_mb = max(self.peak_mb, self._process.memory_info().rss / 1e6)
        return iter(())


def capacity(costs: str) -> float:
    """Requests a second that a replica answers while its rows are full."""
    loop, answered = Loop(), list[float]()

    def ended(now: float, inference: Inference) -> Iterator[Arrival]:
        answered.append(now)
        return iter(())

    config = build("dynamic", {"model": "fake", "max_batch_size": ROWS, "max_waiting": BURST}, {})
    fleet = Fleet(loop, Layout(), lambda: scheduler.build(config), load(costs), ended=ended)
    loop.serve(((0.0, group) for _, group in arrivals(BURST, 1.0)), fleet.arrive)
    loop.run()
    full = BURST - ROWS
    return full / sorted(answered)[full - 1]


def serve(replicas: int, requests: int, way: str, costs: str, rate: float) -> dict[str, Any]:
    """Simulate so many requests, and say what that took."""
    loop, measures = Loop(), Measures(requests)
    config = build(
        "dynamic", {"model": "fake", "max_batch_size": ROWS, "max_waiting": requests}, {}
    )
    fleet = Fleet(
        loop,
        Layout(replicas),
        lambda: scheduler.build(config),
        load(costs),
        computed=measures.computed,
        ended=measures.ended,
        jump=way == "jump",
    )
    start, cpu = time.perf_counter(), time.process_time()
    loop.serve(arrivals(requests, rate), fleet.arrive)
    loop.run()
    told = measures.stats.snapshot()
    taken, cpu = time.perf_counter() - start, time.process_time() - cpu
    fleet.check_done()
    assert told["completed"] == requests
    return {
        "replicas": replicas,
        "requests": requests,
        "way": way,
        "seconds": taken,
        "cpu_s": cpu,
        "peak_mb": measures.peak_mb,
        "iterations": measures.iterations,
        "stretches": measures.stretches,
        "virtual_s": seconds(loop.now),
        "p99_ttft_ms": told["p99_ttft_ms"],
        "answers": hashlib.sha256(measures.ttft_s.tobytes() + measures.e2e_s.tobytes()).hexdigest(),
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
         "iterations a request", "computed at once"],
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
                f"{case['iterations'] / n:.2f}",
                f"{case['iterations'] / case['stretches']:.2f}",
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
    tasks = itertools.product(sorted(options.replicas), sorted(options.requests), WAYS)
    found = list(measured(list(tasks), options.costs, rate))
    for jumped, stepped in zip(only(found, way="jump"), only(found, way="step"), strict=True):
        assert jumped["answers"] == stepped["answers"], "jumping came to something else"
    told_of = (
        f"One core: dynamic, {ROWS} rows a replica, costs {options.costs}, {rate:.1f} requests a "
        f"second and replica ({LOAD:g} of capacity), router power_of_two"
    )
    result = {"cases": found, "costs": options.costs, "rate": rate}
    write(STUDY, options.out, told_of, tables(found), figure(found, told_of), result)


if __name__ == "__main__":
    main()
