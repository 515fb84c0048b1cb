"""Answer a question by measurement.

    python -m lab.studies NAME [--seeds N] [--requests N] [--only KEY=VALUE …] [--out DIR]

All variants of a case serve the same traces, so differences are paired by seed. Finished runs are
kept in DIR/NAME.runs.jsonl: the same command goes on where it was stopped, and begins anew only
where the code that the numbers depend on has changed. Studies that have answered left: their
results state the command and the commit that made them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.arguments import folder
from client.calls import ServerError
from client.runs import read_json
from client.stopping import end_as_on_ctrl_c
from config.flags import Parser
from config.settings import ConfigError
from lab.studies import runner
from lab.studies.study import Cases, Study
from simulate.costs import CostsError

NAMES = ("orders", "fidelity", "real", "vllm_schedule", "arena", "peers", "own")


def load(name: str) -> Study:
    """Return the study of a module's name."""
    study: Study = importlib.import_module(f"lab.studies.{name}").STUDY
    return study


def parser_of(studies: Sequence[Study]) -> argparse.ArgumentParser:
    parser = Parser(prog="python -m lab.studies", description=__doc__)
    names = parser.add_subparsers(metavar="NAME", required=True)
    for study in studies:
        of_study = names.add_parser(study.name, description=study.question, help=study.question)
        of_study.set_defaults(study=study, requests=study.requests, processes=1)
        numbers = {"--seeds": (study.seeds, "runs of each case")}
        if study.requests:
            numbers["--requests"] = study.requests, "of each trace"
        if not study.servers:
            numbers["--processes"] = 2, "processes at once"
        for name, (number, text) in numbers.items():
            of_study.add_argument(name, type=above_0, default=number, help=f"{text} (%(default)s)")
        add = of_study.add_argument
        add("--minutes", type=float, default=float("inf"), help="after these no run begins")
        about = "only cases with this value; may be repeated"
        add("--only", action="append", default=[], metavar="KEY=VALUE", help=about)
        about = "show the numbers of DIR again, instead of measuring"
        add("--from", type=Path, dest="source", metavar="DIR", help=about)
        add("--out", type=folder, default=Path("runs") / study.name, help="folder (%(default)s)")
        for name, (default, text) in study.options.items():
            add(f"--{name}", type=type(default), default=default, help=f"{text} (%(default)s)")
    return parser


def above_0(text: str) -> int:
    """Return a number from 1 on. Raises ArgumentTypeError."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")


def chosen(study: Study, cases: Cases, conditions: Sequence[str]) -> list[Any]:
    """Return the cases that have, for each key in the conditions, one of its values. Raises
    ConfigError if none has, or without those that others are compared with.
    """
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        wanted.setdefault(key, []).append(value)
    found = [
        case for case in cases if all(str(case.get(key)) in texts for key, texts in wanted.items())
    ]
    if not found:
        first = ", ".join(f"{key}={value}" for key, value in cases[0].items() if key != "seeds")
        raise ConfigError(f"--only leaves no case; the first of all has {first}")
    bases = [each for each in study.bases if each.partition("=")[0] in wanted]
    if lost := [f"--only {each}" for each in bases if each not in conditions]:
        raise ConfigError(f"others are compared with what --only leaves out; add {' '.join(lost)}")
    return found


def result_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the cases with their measures, as measured now or as kept in a folder."""
    study: Study = options.study
    if options.source:
        try:
            kept = read_json(options.source / f"{study.name}.json")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--from {options.source}: {why} ({study.name}.json)") from None
        cases, keys = kept.get("cases"), {key for table in study.tables for key in table.where}
        of_study = isinstance(cases, list) and all(
            isinstance(case, dict) and isinstance(case.get("seeds"), list) and keys <= case.keys()
            for case in cases
        )
        if not (of_study and cases):
            raise ConfigError(
                f"--from {options.source}: another program made its {study.name}.json; use that of "
                "the commit which its page names"
            )
        kept |= {"cases": chosen(study, cases, options.only)}
        return {"requests": study.requests, "seeds": len(cases[0]["seeds"]), **kept}
    given = {name: getattr(options, name) for name in study.options}
    cases = chosen(study, study.cases(options.requests, **given), options.only)
    path = options.out / f"{study.name}.runs.jsonl"
    kept_runs = runner.FinishedRuns(path, runner.code(study))
    cases = runner.measured(
        study, cases, options.requests, options.seeds, kept_runs, options.processes, options.minutes
    )
    if not (seeds := len(cases[0]["seeds"])):
        sys.exit("no seed has been run by all cases yet; the same command goes on")
    if study.summarized:
        cases = study.summarized(cases, **given)
    return {"cases": cases, "requests": options.requests, "seeds": seeds, **given}


def main(argv: Sequence[str] | None = None, program: str = "lab.studies") -> None:
    """Run a study. argv: the command line, if another program has made it."""
    end_as_on_ctrl_c()
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    named = [name for name in NAMES if name in words[:1]]  # others may need missing packages
    try:
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        options = parser_of([*map(load, named or NAMES)]).parse_args(words)
        if options.source and (unused := flags - {"--from", "--only", "--out"}):
            raise ConfigError(
                f"--from measures nothing anew; leave out {', '.join(sorted(unused))}"
            )
        runner.write(options.study, options.out, result_of(options), program)
    except (ConfigError, ServerError, CostsError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
