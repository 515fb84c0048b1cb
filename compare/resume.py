"""Going on with a run that was stopped (`--resume FOLDER`): its flags, and what it has."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from client import runs
from client.traces import Request, load_trace
from compare.options import HOW, Options
from config import ConfigError, Parser, flag

SECRET = "…"  # in a saved command, in place of a key
Given = TypeVar("Given", bound=Options)


def options_of(argv: Sequence[str], parse: Callable[[Sequence[str]], Given], program: str) -> Given:
    """Parse a command line; one with --resume by the flags of the run that it names. Raises
    ConfigError, and RunError without a run.
    """
    parser = Parser(prog=program, add_help=False)
    parser.add_argument("--resume", **HOW["--resume"])
    known, others = parser.parse_known_args(argv)
    if (folder := known.resume) is None:
        return parse(argv)
    made_by, *flags = shlex.split(first(folder)["command"])
    if others:
        raise ConfigError(f"--resume goes on with the run's own flags; leave out {others[0]}")
    if made_by != program:
        raise ConfigError(f"{folder} is a run of {made_by}; {program} cannot go on with it")
    if any(SECRET in word for word in flags):
        raise ConfigError(
            f"the flags of {folder} had a key, which is never saved; only runs that have it from "
            f"a variable (EB_API_KEY) can go on"
        )
    options = parse([*flags, "--overwrite"])
    return replace(options, out=folder, resume=folder)


def first(folder: Path) -> dict[str, Any]:
    """Return the summary of a run's first seed. Raises RunError."""
    return runs.load(folder, requests=False).first


def kept(options: Options, facts: Mapping[str, Any]) -> dict[tuple[int, str], Any]:
    """Return, by seed and server, NAME.json of what was measured to its end, the points of its
    sweep, and whether it was swept. facts: of machine and code now.

    Raises ConfigError where these, or settings that come from variables, differ.
    """
    assert options.resume
    whole = {}
    for folder, summary in runs.summaries(options.resume).items():
        _check("the run", summary, facts, ["commit"])
        if not summary.get("simulated"):
            _check("the run", summary["hardware"], facts["hardware"], ["cpu", "gpu", "cores"])
        for name, headlines in summary["variants"].items():
            if headlines["partial"] or (options.sweep and name not in summary["swept"]):
                continue
            try:
                result = runs.read_json(folder / f"{name}.json")
            except (OSError, ValueError):  # it was being written when a machine failed
                continue
            if name in options.variants:
                then, now = result["config"], options.config(name).model_dump(mode="json")
                _check(name, then, now, then.keys() & now.keys() - {*runs.NOT_SHOWN, "api_key"})
            points = (summary["sweep"] or {}).get(name, [])
            whole[summary["seed"], name] = (result, points, options.sweep)
    return whole


def _check(what: str, then: Mapping[str, Any], now: Mapping[str, Any], names: Any) -> None:
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
