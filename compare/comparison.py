"""Every variant, the same trace: start a server a variant, replay, measure, stop; then tables and
figures.

./compare.sh [--modes a,b | --variant NAME='MODE --setting …'] [--also NAME=URL] [--sweep]
             [--repeats R] [workload] [--out DIR] [any server setting]
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from client import runs, traces
from client.calls import ServerError
from client.draws import WorkloadError
from client.groups import describe, described
from client.machine import command_line
from client.measure import (
    Measurable,
    Target,
    burst_size,
    measure,
    measure_capacity,
    openai_model,
    warm_up,
    with_requests,
)
from client.outcomes import Outcome
from client.progress import Progress
from client.traces import Request, replayed, save_trace
from client.wire import wire
from client.workloads import Workload
from compare import calibrate, sweep
from compare.analysis import identical_outputs
from compare.deployments import Deployed, names_of
from compare.options import LOAD, Options, parse, parse_runs
from compare.report import sentences, tables
from compare.servers import ALONE, server
from config import ConfigError

TIMEOUT_S = 3600.0  # of an answer
OF_SWEEP = ("capacity", "goodput_rate")  # of a sweep's outcome, beside a server's headlines


@dataclass
class Measured:
    """Measurements of a server with one seed's trace, up to its end or what `stopped` it."""

    result: dict[str, Any] | None = None  # NAME.json
    points: list[sweep.Point] = field(default_factory=list)  # of its sweep, by rate
    swept: bool = False  # to the end
    stopped: KeyboardInterrupt | ServerError | None = None


