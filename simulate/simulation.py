"""Replay one trace against every variant in virtual time: no server is started, and nothing is
measured.

./simulate.sh [--costs NAME] [--modes a,b | --variant NAME='MODE --setting …'] [--sweep]
              [--repeats R] [--jobs N] [workload] [--out DIR]
              [any setting of the scheduler]
./simulate.sh --replay FILE
./simulate.sh --plan --slo NAME:MS… --arrival poisson:RATE | --users … | --trace FILE
              [--attainment SHARE] [as above]
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from client.calls import ServerError
from client.draws import WorkloadError
from client.machine import command_line, commit, stamp
from client.measure import Measurable
from client.progress import Progress
from client.runs import refuse_overwriting
from compare.comparison import Comparison, Measured
from compare.options import Options, check, chosen, parser_of, read
from compare.program import run_and_exit
from config import (
    NOT_SIMULATED,
    Config,
    ConfigError,
    add_settings,
    build,
    flag,
    from_environment,
    in_todays_names,
)
from generate.auto import physical_cores, resolve
from generate.tokenizer import TokenizerUnavailable
from simulate import plan
from simulate.costs import FAKE, Costs, CostsError, load
from simulate.disaggregated import refuse
from simulate.fleet import Layout
from simulate.jobs import Jobs, Reporting
from simulate.layouts import add_flags, add_replicas, described, layout_of
from simulate.replay import ReplayError, replay_file
from simulate.server import SimulatedServer
from simulate.trial import ATTAINMENT, SEEDS, Question, Traffic, Trial, question_of

# settings of an engine, which belong to its costs
MODEL = ("model", "weights", "tokenizer", "dtype", "kv_dtype")
PARTS = ("generator", "attention", "linear", "kernels", "padded_prefill")
MACHINE = ("device", "threads", "batch_invariant", "fake_slowdown")
ENGINE = (*MODEL, *PARTS, *MACHINE)
# settings of real servers
OF_SERVERS = ("also", "skip_calibration", "host", "port")
FAKE_ENGINE = {"model": FAKE.name, "device": "cpu"}  # on every machine
SHOWN = ("--costs", "--replicas", "--plan", "--slo")  # by --help first, besides those of all
FLAGS = {  # with their values
    "--costs NAME": "how long iterations take: a file of results/costs, a path that ends in .json, "
    "second (one second each), fake (as the fake engine), or an estimate for a machine that is not "
    "here, such as roofline:h100,gpt2-medium,bfloat16 (default: fake)",
    "--jobs N": "processes that share variants, seeds and --plan's traces; results are the same "
    "with any number (default: as many as this machine has cores)",
    "--replay FILE": "make the calls of a server's --record FILE again, and say how many "
    "iterations are equal",
    "--slo NAME:MS": "with --plan: limits on ttft, tpot, e2el",
    "--attainment SHARE": "with --plan: share of requests that must meet --slo (default: "
    f"{ATTAINMENT})",
}
PLAN = (
    "instead: find the fewest replicas that meet --slo, by --repeats traces of --arrival or "
    f"--users, or as many runs of --trace (default: {SEEDS})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Options):
    """Options of simulate.sh."""

    costs: Costs
    layout: Layout
    jobs: int  # processes
    question: Question | None = None  # of --plan
    recording: str | None = None  # of --replay

    def config(self, name: str) -> Config:
        """Return a variant's settings; the engine's are those of its costs. Raises ConfigError."""
        flags, costs = self.settings(name), self.costs
        measured: Mapping[str, Any] = costs.source.get("config", FAKE_ENGINE)
        # stated costs follow the slowdown
        engine = [setting for setting in ENGINE if costs.source or setting != "fake_slowdown"]
        for setting in flags:
            if setting in NOT_SIMULATED:
                raise ConfigError(f"{flag(setting)} has no effect in virtual time; leave it out")
            if setting in engine and str(flags[setting]) != str(measured.get(setting)):
                known = (
                    f"hold for {flag(setting)} {measured[setting]}"
                    if setting in measured
                    else f"do not depend on {flag(setting)}"
                )
                raise ConfigError(
                    f"{flag(setting)} {flags[setting]}: the costs {costs.name} {known}; leave it "
                    f"out, or name other --costs"
                )

        def fill_in(given: Mapping[str, Any]) -> dict[str, Any]:
            own = {name: value for name, value in given.items() if name not in engine}
            whole = {k: v for k, v in in_todays_names(measured).items() if k != "mode"}
            return whole | own if costs.source else resolve(whole | own)

        mode = self.variants[name].mode
        config = build(mode, flags, from_environment(os.environ), fill_in)
        if config.speculate and not config.forced_rates:
            raise ConfigError(
                f"--draft {config.draft} looks at texts, and virtual time has none; say how many "
                "draft tokens are accepted, as --draft acceptance:0.7 does"
            )
        return config


class Simulating(Comparison):
    """A comparison in virtual time."""

    program = "./simulate.sh"
    has_texts = False
    options: Simulation

    @contextlib.contextmanager
    def target(self, name: str) -> Iterator[Measurable]:
        yield self._server(name, self.options.layout)

    def alone(self, name: str) -> contextlib.AbstractContextManager[Measurable]:
        return contextlib.nullcontext(self._server(name, Layout()))

    @property
    def replicas(self) -> int:
        return self.options.layout.replicas

    @property
    def alike(self) -> int:
        return self.replicas

    def results(self) -> Generator[Measured]:
        if self.options.jobs == 1:
            yield from super().results()
            return
        elsewhere = copy.copy(self)
        elsewhere.progress = Reporting()
        with self.progress.paused():
            workers = Jobs(self.options.jobs, self.progress)
        with workers as jobs, self.progress.step("simulating"):
            futures = [jobs.submit(_measured, elsewhere, *task) for task in self.tasks]
            for (_, name), future in zip(self.tasks, futures):
                done, said = jobs.result(future) or (Measured(stopped=KeyboardInterrupt()), ())
                for text in said:
                    self.progress.say(text)
                if self.options.sweep:
                    self.points[name] = done.points
                    self.show_sweep()
                yield done
                if isinstance(self.stopped, ServerError):  # as in one process
                    return

    def _server(self, name: str, layout: Layout) -> SimulatedServer:
        options, config = self.options, self.options.config(name)
        return SimulatedServer(name, config, options.costs, layout, stream=options.stream)

    def facts(self) -> dict[str, Any]:
        costs, layout = self.options.costs, described(self.options.layout)
        known = ("hardware", "commit", "date", "estimate", "fidelity")
        fitted = {key: costs.source.get(key) for key in known}
        engine = {"engine": costs.source.get("config")}
        simulated = {"costs": costs.name, "layout": layout} | fitted | engine
        return super().facts() | {"simulated": simulated}


def _measured(comparison: Simulating, seed: int, name: str) -> tuple[Measured, Sequence[str]]:
    """Return a worker's measurement, and the lines that it has to print."""
    done = comparison.measured(seed, name)
    return done, comparison.progress.said if isinstance(comparison.progress, Reporting) else ()


