"""Flags that client.py and compare.sh share, and checks of their values."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from client import draws
from client.bounds import Bounds
from client.processes import read_number
from client.trace_file import TraceFile
from client.users import Users
from client.wire import OTHERS, Asked
from client.workloads import PROMPTS
from config.flags import Flags
from config.reading import parse
from config.settings import ConfigError, flag
from stats import LIMITED

TINY = sys.float_info.min
DRAWN: Flags = {  # each a field of Workload
    "--lengths": {"help":
        f"completion lengths, of a --trace too: {draws.LENGTHS} (default: normal)"},
    "--prompt-lengths": {"help":
        "token ids of prompts: the same distributions; implies --prompts ids (default: |N(10, 10)| "
        "words)"},
    "--prompts": {"choices": PROMPTS, "help":
        "text: counting words; ids: as many random token ids below 256, which every tokenizer has "
        "(default: text)"},
    "--prefixes": {"metavar": "K:TOKENS:ZIPF", "help":
        "put one of K shared prefixes of TOKENS ids before each prompt, the r-th in proportion to "
        "r^-ZIPF (0: all alike); implies --prompts ids"},
    "--sessions": {"metavar": "TURNS:THINK_S", "help":
        "make conversations of TURNS requests: --arrival says when they begin, and each later turn "
        "repeats the conversation so far, THINK_S seconds on average (exponential) after the "
        "answer"},
    "--users": {"nargs": "+", "metavar": "NAME,RATE,LENGTHS[,FROM-TO]", "help":
        "instead of --arrival and --lengths: two users or more, each with Poisson arrivals of RATE "
        "requests per second and LENGTHS of its own, FROM second TO second or all the time; the "
        "trace ends with the last TO; name a user twice to let it come back"},
    "--priorities": {"nargs": "+", "metavar": "SHARE:LEVEL", "help":
        "give a SHARE of the requests priority LEVEL, 1 the highest; shares sum to 1"},
    "--slo-mix": {"nargs": "+", "metavar": "SHARE:CLASS=ttft:MS,tpot:MS", "help":
        "put a SHARE of the requests into a class with limits on their time to first token and per "
        "output token, or one of the two; shares sum to 1; reports show goodput by class"},
    "--adapters": {"metavar": "N:DISTRIBUTION", "help":
        "name one of the LoRA adapters lora-0, lora-1, … in each request, as popular as in "
        f"Punica's experiments: {', '.join(draws.POPULARITIES)} (skewed: each 1.5 times as often "
        "as the next)"},
}  # fmt: skip
WORKLOAD: Flags = DRAWN | {
    "--trace": {"type": Path, "metavar": "FILE", "help":
        "replay the requests of a file, of a run of ours or in another form (Azure's, BurstGPT's, "
        "Vidur's, Mooncake's, ShareGPT's, a prompt a line), the first --numsamples or all, at its "
        "own times unless --arrival is given"},
    "--scale-tokens": {"type": float, "metavar": "FACTOR", "help":
        "multiply the lengths that --trace recorded, of prompts and completions, such as 0.1"},
    "--time-unit": {"choices": ("s", "ms", "us"), "help":
        "unit of the times of --trace (default: as its header or its form says)"},
}  # fmt: skip
BOUNDS: Flags = {  # each a field of Bounds
    "--max-seconds": {"type": float, "metavar": "S", "help":
        "end each replay S seconds after its first request, whatever is left of it"},
    "--max-failures": {"type": int, "metavar": "N", "help":
        "end a replay when N of its requests have failed"},
    "--warm-up": {"type": int, "metavar": "N", "help":
        "send the first N requests of each trace as a warm-up, which no measure counts"},
}  # fmt: skip
SENDING: Flags = {
    "--client-processes": {"type": read_number, "metavar": "N", "help":
        "send the load from N processes; Python's lock keeps one of them to one core (default: "
        "auto, 1 below 200 requests per second, else one for every four cores, 8 at most)"},
}  # fmt: skip
SVG: Flags = {"--svg": {"action": "store_true", "help": "write each figure as SVG, too"}}
ASKED: Flags = {  # flags for servers that are none of ours
    "--header": {"action": "append", "default": [], "metavar": "'NAME: VALUE'", "help":
        "send this header to servers that are none of ours, such as a gateway's key; repeat it for "
        "each; it is neither saved nor shown"},
    "--extra-body": {"metavar": "JSON", "help":
        "fields of each request to servers that are none of ours, such as '{\"min_p\": 0.1}'; they "
        "replace those sent without it, and null leaves one out"},
}  # fmt: skip
RANGES = (
    ("seed", 0, math.inf, "0 or more"),
    ("numsamples repeats max_failures warm_up", 1, math.inf, "at least 1"),
    ("scale_tokens", 1e-4, 1e4, "a number from 0.0001 to 10000, such as 0.1"),
    ("seconds timeout max_seconds", TINY, 1e9, "a number of seconds above 0, at most 1e9"),
    ("price", TINY, 1e9, "what a machine costs an hour: above 0, at most 1e9"),
)
HEADER = re.compile(r"([!#$%&'*+.^_`|~\w-]+):[ \t]*([!-~](?:[ -~]*[!-~])?)", re.ASCII)
OF_WORKLOAD = [name.removeprefix("--").replace("-", "_") for name in DRAWN]
OF_USERS = ("arrival", "lengths", "sessions")  # what --users say themselves


def given_workload(known: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a Workload that flags give; None for those left out."""
    return {name: getattr(known, name) for name in OF_WORKLOAD}


