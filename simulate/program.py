"""Replay one trace against every variant in virtual time: no server is started, and nothing is
measured.

./simulate.sh --vllm FILE [--with RUN] [--variant NAME='--setting …'] [--save-costs FILE] [as below]
./simulate.sh [--costs NAME] [--modes a,b | --variant NAME='MODE --setting …'] [--sweep]
              [--repeats R] [--jobs N] [workload] [--out DIR]
              [any setting of the scheduler]
./simulate.sh --replay FILE
./simulate.sh --plan --slo NAME:MS… --arrival poisson:RATE | --users … | --trace FILE
              [--attainment SHARE] [as above]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from client.draws import WorkloadError
from client.machine import command_line, commit, stamp
from client.progress import Progress
from client.runs import RunError, refuse_overwriting
from compare.check import checked
from compare.options import OF_RUN, check, chosen, parser_of, read
from compare.program import run_and_exit
from compare.resume import options_of
from config import (
    NOT_SIMULATED,
    ConfigError,
    add_settings,
    flag,
)
from generate.auto import physical_cores
from generate.tokenizer import TokenizerUnavailable
from simulate import plan
from simulate.costs import FAKE, CostsError, load
from simulate.disaggregated import refuse
from simulate.jobs import Jobs
from simulate.layouts import add_flags, add_replicas, layout_of
from simulate.replay import ReplayError, replay_file
from simulate.simulation import ENGINE, Simulating, Simulation
from simulate.trial import ATTAINMENT, SEEDS, Question, Traffic, Trial, question_of
from simulate.vllm.given import options as options_of_own

# settings of real servers
OF_SERVERS = ("also", "api", "header", "extra_body", "skip_calibration", "host", "port")
SHOWN = ("--vllm", "--costs", "--replicas", "--plan", "--slo")  # by --help, besides those of all
FLAGS = {  # with their values
    "--vllm FILE": "your own vLLM: take settings, costs and requests from a recording of it "
    "(docs/your_vllm.md), and say how well it is foreseen; --variant then needs no mode, and "
    "--costs, --trace, --arrival and flags of the workload replace what was recorded",
    "--with RUN": "with --vllm: a client's saved run of the recorded requests (of client.py, "
    "guidellm, aiperf or vllm bench serve --save-detailed), which adds HTTP's share of times",
    "--save-costs FILE": "with --vllm: write the costs to this .json file, for --costs",
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


def parse(argv: Sequence[str]) -> Simulation:
    """Parse simulate.sh's command line. Raises ConfigError; exits 0 after --help."""
    if again := checked(Simulating.program, argv, parse, OF_RUN):
        return again
    parser = parser_of(
        "./simulate.sh",
        "Your own vLLM: --vllm FILE says from a recording of it what it would do with other "
        "settings (docs/your_vllm.md). Else: replay one trace against every batching mode, in "
        "virtual time.",
        *SHOWN,
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
    layout, own = layout_of(known), {"recording": known.replay}
    if known.vllm:
        compared, of_own = options_of_own(known, given)
        costs = costs if "--costs" in given else of_own["own"].costs
        own |= of_own
    else:
        compared = chosen(known)
    own["question"] = question_of(known, costs, "--repeats" in given) if known.plan else None
    options = Simulation(**compared, costs=costs, layout=layout, jobs=known.jobs, **own)
    if known.replay and len(argv) > 1 + ("--replay" in argv):
        raise ConfigError("--replay repeats recorded calls; leave out all other flags")
    if not known.vllm and (vars(known)["with"] or known.save_costs):
        raise ConfigError("--with and --save-costs belong to --vllm; add it")
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
    traffic = Traffic(options.workload, arrival, options.trace, options.context)
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
        options = options_of(sys.argv[1:], parse, Simulating.program)
        if options.recording:
            with Progress(Console()) as progress, progress.step(f"replaying {options.recording}"):
                replayed = replay_file(options.recording)
            print(replayed)
            sys.exit(replayed.first_difference is not None)
        if options.question:
            answer(options, options.question)
            return
        kind = Simulating
        if options.own:
            from simulate.vllm.comparing import ComparingOwn as kind
        run_and_exit(
            lambda progress: kind(options, progress),
            "what was simulated is kept",
            "nothing was simulated",
        )
    except (ConfigError, ReplayError, RunError, WorkloadError, TokenizerUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
