"""Every variant, the same trace: measure each variant with each seed's trace, and save it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from client import runs, saving
from client.groups import describe, described
from client.machine import command_line
from client.progress import Progress
from client.results import OF_POINT, Json
from client.saving import unwritten
from client.stopping import held
from client.traces import Request, save_trace
from compare import resume, sweep
from compare.analysis import identical_outputs
from compare.measuring import Measured, Measuring, Results, Servers, Task, one_by_one
from compare.options import Options
from compare.report import tables

INTERRUPTED = "interrupted before its end"


class Comparison:
    """One comparison of servers: what is measured of them is kept, seed by seed, in a folder.

    measured: yields the results of tasks, in their order. stopped: what ended the measuring.
    """

    def __init__(
        self, options: Options, progress: Progress, servers: Servers, measured: Results = one_by_one
    ):
        self.options, self.progress, self.servers = options, progress, servers
        self._results = measured
        self.capacity: Json | None = None
        self.done: dict[str, Measured] = {}  # results of the seed that is being measured, by server
        self.saved = False  # anything of this run
        self.stopped: BaseException | None = None
        self.machine = runs.facts()
        self.earlier: Json | None = None  # summary of the run that goes on
        self.kept: dict[Task, Measured] = {}  # results of the resumed run
        if options.resume:
            self.earlier = runs.load(options.resume, requests=False).first
            self.kept = resume.kept(options, self.facts())
            self.saved = bool(self.kept)

    def facts(self) -> Json:
        """Return the facts that are the same in every seed's summary."""
        options, servers = self.options, self.servers
        words = options.check.words if options.check else sys.argv[1:]
        command = self.earlier["command"] if self.earlier else command_line(servers.program, words)
        return {
            **self.machine,
            "goodput": options.goodput,
            "bounds": asdict(options.bounds),
            "stream": options.stream,
            "also": options.also,
            "asked_as": {},  # how servers that are none of ours were asked
            "deployment": asdict(options.deployment) if options.deployment else None,
            "capacity": self.capacity,
            "baseline": options.baseline,
            "asked": {"seeds": options.seeds, "servers": options.names},
            "started_here": True,
            "command": command,
            **servers.facts(),
        }

    def prepare(self) -> None:
        """Measure what the workload depends on: for `auto` the capacity of the reference."""
        traces = self.servers.traces
        if traces.waits_for_capacity and self.earlier:
            self.capacity = self.earlier["capacity"]
            traces.arrival = self.earlier["workload"]["arrival"]
        elif traces.waits_for_capacity:
            self.capacity = Measuring(self.options, self.progress, self.servers).capacity()
        self.servers.prepare(self.progress)

    @property
    def tasks(self) -> list[Task]:
        """Seeds and servers to measure, forwards and backwards in turn: a slowing machine favours
        none.
        """
        turns = self.options.names, self.options.names[::-1]
        seeds = enumerate(self.options.seeds)
        tasks = [(seed, name) for k, seed in seeds for name in turns[k % 2]]
        return [task for task in tasks if task not in self.kept]

    def run(self) -> None:
        """Measure every server with each seed's trace, and save each as it ends.

        Ctrl-C, or a server that fails, ends the measuring (`stopped`); what there is by then is
        kept, marked as partial. What an earlier run has is kept, too. Raises Unwritten.
        """
        measuring = Measuring(self.options, self.progress, self.servers, self._show_point)
        try:
            with contextlib.closing(self._results(measuring, self.tasks)) as results:
                for seed in self.options.seeds:
                    self._run(seed, results)
        except KeyboardInterrupt as stopped:  # while something was saved
            self.stopped = stopped

    def _run(self, seed: int, results: Iterator[Measured]) -> None:
        """Measure every server with one seed's trace. results: those of all tasks from here on."""
        missing = [name for of, name in self.tasks if of == seed]
        self.done = {name: each for (of, name), each in self.kept.items() if of == seed}
        if self.done and not missing:
            return
        self._seed, self._requests = seed, self.servers.traces.requests(seed)
        if self.done:
            resume.check_trace(self._folder(self.options.out, seed), self._requests)
        if not self.stopped:
            load = {**describe(self._requests), **self.servers.traces.words}
            self.progress.say(f"seed {seed}: {described(load)}")
        for name, measured in zip(missing, results):
            self.done[name] = measured
            self._show_sweep()
            self.stopped = self.stopped or measured.stopped
            if any(self.done[each].result for each in missing if each in self.done):
                self._keep([name] if measured.result else ())

    def _show_point(self, name: str, done: Measured) -> None:
        self.done[name] = done
        self._show_sweep()
        self._keep([name] if len(done.points) == 1 else ())

    def _show_sweep(self) -> None:
        """Show the state of the sweep of the seed that is measured."""
        if self.options.sweep:
            points = {name: [each.points] for name, each in self.done.items()}
            self.progress.table(tables.sweep_table(points))

    def _keep(self, new: Collection[str]) -> None:
        with self.progress.step("saving the results"), held():
            self._save(self._seed, self._requests, new)

    def _folder(self, out: Path, seed: int) -> Path:
        return out / f"seed-{seed}" if self.options.repeats > 1 else out

    def _save(self, seed: int, requests: Sequence[Request], new: Collection[str]) -> None:
        """Save what is done of a seed. new: servers that were just measured."""
        done = {name: self.done[name] for name in self.options.names if name in self.done}
        measured = {name: each.result for name, each in done.items() if each.result}
        traces = self.servers.traces
        saved = traces.saves(requests)
        workload = {"arrival": traces.arrival, "saved": saved, **traces.words}
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
            "identical_outputs": identical_outputs(comparable if self.servers.has_texts else {}),
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