class Comparison:
    """One comparison, its settings and facts; `run` measures a seed into a folder of its own."""

    program = "./compare.sh"

    def __init__(self, options: Options, progress: Progress):
        self.options, self.progress, self.arrival = options, progress, options.arrival
        arrival = None if self.arrival == "auto" else self.arrival
        self.trace: Sequence[Request] | None = None
        # an invalid workload, of any seed, is an error before any server starts
        if options.trace:
            self.trace, self.workload = replayed(
                options.trace, options.scale, arrival, options.seed
            )
            first = self.trace[0]
        else:
            for seed in reversed(self.seeds):
                data = Workload(**options.workload, seed=seed)
                first = data.requests(options.numsamples, arrival or "burst")[0]
            self.workload = data.words
        self.by_ids = first.prompt_ids is not None
        self.capacity: dict[str, Any] | None = None
        self.points: dict[str, list[sweep.Point]] = {}  # of the seed that is measured, by server
        self.stopped: KeyboardInterrupt | ServerError | None = None
        self.machine = runs.facts()

    def facts(self) -> dict[str, Any]:
        """Return the facts that are the same in every seed's summary."""
        options = self.options
        return self.machine | {
            "goodput": options.goodput, "stream": options.stream, "also": options.also,
            "deployment": asdict(options.deployment) if options.deployment else None,
            "capacity": self.capacity, "baseline": options.baseline,
            "asked": {"seeds": self.seeds, "servers": options.names}, "started_here": True,
            "command": command_line(self.program, sys.argv[1:]),
        }  # fmt: skip

    @property
    def seeds(self) -> list[int]:
        return list(range(self.options.seed, self.options.seed + self.options.repeats))

    @property
    def replicas(self) -> int:
        """Servers of a variant that share the load."""
        return self.options.deployment.replicas if self.options.deployment else 1

    @property
    def alike(self) -> int:
        """Replicas for each one that `alone` starts. Here `alone` starts all of them: they share a
        machine, on which two may complete less than twice what one does.
        """
        return 1

    def alone(self, name: str) -> contextlib.AbstractContextManager[Measurable]:
        """The servers whose capacity is measured: all of a variant's, or one of so many `alike`."""
        return self.target(name)

    @contextlib.contextmanager
    def target(self, name: str) -> Iterator[Measurable]:
        """A server of the comparison, started if it is one of ours, and warm."""
        with contextlib.ExitStack() as stack:
            with self.progress.step(f"starting {name}"):
                target = self._started(name, stack)
                warm_up(target, self.by_ids)
            try:
                yield target
            finally:
                with self.progress.step(f"stopping {name}"):
                    stack.close()

    def _started(self, name: str, stack: contextlib.ExitStack) -> Target:
        options = self.options
        if url := options.also.get(name):
            return Target(name, url, wire("openai", openai_model(url)), ours=False)
        mode, settings = options.variants[name].mode, options.settings(name)
        by, key = wire("inference", stream=options.stream), options.key
        deployment = options.deployment
        start = deployment.start if deployment else ALONE
        url = stack.enter_context(server(mode, settings, key, name, start))
        if not deployment:
            return Target(name, url, by, key=key)
        return Deployed(name, url, by, key=key, replicas=names_of(url, key))

    def calibrate(self) -> None:
        """Measure this client's own limit; a machine too busy for that can still compare."""
        self.progress.say("measuring first, once on this machine, how fast this client can send")
        with contextlib.suppress(ServerError):
            self.machine["calibration"] = calibrate.calibrate(self.progress)
        self.progress.say(calibrate.sentence(self.machine["calibration"]))

    def prepare(self) -> None:
        """Measure what the workload depends on: for `auto` the capacity of the reference."""
        if self.arrival != "auto" or self.trace or self.options.workload["users"]:
            return
        data = Workload(**self.options.workload, seed=self.options.seed)
        reference = self.options.reference
        n = self.replicas // self.alike * burst_size(self.options.config(reference))
        burst = data.requests(n, "burst", scaled=True)
        with (
            self.alone(reference) as target,
            self.progress.replay(f"capacity of {reference}", burst) as watch,
        ):
            capacity = measure_capacity(target, burst, TIMEOUT_S, watch)
        self.capacity = capacity | {"load": LOAD, "of": reference}
        mean = float(np.mean(data.requests(self.options.numsamples).num_tokens))
        rate = LOAD * self.alike * capacity["output_throughput"] / mean
        self.arrival = f"poisson:{rate:.4g}"
        reached = f"{capacity['output_throughput']:,.0f} tok/s"
        if self.alike > 1:
            reached += f" each of {self.alike} replicas"
        self.progress.say(
            f"capacity of {reference}: {reached}; {LOAD:g} of it: --arrival {self.arrival}"
        )

    @property
    def tasks(self) -> list[tuple[int, str]]:
        """Seeds and servers, forwards and backwards in turn: a slowing machine favours none."""
        turns = self.options.names, self.options.names[::-1]
        return [(seed, name) for k, seed in enumerate(self.seeds) for name in turns[k % 2]]

    def results(self) -> Generator[Measured]:
        """Measure each of `tasks`, until one is stopped."""
        for task in self.tasks:
            yield self.measured(*task)
            if self.stopped:
                return

    def run(self, seed: int, folder: Path, results: Iterator[Measured]) -> bool:
        """Measure every server with one seed's trace and write the folder; False if nothing was
        measured. results: of all `tasks` from this seed on.

        Ctrl-C, or a server that fails, ends the measuring (`stopped`); what there is by then is
        kept, marked as partial.
        """
        _, requests = self._traffic(seed)
        if not self.stopped:
            self.progress.say(f"seed {seed}: {described(describe(requests))}")
        self.points, done = {}, dict[str, Measured]()
        for _, name in (task for task in self.tasks if task[0] == seed):
            done[name] = next(results, Measured(stopped=self.stopped))
            self.stopped = self.stopped or done[name].stopped
        measured = {name: r for name in self.options.names if (r := done[name].result)}
        if not measured:
            return False
        with self.progress.step("saving the results"):
            if seed == self.options.seed:
                runs.clear(self.options.out)
            folder.mkdir(parents=True, exist_ok=True)
            # a large trace is drawn again where it is needed
            if saved := bool(self.trace) or len(requests) <= traces.MOST_SAVED:
                save_trace(folder / "trace.jsonl", requests)
            stopped = next((each.stopped for each in done.values() if each.stopped), None)
            facts = self.facts()
            alone = {name: r for name, r in measured.items() if name not in self.options.also}
            points = {name: done[name].points for name in measured if done[name].points}
            swept = {name: sweep.outcome(r.points) for name, r in done.items() if r.swept}
            facts |= {
                "seed": seed,
                "stopped": stopped and (str(stopped) or "interrupted before its end"),
                # simulated ones have no texts
                "identical_outputs": identical_outputs({} if "simulated" in facts else alone),
                "sweep": points if self.options.sweep else None,
                "swept": list(swept),
            }
            workload = {"arrival": self.arrival, "saved": saved} | self.workload
            of_sweep = {n: {k: to[k] for k in OF_SWEEP} for n, to in swept.items()}
            runs.save(folder, requests, measured, workload, facts, of_sweep)
        return True

    def measured(self, seed: int, name: str) -> Measured:
        """Measure one server with one seed's trace."""
        done = Measured()
        self.points[name] = done.points
        try:
            data, requests = self._traffic(seed)
            with self.target(name) as target:
                result, outcomes = self._replay(target, name, requests)
                done.result = with_requests(result, outcomes)
                self.progress.say(tables.result_line(name, result))
                if result["partial"]:
                    raise KeyboardInterrupt
                if self.options.sweep:
                    self._sweep(target, data, done.points)
                    done.swept = True
        except (KeyboardInterrupt, ServerError) as stopped:
            done.stopped = stopped
        return done

    def show_sweep(self) -> None:
        """Show the state of the sweep of the seed that is measured."""
        self.progress.table(tables.sweep_table({n: [rates] for n, rates in self.points.items()}))

    def _traffic(self, seed: int) -> tuple[Workload, Sequence[Request]]:
        data = Workload(**self.options.workload, seed=seed)
        return data, self.trace or data.requests(self.options.numsamples, self.arrival)

    def _replay(
        self, target: Measurable, title: str, requests: Sequence[Request]
    ) -> tuple[dict[str, Any], list[Outcome]]:
        with self.progress.replay(title, requests) as watch:
            return measure(target, requests, self.options.goodput, TIMEOUT_S, watch)

    def _sweep(self, target: Measurable, data: Workload, points: list[sweep.Point]) -> None:
        """Measure the points of a server's sweep into `points`. Raises KeyboardInterrupt."""

        def replay(what: str, requests: Sequence[Request]) -> dict[str, Any]:
            result, _ = self._replay(target, f"{target.name} {what}", requests)
            if result["partial"]:
                raise KeyboardInterrupt
            return result

        def measured(point: sweep.Point) -> None:
            points.append(point)
            points.sort(key=lambda p: p["rate"])
            self.progress.say(tables.point_line(target.name, point))
            self.show_sweep()

        name = target.name if target.ours else self.options.reference
        burst = self.replicas * burst_size(self.options.config(name))
        sweep.sweep(replay, data, self.arrival, burst, self.options.seconds, measured)


