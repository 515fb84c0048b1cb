"""A comparison as a program: measure, then print tables and write the report.

./compare.sh [--modes a,b | --variant NAME='MODE --setting …'] [--also NAME=URL] [--sweep]
             [--repeats R] [workload] [--out DIR] [any server setting]
./compare.sh --resume DIR
./compare.sh --runs RUN RUN …
./compare.sh --check RUN [--limit NAME:PERCENT …] [--junit FILE] [--out DIR] [any server setting]
./compare.sh --slowest N RUN
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from client import runs
from client.addresses import other_target
from client.calls import ServerError
from client.draws import WorkloadError
from client.progress import Output, Progress
from client.quoting import printable
from client.stopping import end_as_on_ctrl_c, fail
from compare import calibrate, slowest
from compare.comparison import Comparison
from compare.options import parse, parse_runs, parse_slowest
from compare.report import sentences
from compare.resume import begin
from compare.started import Started
from config.settings import ConfigError


def compare(comparison: Comparison) -> tuple[runs.SavedRun | None, BaseException | None]:
    """Run the comparison and write its folder, but for the report; return the run, if anything was
    measured, and what stopped it, if anything did.

    Raises WorkloadError.
    """
    options, progress = comparison.options, comparison.progress
    facts = comparison.facts()
    for remark in filter(
        None, (sentences.busy(facts), *facts.get("simulated", {}).get("remarks", ()))
    ):
        progress.say(remark)
    runs.refuse_overwriting(runs.files(options.out, options.names), options.overwrite)
    progress.say(f"{', '.join(options.names)} on {options.model}; results go to {options.out}")
    try:
        for url in options.also.values():  # a missing server is an error now, not after the others
            other_target(url, options.asked)
        if options.calibration and not comparison.machine["calibration"]:
            progress.say("measuring first, once on this machine, how fast this client can send")
            with contextlib.suppress(ServerError):  # a machine too busy for that can still compare
                comparison.machine["calibration"] = calibrate.calibrate(progress)
            progress.say(calibrate.sentence(comparison.machine["calibration"]))
        comparison.prepare()
        if comparison.earlier:
            missing, there = len(comparison.tasks), len(comparison.kept)
            progress.say(f"missing: {missing} of {missing + there} measurements")
    except (KeyboardInterrupt, ServerError) as stopped:
        return None, stopped
    comparison.run()
    with progress.step("reading the results"):
        return runs.load(comparison.options.out) if comparison.saved else None, comparison.stopped


def _comparison(argv: Sequence[str], progress: Progress) -> Comparison:
    options = begin(argv, parse, Started.program)
    return Comparison(options, progress, Started(options, progress))


def main() -> None:
    end_as_on_ctrl_c()
    argv = sys.argv[1:]
    named = {word.partition("=")[0] for word in argv}
    if not named & {"--runs", "--slowest"}:
        run_and_exit(lambda progress: _comparison(argv, progress))
        return
    try:
        if "--slowest" in named:
            n, folder = parse_slowest(argv)
            slowest.show(runs.load(folder), n, Output())
            return
        from compare.report import side_by_side

        paths, out = parse_runs(argv)
        side_by_side.show(side_by_side.beside(paths, out), out, Output())
    except (ConfigError, runs.RunError) as error:
        fail(error, 2)


def run_and_exit(
    comparison_of: Callable[[Progress], Comparison],
    kept: str = "the servers are stopped and what was measured is kept",
    lost: str = "the servers are stopped",
) -> None:
    """Run a comparison as a program. kept, lost: what is printed of an interrupted one."""
    console, run, worse = Output(), None, False
    try:
        with Progress(console) as progress:
            comparison = comparison_of(progress)
            asked = comparison.options.out
            run, stopped = compare(comparison)
            if run:
                progress.table(None)
                with progress.step("drawing figures"):
                    from compare.report import report  # matplotlib takes 0.6 s to load

                    report.show(run, console)
                    report.write(run, comparison.options.svg)
                worse = run.folder != asked  # which could not be written
                progress.say(f"report.html, report.md, requests.csv, figures: {run.folder}")
                if comparison.options.check and not stopped:
                    worse |= comparison.options.check.conclude(run, console)
    except (ConfigError, WorkloadError, runs.RunError) as error:
        fail(error, 2)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt
    for sentence in sentences.failures(run) if run else []:
        print(printable(f"error: {sentences.plain(sentence)}"), file=sys.stderr)
    if isinstance(stopped, ServerError):
        fail(stopped)
    if stopped:
        more = f"{kept}; --resume {run.folder} goes on" if run else lost
        print(f"interrupted; {more}", file=sys.stderr)
        sys.exit(130)
    failed = run and any(r.failed for results in run.variants.values() for r in results)
    # a check counts failures itself: those that the saved run had are not worse
    if worse or (failed and not comparison.options.check):
        sys.exit(1)