def parse(argv: Sequence[str]) -> Simulation:
    """Parse simulate.sh's command line. Raises ConfigError; exits 0 after --help."""
    parser = parser_of(
        "./simulate.sh", "Replay one trace against every batching mode, in virtual time.", *SHOWN
    )
    add_flags(parser.add_argument, FLAGS)
    parser.set_defaults(costs=FAKE.name, jobs=physical_cores())
    parser.add_argument("--plan", action="store_true", help=PLAN)
    add_replicas(parser)
    add_settings(parser, hidden={*NOT_SIMULATED, *ENGINE} - {"fake_slowdown"})
    given = {word.split("=")[0] for word in argv}
    if foreign := [flag(name) for name in OF_SERVERS if flag(name) in given]:
        raise ConfigError(
            f"{foreign[0]} applies to running servers, and none is started here; leave it out, or "
            f"measure with ./compare.sh, and show both with ./compare.sh --runs"
        )
    known = read(parser, argv)
    try:
        costs = load(known.costs)
    except CostsError as error:
        raise ConfigError(f"--costs: {error}") from None
    layout, compared = layout_of(known), chosen(known)
    question = question_of(known, costs, "--repeats" in given) if known.plan else None
    own = {"question": question, "recording": known.replay}
    options = Simulation(**compared, costs=costs, layout=layout, jobs=known.jobs, **own)
    if known.replay and len(argv) > 1 + ("--replay" in argv):
        raise ConfigError("--replay repeats recorded calls; leave out all other flags")
    if known.jobs < 1:
        raise ConfigError("--jobs must be at least 1")
    if not known.plan and (known.slo or known.attainment is not None):
        raise ConfigError("--slo and --attainment belong to --plan; add it, or use --goodput")
    check(options)
    for name in options.variants:
        config = options.config(name)
        if layout.prefill_replicas:
            refuse(config, name)
        if layout.router == "prefix" and not config.prefix_caching:
            raise ConfigError(
                f"--router prefix needs prefix caches, and {name} has none; add --prefix-caching"
            )
    return options


def answer(options: Simulation, question: Question) -> None:
    """Print how many replicas are needed, and write the folder."""
    from simulate import plan_page  # matplotlib takes 0.6 s to load

    refuse_overwriting(map(options.out.joinpath, plan_page.FILES), options.overwrite)
    arrival = "" if options.arrival == "auto" else options.arrival
    traffic = Traffic(options.workload, arrival, options.trace, options.scale)
    served = options.costs, options.layout, options.stream, traffic, question, question.seeds[0]
    trials = [Trial(name, options.config(name), *served) for name in options.variants]
    with contextlib.ExitStack() as stack:
        calls: Callable[..., Any] = map
        if options.jobs > 1:
            calls = stack.enter_context(Jobs(options.jobs)).map  # before Progress has a thread
        progress = stack.enter_context(Progress(Console()))
        answers = plan.plan(trials, progress, calls)
        for sentence in plan_page.sentences(answers, question):
            progress.say(sentence)
        command = command_line(Simulating.program, sys.argv[1:])
        caption = f"simulated, costs {options.costs.name}, {question.arrival} · commit {commit()}"
        facts = stamp() | {"command": command, "costs": options.costs.name}
        with progress.step("drawing figures"):
            plan_page.write(options.out, answers, question, facts, caption)
        progress.say(f"plan.md, plan.json and plan.png: {options.out}")


def main() -> None:
    try:
        options = parse(sys.argv[1:])
        if options.recording:
            with Progress(Console()) as progress, progress.step(f"replaying {options.recording}"):
                replayed = replay_file(options.recording)
            print(replayed)
            sys.exit(replayed.first_difference is not None)
        if options.question:
            answer(options, options.question)
            return
        run_and_exit(
            lambda progress: Simulating(options, progress),
            "what was simulated is kept",
            "nothing was simulated",
        )
    except (ConfigError, ReplayError, WorkloadError, TokenizerUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
