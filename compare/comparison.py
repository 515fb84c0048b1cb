"""Every variant, the same trace: start a server a variant, replay, measure, stop; then save."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from client import runs, saving, traces
from client.addresses import other_target
from client.calls import ServerError
from client.groups import describe, described
from client.machine import command_line
from client.measure import (
    Measurable,
    Target,
    burst_size,
    measure,
    measure_capacity,
    warm_up,
    with_requests,
)
from client.outcomes import Outcome
from client.price import costs
from client.progress import Progress
from client.results import OF_POINT, Json, Point, Result
from client.saving import unwritten
from client.stopping import held
from client.traces import Request, save_trace
from client.wire import IN_WORDS, OpenAI, wire
from client.workloads import Workload
from compare import resume, sweep
from compare.analysis import identical_outputs
from compare.deployments import Deployed, names_of
from compare.options import LOAD, Options
from compare.report import sentences, tables
from compare.servers import ALONE, server

TIMEOUT_S = 3600.0  # until an answer must be there
INTERRUPTED = "interrupted before its end"


@dataclass
class Measured:
    """Measurements of a server with one seed's trace, up to its end or what `stopped` it."""

    result: Result | None = None  # with its requests
    points: list[Point] = field(default_factory=list)  # its sweep's, by rate
    swept: bool = False  # to the end
    stopped: KeyboardInterrupt | ServerError | None = None


