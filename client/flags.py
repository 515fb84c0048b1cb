"""The flags of a workload that compare.sh and client.py share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from client.data import SELECTIONS, PromptData
from client.draws import LENGTHS
from client.prompts import PROMPTS
from client.traces import BLOCK, SCALES
from config import flag

DRAWN = ("numsamples", "lengths", "selection", "prompts", "prefixes", "sessions")


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
    if known.trace is None:
        return None if known.scale is None else "--scale is of a trace; add --trace FILE"
    given = [flag(name) for name in DRAWN if getattr(known, name) is not None]
    return f"--trace holds the requests; leave out {', '.join(given)}" if given else None


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
    )