def trace_file(known: argparse.Namespace) -> TraceFile | None:
    """Return the file of --trace with what flags say of it; None without it."""
    if known.trace is None:
        return None
    arrival = None if known.arrival == "auto" else known.arrival
    asked = known.seed, known.numsamples, known.lengths, Fraction(str(known.scale_tokens or 1))
    return TraceFile(known.trace, arrival, *asked, known.time_unit)


def bounds_of(known: argparse.Namespace) -> Bounds:
    return Bounds(known.max_seconds, known.max_failures, known.warm_up or 0)


def asked_of(known: argparse.Namespace) -> Asked:
    """Return how servers that are none of ours are asked. Raises ConfigError, without a value of a
    header.
    """
    api, headers = known.api or "openai", {}
    for text in known.header:
        if (found := HEADER.fullmatch(text.strip())) is None:
            raise ConfigError("--header: give 'NAME: VALUE' in ASCII, such as 'X-Api-Key: KEY'")
        headers[found[1].title()] = found[2]
    extra: Any = {}
    if (text := known.extra_body) is not None:
        try:
            extra = parse(text)
            json.dumps(extra, allow_nan=False).encode()
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f"--extra-body {text}: give a JSON object, as '{{\"min_p\": 0.1}}'")
    if api not in OTHERS and (headers or extra):
        raise ConfigError("--header and --extra-body go with --api openai or --api chat")
    return Asked(api, headers, extra)


def contradiction(known: argparse.Namespace) -> str | None:
    """Return the contradiction of these flags, in a sentence; None if they agree."""

    def given(names: Sequence[str]) -> str:
        return ", ".join(flag(name) for name in names if getattr(known, name, None) is not None)

    if known.trace is not None:
        drawn = given([name for name in OF_WORKLOAD if name != "lengths"])
        return f"--trace holds the requests; leave out {drawn}" if drawn else None
    if of_trace := given(("scale_tokens", "time_unit")):
        return f"{of_trace} applies to a trace; add --trace FILE"
    if not known.users:
        return None
    if of_users := given(OF_USERS):
        return f"--users have arrivals and lengths of their own; leave out {of_users}"
    if known.numsamples is not None and seconds_say_how_many(known):
        return "the seconds of --users end the trace; leave out these seconds or --numsamples"
    return None


def seconds_say_how_many(known: argparse.Namespace) -> bool:
    """Return whether users send in stated seconds alone. Raises WorkloadError."""
    return bool(known.users) and Users(known.users).until is not None


def folder(text: str) -> Path:
    """Return the path of a folder that is there, or can be made. Raises ArgumentTypeError."""
    path = Path(os.path.expanduser(text))  # which a shell leaves in --out=~/x
    try:
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if there.is_dir() and os.access(there, os.W_OK):
            return path
    except OSError as error:  # the name is too long, say
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}; name another") from None
    raise argparse.ArgumentTypeError(f"{there} is no folder with write access; name another")


def file(text: str) -> Path:
    """Return the path of a file that can be written. Raises ArgumentTypeError."""
    path = Path(os.path.expanduser(text))
    with contextlib.suppress(OSError):  # the name is too long, say
        written = path if path.exists() else path.parent
        if path.parent.is_dir() and not path.is_dir() and os.access(written, os.W_OK):
            return path
    raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder with write access")


def drawn_file(text: str) -> Path:
    """Return the path of a figure that can be written. Raises ArgumentTypeError."""
    if (path := file(text)).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return path


def check_numbers(known: argparse.Namespace) -> None:
    """Raise ConfigError for a number out of its range; one that is None, or missing, is fine."""
    for names, least, most, words in RANGES:
        for name in names.split():
            if (number := getattr(known, name, None)) is not None and not least <= number <= most:
                raise ConfigError(f"{flag(name)} must be {words}")


def parse_limits(
    texts: Sequence[str], name_of: str, names: Collection[str], form: str,
    most: float = math.inf, unit: str = "",
) -> dict[str, float]:  # fmt: skip
    """Return {"ttft": 200.0} for ["ttft:200"]. name_of: the flag. names: those it takes. form: of
    its values, for errors. most: what each is below. unit: may follow it. Raises ConfigError.
    """
    limits = {}
    for text in texts:
        name, _, value = text.rpartition(":")
        try:
            limit = float(value.removesuffix(unit))
            if name not in names or not 0 < limit < most:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{name_of} {text!r}: give {form}") from None
        if name in limits:
            raise ConfigError(f"{name_of} names {name} twice; leave one of them out")
        limits[name] = limit
    return limits


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Return the limits of --goodput. Raises ConfigError."""
    return parse_limits(texts, "--goodput", LIMITED, "ttft:MS, tpot:MS or e2el:MS")