def compare(comparison: Comparison) -> tuple[runs.Run | None, BaseException | None]:
    """Run the comparison and write its folder, but for the report; return the run, if anything was
    measured, and what stopped it, if anything did.

    Raises WorkloadError.
    """
    options, progress = comparison.options, comparison.progress
    if busy := sentences.busy(comparison.facts()):
        progress.say(busy)
    runs.refuse_overwriting(runs.files(options.out, options.names), options.overwrite)
    progress.say(
        f"{', '.join(options.names)} on {options.config(options.reference).model}; results go to "
        f"{options.out}"
    )
    try:
        for url in options.also.values():  # a missing server is an error now, not after the others
            openai_model(url)
        if options.calibration and not comparison.machine["calibration"]:
            comparison.calibrate()
        comparison.prepare()
    except (KeyboardInterrupt, ServerError) as stopped:
        return None, stopped
    measured = False
    with contextlib.closing(comparison.results()) as results:
        for seed in comparison.seeds:
            folder = options.out / f"seed-{seed}" if options.repeats > 1 else options.out
            measured |= comparison.run(seed, folder, results)
    with progress.step("reading the results"):
        return runs.load(options.out) if measured else None, comparison.stopped


def sigterm_is_ctrl_c() -> None:
    """Stop servers on SIGTERM, too.

    By a SIGINT of our own, with which asyncio ends what is in flight, and not by an exception: one
    that is raised while an object is being deleted is lost. A script's background job is started
    with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def main() -> None:
    argv = sys.argv[1:]
    if not any(word.partition("=")[0] == "--runs" for word in argv):
        run_and_exit(lambda progress: Comparison(parse(argv), progress))
        return
    from compare.report import side_by_side

    try:
        paths, out = parse_runs(argv)
        side_by_side.show(side_by_side.beside(paths, out), out, Console())
    except (ConfigError, runs.RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run_and_exit(
    comparison_of: Callable[[Progress], Comparison],
    kept: str = "the servers are stopped and what was measured is kept",
    lost: str = "the servers are stopped",
) -> None:
    """Run a comparison as a program. kept, lost: what is printed of an interrupted one."""
    console, run = Console(), None
    sigterm_is_ctrl_c()
    try:
        with Progress(console) as progress:
            run, stopped = compare(comparison_of(progress))
            if run:
                progress.table(None)
                with progress.step("drawing figures"):
                    from compare.report import report  # matplotlib takes 0.6 s to load

                    report.show(run, console)
                    report.write(run)
                progress.say(f"report.html, report.md, figures and every request: {run.folder}")
    except (ConfigError, WorkloadError, runs.RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt
    for sentence in sentences.failures(run) if run else []:
        print(f"error: {sentences.plain(sentence)}", file=sys.stderr)
    if isinstance(stopped, ServerError):
        sys.exit(f"error: {stopped}")
    if stopped:
        print(f"interrupted; {kept if run else lost}", file=sys.stderr)
        sys.exit(130)
    if run and any(result["failed"] for results in run.variants.values() for result in results):
        sys.exit(1)