class Comparison:
    """One comparison, its settings and facts; `run` measures a seed into a folder of its own."""

    program = "./compare.sh"
    has_texts = True  # whether answers have texts

    def __init__(self, options: Options, progress: Progress):
        self.options, self.progress, self.arrival = options, progress, options.arrival
        arrival = None if self.arrival == "auto" else self.arrival
        self.trace: Sequence[Request] | None = None
        self.by_ids = self.first_of_workload(arrival).prompt_ids is not None
        self.capacity: Json | None = None
        self.done: dict[str, Measured] = {}  # the measured seed's, by server
        self.keep: Callable[[Collection[str]], None] | None = None  # saves it
        self.saved = False  # anything of this run
        self.stopped: KeyboardInterrupt | ServerError | None = None
        self.asked_as: dict[str, Any] = {}  # how servers that are none of ours were asked
        self.machine = runs.facts()
        self.earlier: Json | None = None  # summary of the run that goes on
        self.kept: dict[tuple[int, str], Measured] = {}  # the resumed run's, by seed and server
        if options.resume:
            self.earlier = runs.load(options.resume, requests=False).first
            kept = resume.kept(options, self.facts())
            self.kept = {task: Measured(*each) for task, each in kept.items()}
            self.saved = bool(self.kept)

    def first_of_workload(self, arrival: str | None) -> Request:
        """Set the workload; return its first request: an invalid one, of any seed, is an error
        before any server starts. arrival: None if it is measured first.
        """
        options = self.options
        if options.trace:
            trace, self.workload = options.trace.requests(options.context)
            self.trace = trace
            options.bounds.check(len(trace))
            return trace.make(0)
        for seed in reversed(self.seeds):
            data = self._workload(seed)
            requests = data.requests(options.numsamples, arrival or "burst")
            options.bounds.check(len(requests))
        self.workload = data.words
        return requests[0]

    def facts(self) -> Json:
        """Return the facts that are the same in every seed's summary."""
        options = self.options
        words = options.check.words if options.check else sys.argv[1:]
        command = self.earlier["command"] if self.earlier else command_line(self.program, words)
        return {
            **self.machine,
            "goodput": options.goodput,
            "bounds": asdict(options.bounds),
            "stream": options.stream,
            "also": options.also,
            "asked_as": self.asked_as,
            "deployment": asdict(options.deployment) if options.deployment else None,
            "capacity": self.capacity,
            "baseline": options.baseline,
            "asked": {"seeds": self.seeds, "servers": options.names},
            "started_here": True,
            "command": command,
        }

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
                if isinstance(by := target.wire, OpenAI):
                    self.asked_as[name] = by.about
                    if by.in_words:
                        self.progress.say(f"{name}: {IN_WORDS}")
            try:
                yield target
            finally:
                with self.progress.step(f"stopping {name}"):
                    stack.close()

    def _started(self, name: str, stack: contextlib.ExitStack) -> Target:
        options = self.options
        if url := options.also.get(name):
            return other_target(url, options.asked, name)
        mode, settings = options.variants[name].mode, options.settings(name)
        by, key = wire("inference", stream=options.stream), options.key
        deployment = options.deployment
        start = deployment.start if deployment else ALONE
        url = stack.enter_context(server(mode, settings, key, name, start))
        if not deployment:
            return Target(name, url, by, key=key)
        return Deployed(name, url, by, key=key, replicas=names_of(url, key))

    def prepare(self) -> None:
        """Measure what the workload depends on: for `auto` the capacity of the reference."""
        if self.arrival != "auto" or self.trace or self.options.workload["users"]:
            return
        if self.earlier:
            self.capacity = self.earlier["capacity"]
            self.arrival = self.earlier["workload"]["arrival"]
            return
        data = self._workload(self.options.seed)
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
        """Seeds and servers to measure, forwards and backwards in turn: a slowing machine favours
        none.
        """
        turns = self.options.names, self.options.names[::-1]
        tasks = [(seed, name) for k, seed in enumerate(self.seeds) for name in turns[k % 2]]
        return [task for task in tasks if task not in self.kept]

    def results(self) -> Generator[Measured]:
        """Measure each of `tasks`, until one is stopped."""
        for task in self.tasks:
            yield self.measured(*task)
            if self.stopped:
                return

    def run(self, seed: int, results: Iterator[Measured]) -> None:
        """Measure every server with one seed's trace, and save each as it ends. results: of all
        `tasks` from this seed on.

        Ctrl-C, or a server that fails, ends the measuring (`stopped`); what there is by then is
        kept, marked as partial. What an earlier run has of this seed is kept, too. Raises
        Unwritten.
        """
        missing = [name for of, name in self.tasks if of == seed]
        self.done = {name: each for (of, name), each in self.kept.items() if of == seed}
        if self.done and not missing:
            return
        _, requests = self.traffic(seed)
        if self.done:
            resume.check_trace(self._folder(self.options.out, seed), requests)
        if not self.stopped:
            self.progress.say(f"seed {seed}: {described({**describe(requests), **self.workload})}")

        def keep(new: Collection[str]) -> None:
            with self.progress.step("saving the results"), held():
                self._save(seed, requests, new)

        self.keep = keep
        for name, measured in zip(missing, results):
            self.done[name] = measured
            self.stopped = self.stopped or measured.stopped
            if any(self.done[each].result for each in missing if each in self.done):
                keep([name] if measured.result else ())

    def _folder(self, out: Path, seed: int) -> Path:
        return out / f"seed-{seed}" if self.options.repeats > 1 else out

    def _save(self, seed: int, requests: Sequence[Request], new: Collection[str]) -> None:
        """Save what is done of a seed. new: servers that were just measured."""
        done = {name: self.done[name] for name in self.options.names if name in self.done}
        measured = {name: each.result for name, each in done.items() if each.result}
        # a large trace is drawn again where it is needed
        saved = self.saves(requests)
        workload = {"arrival": self.arrival, "saved": saved, **self.workload}
        points = {n: [p.json(OF_POINT) for p in done[n].points] for n in measured if done[n].points}
        swept = {name: sweep.outcome(each.points) for name, each in done.items() if each.swept}
        for name, of in swept.items():
            capacity, rate = of.capacity, of.goodput_rate
            measured[name] = replace(measured[name], capacity=capacity, goodput_rate=rate)
        whole = swept if self.options.sweep else measured
        reasons = [str(each.stopped) or INTERRUPTED for each in done.values() if each.stopped]
        if len(whole) < len(self.options.names):
            reasons.append(INTERRUPTED)
        comparable = {name: r for name, r in measured.items() if name not in self.options.also}
        facts = {
            **self.facts(),
            "seed": seed,
            "stopped": next(iter(reasons), None),
            "identical_outputs": identical_outputs(comparable if self.has_texts else {}),
            "sweep": points if self.options.sweep else None,
            "swept": list(swept),
        }

        def save(out: Path) -> None:
            if not self.saved and not self.earlier:
                runs.clear(out)
            elif out != self.options.out and self.options.out.exists():
                with unwritten(out):
                    shutil.copytree(self.options.out, out, dirs_exist_ok=True)
            folder = self._folder(out, seed)
            if saved and not (folder / "trace.jsonl").exists():
                save_trace(folder / "trace.jsonl", requests)
            runs.save(folder, requests, measured, workload, facts, new)

        out = saving.saved(save, self.options.out, self.progress.say)
        self.options, self.saved = replace(self.options, out=out), True

    def saves(self, requests: Sequence[Request]) -> bool:
        """Return whether a trace is saved with the results."""
        return bool(self.trace) or len(requests) <= traces.MOST_SAVED

    def measured(self, seed: int, name: str) -> Measured:
        """Measure one server with one seed's trace."""
        self.done[name] = done = Measured()
        try:
            data, requests = self.traffic(seed)
            with self.target(name) as target:
                result, outcomes = self._replay(target, name, requests)
                done.result = with_requests(result, outcomes)
                self.progress.say(sentences.result_line(name, result))
                if result.partial:
                    raise KeyboardInterrupt
                if self.options.sweep:
                    self._sweep(target, data, done.points)
                    done.swept = True
        except (KeyboardInterrupt, ServerError) as stopped:
            done.stopped = stopped
        return done

    def show_sweep(self) -> None:
        """Show the state of the sweep of the seed that is measured."""
        points = {name: [each.points] for name, each in self.done.items()}
        self.progress.table(tables.sweep_table(points))

    def _workload(self, seed: int) -> Workload:
        return Workload(**self.options.workload, seed=seed)

    def traffic(self, seed: int) -> tuple[Workload, Sequence[Request]]:
        data = self._workload(seed)
        saved = self.options.check and self.options.check.trace(seed)
        return data, saved or self.trace or data.requests(self.options.numsamples, self.arrival)

    def _replay(
        self, target: Measurable, title: str, requests: Sequence[Request]
    ) -> tuple[Result, list[Outcome]]:
        with self.progress.replay(title, requests) as watch:
            options = self.options
            limits, bounds = options.goodput, options.bounds
            result, outcomes = measure(target, requests, limits, TIMEOUT_S, watch, bounds)
        if options.price is not None:
            result = replace(result, **costs(result, options.price))
        return result, outcomes

    def _sweep(self, target: Measurable, data: Workload, points: list[Point]) -> None:
        """Measure the points of a server's sweep into `points`. Raises KeyboardInterrupt."""

        def replay(what: str, requests: Sequence[Request]) -> Result:
            result, _ = self._replay(target, f"{target.name} {what}", requests)
            if result.partial:
                raise KeyboardInterrupt
            return result

        def measured(point: Point) -> None:
            points.append(point)
            points.sort(key=lambda p: p.rate)
            self.progress.say(sentences.point_line(target.name, point))
            self.show_sweep()
            if self.keep:
                self.keep([target.name] if len(points) == 1 else ())

        name = target.name if target.ours else self.options.reference
        burst = self.replicas * burst_size(self.options.config(name))
        sweep.sweep(replay, data, self.arrival, burst, self.options.seconds, measured)
