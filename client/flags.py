"""The flags of a workload that compare.sh and client.py share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.data import SELECTIONS, PromptData
from client.draws import LENGTHS
from client.prompts import PROMPTS
from client.traces import BLOCK, SCALES
from client.users import Users
from config import flag

DRAWN = (
    "numsamples", "lengths", "selection", "prompts", "prefixes", "sessions", "users",
    "priorities",
)  # fmt: skip
OF_USERS = ("arrival", "wait", "lengths", "selection", "sessions")  # what --users say themselves


def add_workload(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add("--lengths", help=f"completion lengths: {LENGTHS} (default: normal)")
    add(
        "--selection",
        choices=SELECTIONS,
        help="of lengths: random, or descend (longest first; default: random)",
    )
    add(
        "--prompts",
        choices=PROMPTS,
        help="counting words, or as many random token ids below 256, which are the same prompts "
        "for every tokenizer (default: text)",
    )
    add(
        "--prefixes",
        metavar="K:TOKENS:ZIPF",
        help="put one of K shared prefixes of TOKENS ids before each prompt, the r-th in "
        "proportion to r^-ZIPF (0: all alike); implies --prompts ids",
    )
    add(
        "--sessions",
        metavar="TURNS:THINK_S",
        help="make conversations of TURNS requests: --arrival says when they begin, and each later "
        "turn repeats the conversation so far, THINK_S seconds on average (exponential) after the "
        "answer",
    )
    add(
        "--users",
        nargs="+",
        metavar="NAME,RATE,LENGTHS[,FROM-TO]",
        help="instead of --arrival and --lengths: two users or more, each with Poisson arrivals of "
        "RATE requests a second and LENGTHS of its own, FROM second TO second or all the time; the "
        "trace ends with the last TO; a user who comes back is named twice",
    )
    add(
        "--priorities",
        nargs="+",
        metavar="SHARE:LEVEL",
        help="give a SHARE of the requests priority LEVEL, 1 the highest; shares sum to 1",
    )
    add(
        "--trace",
        type=Path,
        help="replay this trace.jsonl, or one in Mooncake's format, at its own times unless "
        "--arrival says others",
    )
    add(
        "--scale",
        type=int,
        choices=SCALES,
        metavar="TOKENS",
        help=f"of a trace in Mooncake's format: make each block of {BLOCK} tokens so many, and "
        f"prompts and completions shorter by as much (a power of two; default: {BLOCK}, as it is)",
    )


def contradiction(known: argparse.Namespace) -> str | None:
    """Why these flags of a workload do not go together, in a sentence; None if they do."""
    if known.trace is not None:
        given = _given(known, DRAWN)
        return f"--trace holds the requests; leave out {given}" if given else None
    if known.scale is not None:
        return "--scale is of a trace; add --trace FILE"
    if not known.users:
        return None
    if given := _given(known, OF_USERS):
        return f"--users say who sends what, and when; leave out {given}"
    if known.numsamples is not None and seconds_say_how_many(known):
        return "the seconds of --users say how long they send; leave out them or --numsamples"
    return None


def _given(known: argparse.Namespace, names: Sequence[str]) -> str:
    return ", ".join(flag(name) for name in names if getattr(known, name, None) is not None)


def seconds_say_how_many(known: argparse.Namespace) -> bool:
    """Whether the requests are those that users send in their seconds. Raises WorkloadError."""
    return bool(known.users) and Users(known.users).until is not None


def workload(asked: Any, seed: int) -> PromptData:
    """What draws the requests that `asked` asks for: parsed flags, or options of their names.

    Raises WorkloadError.
    """
    return PromptData(
        asked.lengths or "normal",
        asked.selection or "random",
        seed,
        prompts=asked.prompts,
        prefixes=asked.prefixes,
        sessions=asked.sessions,
        users=asked.users,
        priorities=asked.priorities,
    )
