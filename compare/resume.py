"""The command of a saved run once more: it goes on (--resume), or is compared (--check)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from client import runs
from client.results import Json
from client.traces import Request, load_trace
from compare.check import Check, junit, limits_of
from compare.measuring import Measured, Task
from compare.options import HOW, OF_RUN, Options
from config.flags import Parser, add_flags
from config.settings import ConfigError, flag

SECRET = "…"  # in a saved command, in place of a key
OF_CHECK = ("--limit", "--junit", "--out", "--overwrite")
Given = TypeVar("Given", bound=Options)


def begin(argv: Sequence[str], parse: Callable[[Sequence[str]], Given], program: str) -> Given:
    """Parse a program's command line, as `options_of`. First the file of a check's --junit gets an
    error: whatever fails from here on, no answer of an earlier check is left. Raises ConfigError
    for a file that is no check's.
    """
    checks = any(word.partition("=")[0] == "--check" for word in argv)
    known, _ = _known(argv, "--junit", "--overwrite")
    if checks and (file := known.junit) is not None:
        if file.is_file() and b'<testsuite name="check"' not in file.read_bytes()[:200]:
            runs.refuse_overwriting([file], known.overwrite)
        junit(file)
    return options_of(argv, parse, program)


def options_of(argv: Sequence[str], parse: Callable[[Sequence[str]], Given], program: str) -> Given:
    """Parse a command line; one with --resume or --check by the flags of the run that it names.
    Raises ConfigError, and RunError without a run.
    """
    known, more = _known(argv, "--resume")
    if (folder := known.resume) is not None:
        _, words = _saved(folder, program)
        if more:
            first = more[0].partition("=")[0]
            raise ConfigError(f"--resume goes on with the run's own flags; leave out {first}")
        options = parse([*words, "--out", str(folder)])
        return replace(options, overwrite=True, resume=folder)
    known, more = _known(argv, "--check", *OF_CHECK)
    if (folder := known.check) is None:
        return parse(argv)
    saved, words = _saved(folder, program)
    given = [name for word in more if (name := word.partition("=")[0]) in {*OF_RUN, "--find"}]
    for refused, sentence in (
        (given, f"it has requests, variants and seeds of its own; leave out {''.join(given[:1])}"),
        (len(saved.summaries) < 2,
         "a run of one seed has no interval; measure it again with --repeats 5"),
        (known.out and known.out.resolve() == folder.resolve(),
         "--out would replace this run; name another folder"),
    ):  # fmt: skip
        if refused:
            raise ConfigError(f"--check {folder}: {sentence}")
    words = _known(words, "--sweep", "--seconds")[1]
    if saved.first["capacity"]:  # the rate was measured
        words += ["--arrival", saved.first["workload"]["arrival"]]
    check = Check(saved, limits_of(known.limit), known.junit, [*words, *more])
    check.compared(saved)  # refuses --limit of what it lacks
    out = ["--out", str(known.out)] if known.out else []
    options, goodput = parse([*check.words, *out]), saved.first["goodput"]
    return replace(options, overwrite=known.overwrite, goodput=goodput, check=check)


def _known(argv: Sequence[str], *names: str) -> tuple[Any, list[str]]:
    """Return the values of these flags, and all other words."""
    parser = Parser(add_help=False)
    add_flags(parser, {name: HOW[name] for name in names})
    return parser.parse_known_args(argv)


def _saved(folder: Path, program: str) -> tuple[runs.SavedRun, list[str]]:
    """Return a run and the words of its command, but for its folder. Raises RunError, and
    ConfigError if these words are not enough.
    """
    run = runs.load(folder, requests=False)
    made_by, *words = shlex.split(run.first["command"])
    if made_by != program:
        raise ConfigError(f"{folder} is a run of {made_by}; name one of {program}")
    if any(SECRET in word for word in words):
        raise ConfigError(
            f"the flags of {folder} had a key, which is never saved; name a run that has it from a "
            "variable (EB_API_KEY)"
        )
    parser = Parser(add_help=False)
    add_flags(
        parser, {"--out": {}, "--overwrite": HOW["--overwrite"]}
    )  # both depend on the machine
    return run, parser.parse_known_args(words)[1]


def kept(options: Options, facts: Json) -> dict[Task, Measured]:
    """Return what was measured to its end. facts: those of this comparison, as in a summary.

    Raises ConfigError where these, or settings that come from variables, differ.
    """
    assert options.resume
    whole: dict[Task, Measured] = {}
    for folder, summary in runs.summaries(options.resume).items():
        _check("the run", summary, facts, ["commit"])
        if simulated := summary.get("simulated"):
            _check("the run", simulated, facts["simulated"], ["costs_sha256"])
        else:
            _check("the run", summary["hardware"], facts["hardware"], ["cpu", "gpu", "cores"])
        for name, headlines in summary["variants"].items():
            if headlines.partial or (options.sweep and name not in summary["swept"]):
                continue
            try:
                result = runs.result_of(folder, name)
            except runs.RunError:  # it was being written when a machine failed
                continue
            if name in options.variants:
                if not result.config:  # its server had ended before it was asked
                    continue
                then, now = result.config, options.config(name).model_dump(mode="json")
                _check(name, then, now, then.keys() & now.keys() - {*runs.NOT_SHOWN, "api_key"})
            points = (summary["sweep"] or {}).get(name, [])
            whole[summary["seed"], name] = Measured(result, points, options.sweep)
    return whole


def _check(what: str, then: Json, now: Json, names: Iterable[str]) -> None:
    for name in names:
        if (before := then.get(name)) != (here := now.get(name)):
            raise ConfigError(
                f"{what} was measured with {flag(name)[2:]} {before}, and here it is {here}; go on "
                "where it is the same, or measure anew"
            )


def check_trace(folder: Path, requests: Sequence[Request]) -> None:
    """Raise ConfigError if a seed's saved trace is not the one that is replayed now."""
    path = folder / "trace.jsonl"
    if path.exists() and load_trace(path) != list(requests):
        raise ConfigError(f"{path} is not what the run's flags replay now; measure anew")
