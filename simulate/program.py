"""Replay one trace against every variant in virtual time: no server is started, and nothing is
measured.

./simulate.sh --vllm FILE [--with RUN] [--variant NAME='--setting …'] [--save-costs FILE] [as below]
./simulate.sh [--costs NAME] [--modes a,b | --variant NAME='MODE --setting …'] [--sweep]
              [--repeats R] [--jobs N] [workload] [--out DIR]
              [any setting of the scheduler]
./simulate.sh --replay FILE
./simulate.sh --find [NAME=A,B… replicas] --slo NAME[:p99]:MS… [--for MEASURE] [--verify N]
              --arrival poisson:RATE | --users … | --trace FILE | --vllm FILE [as above]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from client.calls import ServerError
from client.draws import WorkloadError
from client.machine import command_line, commit, stamp
from client.progress import Output, Progress
from client.quoting import printable
from client.runs import RunError, clear, files, refuse_overwriting
from client.saving import saved, write
from client.stopping import end_as_on_ctrl_c, fail, held
from compare.comparison import Comparison
from compare.measuring import one_by_one
from compare.options import check, chosen, parser_of, read
from compare.program import run_and_exit
from compare.resume import begin
from config.flags import Flags, add_flags, add_settings
from config.settings import NOT_SIMULATED, ConfigError, flag
from generate.auto import physical_cores
from generate.tokenizer import TokenizerUnavailable
from simulate.comparing import Simulated, in_processes
from simulate.costs import FAKE, Costs, CostsError, load, save
from simulate.disaggregated import refuse
from simulate.find import Search
from simulate.jobs import Jobs, lost
from simulate.layouts import REPLICAS, layout_of
from simulate.replay import ReplayError, replay_file
from simulate.served_model import KERNELS, UTILIZATION
from simulate.simulation import ENGINE, Simulation
from simulate.space import USUAL, command, space_of, trial_of
from simulate.trial import ATTAINMENT, MEASURES, SEEDS, question_of
from simulate.vllm.given import SEEDS as OWN_SEEDS
from simulate.vllm.given import options as options_of_own

# settings of real servers
OF_SERVERS = (
    "also", "api", "header", "extra_body", "client_processes", "skip_calibration", "host", "port",
)  # fmt: skip
SHOWN = ("--vllm", "--costs", "--find", "--slo")  # by --help, besides those of all
FLAGS: Flags = {
    "--vllm": {"metavar": "FILE", "help":
        "your own vLLM: take settings, costs and requests from a recording of it "
        "(docs/your_vllm.md), and say how well it is foreseen; --variant then needs no mode, and "
        "--costs, --trace, --arrival and flags of the workload replace what was recorded"},
    "--with": {"metavar": "RUN", "help":
        "with --vllm: a client's saved run of the recorded requests (of client.py, guidellm, "
        "aiperf or vllm bench serve --save-detailed), which adds HTTP's share of times"},
    "--save-costs": {"metavar": "FILE", "help":
        "with --vllm: write the costs to this .json file, for --costs"},
    "--costs": {"default": FAKE.name, "metavar": "NAME", "help":
        "how long iterations take: a file of results/costs, a path that ends in .json, second (one "
        "second each), fake (as the fake engine), or an estimate for a machine that is not here, "
        "such as roofline:h100,gpt2-medium,bfloat16 (default: fake)"},
    "--gpu-memory-utilization": {"type": float, "metavar": "SHARE", "help":
        "with costs of a model on a GPU: the share of its memory that vLLM uses (default: "
        f"{UTILIZATION:g})"},
    "--tensor-parallel-size": {"type": int, "metavar": "N", "help":
        "with costs of a model on a GPU: those of N GPUs (default: 1)"},
    "--jobs": {"type": int, "metavar": "N", "help":
        "processes that share variants, seeds and --find's traces; results are the same with any "
        "number (default: as many as this machine has cores)"},
    "--replay": {"metavar": "FILE", "help":
        "make the calls of a server's --record FILE again, and say how many iterations are equal"},
    "--slo": {"nargs": "+", "metavar": "NAME:MS", "help":
        "with --find: limits on ttft, tpot, e2el of each request, or of a statistic of all, as "
        "e2el:p99:2000"},
    "--attainment": {"type": float, "metavar": "SHARE", "help":
        f"with --find: share of requests that must meet --slo (default: {ATTAINMENT})"},
    "--for": {"metavar": "MEASURE", "help":
        "with --find: what is best, such as output_throughput or mean_e2el_ms (default: "
        f"{MEASURES[0]})"},
    "--verify": {"type": int, "metavar": "N", "help":
        "with --find: then run the best and the default on real servers, N times"},
    "--find": {"nargs": "*", "metavar": "NAME=A,B", "help":
        "instead: find the best of these settings that meets --slo, by --repeats traces of "
        "--arrival, --users or --vllm, or as many runs of --trace (default: "
        f"{SEEDS}, with --vllm {OWN_SEEDS}); a name without values takes all, or a quarter to four "
        f"times a number; replicas, the fewest; nothing: {' '.join(USUAL)}"},
}  # fmt: skip
OF_FIND = ("slo", "attainment", "for", "verify")


def parse(argv: Sequence[str]) -> Simulation:
    """Parse simulate.sh's command line. Raises ConfigError; exits 0 after --help."""
    given = {word.split("=")[0] for word in argv}
    if "--slowest" in given:
        raise ConfigError("ask ./compare.sh --slowest 10 FOLDER, of simulated runs, too")
    parser = parser_of(
        "./simulate.sh",
        "Your own vLLM: --vllm FILE says from a recording of it what it would do with other "
        "settings (docs/your_vllm.md). Else: replay one trace against every batching mode, in "
        "virtual time.",
        *SHOWN,
    )
    add_flags(parser, FLAGS)
    parser.set_defaults(jobs=physical_cores())
    add_flags(parser.add_argument_group("replicas"), REPLICAS)
    add_settings(parser, hidden={*NOT_SIMULATED, *ENGINE} - {"fake_slowdown"})
    if foreign := [flag(name) for name in OF_SERVERS if flag(name) in given]:
        raise ConfigError(
            f"{foreign[0]} applies to running servers, and none is started here; leave it out, or "
            f"measure with ./compare.sh, and show both with ./compare.sh --runs"
        )
    known = read(parser, argv)
    costs = _costs(known)
    layout, own = layout_of(known), dict[str, Any](recording=known.replay)
    if known.gpu_memory_utilization:
        own["memory_utilization"] = known.gpu_memory_utilization
    if known.find is not None:
        own |= {"find": known.find or USUAL, "verify": known.verify}
        if not (known.modes or known.variant or known.vllm):
            known.modes = "dynamic"
    if known.vllm:
        compared, of_own = options_of_own(known, given)
        costs = costs if "--costs" in given else of_own["own"].costs
        own |= of_own
    else:
        # vLLM's mode is known
        compared = chosen(known, "dynamic" if "served" in costs.source else None)
    if known.find is not None:
        usual = OWN_SEEDS if known.vllm else SEEDS
        seeds = known.repeats if "--repeats" in given else usual
        own["question"] = question_of(known, costs, seeds, own.get("replays", False))
    options = Simulation(**compared, costs=costs, layout=layout, jobs=known.jobs, **own)
    if known.replay and len(argv) > 1 + ("--replay" in argv):
        raise ConfigError("--replay repeats recorded calls; leave out all other flags")
    if not known.vllm and (vars(known)["with"] or known.save_costs):
        raise ConfigError("--with and --save-costs belong to --vllm; add it")
    if known.jobs < 1:
        raise ConfigError("--jobs must be at least 1")
    foreign = [flag(name) for name in OF_FIND if vars(known)[name] is not None]
    if known.find is None and foreign:
        raise ConfigError(f"{foreign[0]} belongs to --find; add it, or use --goodput")
    if known.verify is not None:
        if known.verify < 1:
            raise ConfigError("--verify must be at least 1")
        from simulate import verify  # it loads matplotlib

        verify.check(options)
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


def _costs(known: argparse.Namespace) -> Costs:
    """Return the costs that are asked for. Raises ConfigError."""
    name, gpus = known.costs, known.tensor_parallel_size
    try:
        if gpus and gpus > 1:
            name += f",tp{gpus}" if name.startswith(KERNELS) else f"-tp{gpus}"
        costs = load(name)
    except CostsError as error:
        raise ConfigError(f"--costs: {error}") from None
    share = known.gpu_memory_utilization
    if "served" not in costs.source and (gpus or share):
        raise ConfigError(
            "--tensor-parallel-size and --gpu-memory-utilization belong to costs of a model on a "
            "GPU; name one, such as --costs h100-llama-3.1-8b"
        )
    if gpus is not None and gpus < 1:
        raise ConfigError("--tensor-parallel-size must be at least 1")
    if share is not None and not 0 < share <= 1:
        raise ConfigError("--gpu-memory-utilization is a share above 0 and up to 1, such as 0.9")
    return costs


def find(options: Simulation) -> bool:
    """Print and write the best setting, and whether it held; return whether there is one, and
    whether it is in the folder of --out.
    """
    from simulate import find_page  # matplotlib takes 0.6 s to load

    written = [*files(options.out), *files(options.out / "verified")]
    refuse_overwriting(written, options.overwrite)
    if options.own and options.costs_file:
        save(options.own.costs, options.costs_file)
    space = space_of(options, options.find)
    trial = trial_of(options, space.default.config)
    with contextlib.ExitStack() as stack:
        calls: Callable[..., Any] = map
        if options.jobs > 1:
            calls = stack.enter_context(Jobs(options.jobs)).map  # before Progress has a thread
        progress = stack.enter_context(Progress(Output()))
        with progress.step("how many requests a trace needs") as step:
            search = Search(space, trial, calls, progress, step)
            search.run()
        left_out = f"left out: {space.left_out} of the combinations, the first because {space.why}"
        left_out *= bool(space.left_out)
        served = command(options, search.best) if search.best else ""
        for line in filter(None, (*find_page.lines(search), left_out, served)):
            progress.say(line)
        caption = (
            f"simulated, costs {options.costs.name}, {trial.question.arrival} · commit {commit()}"
        )
        asked = command_line(Simulated.program, sys.argv[1:])
        facts = stamp() | {"command": asked, "costs": options.costs.name}

        def keep(folder: Path) -> None:
            clear(folder, options.trace.path if options.trace else None)
            find_page.write(folder, search, caption, served, left_out, facts, options.svg)

        with progress.step("drawing figures"), held():
            out = saved(keep, options.out, progress.say)
        if search.best and options.verify and not search.stopped:
            from simulate import verify

            for line in verify.verified(options, search, options.verify, progress):
                progress.say(line)
                text = (out / "find.md").read_text("utf-8")
                write(out / "find.md", f"{text}\n{line}\n")
        progress.say(f"find.md, find.json and find.png: {out}")
        if search.stopped:
            raise search.stopped
    return search.best is not None and out == options.out


def main() -> None:
    end_as_on_ctrl_c()
    try:
        options = begin(sys.argv[1:], parse, Simulated.program)
        if options.recording:
            with Progress(Output()) as progress, progress.step(f"replaying {options.recording}"):
                replayed = replay_file(options.recording)
            print(printable(str(replayed)))
            sys.exit(replayed.first_difference is not None)
        if options.question:
            sys.exit(not find(options))
        how = in_processes if options.jobs > 1 else one_by_one
        run_and_exit(
            lambda progress: Comparison(options, progress, Simulated(options), how),
            "what was simulated is kept",
            "nothing was simulated",
        )
    except (ConfigError, ReplayError, RunError, WorkloadError, TokenizerUnavailable) as error:
        fail(error, 2)
    except ServerError as error:
        fail(error)
    except BrokenProcessPool:  # a process of --find died
        fail(lost())
    except KeyboardInterrupt:
        sys.exit(130)
