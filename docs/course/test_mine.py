"""The exercises of the course: each file of mine/ is held to a worked schedule, and then to the
contract of every policy.

    ./test.sh course -k static

Each column of a schedule is an iteration, which takes a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scheduling import user_policies
from scheduling.inference import Iteration, Row
from scheduling.policies import MODES, ORDERS, VICTIMS, Dynamic, Fcfs, Order, Policy, Victim
from simulate import drive
from tests.virtual import Ask, make_scheduler

ROOT = Path(__file__).parents[2]
MEANING = "number: prompt tokens computed   d: token decoded   i: idle row   .: no row"
Schedule = dict[str, list[str]]  # the cells of each line, by its name: at, A, B, …


class Exercise(NamedTuple):
    """A trace of docs/examples, the limits of its server, and the schedule that is right."""

    trace: str
    limits: dict[str, int]
    schedule: str


EXERCISES = {
    "nobatch": Exercise("modes", {}, """
        at 0 1 2 3 4 5 6 7 8 9 10
        A  1 d d d d . . . . . .
        B  . . . . . 1 d . . . .
        C  . . . . . . . 1 d d .
        D  . . . . . . . . . . 1"""),
    "static": Exercise("modes", {}, """
        at 0 1 2 3 4 5 6 7
        A  1 d d d d . . .
        B  1 d i i i . . .
        C  . . . . . 1 d d
        D  . . . . . 1 i i"""),
    "windowed": Exercise("window", {}, """
        at 2 3 4 5 6 8
        A  1 d d . . .
        B  . . . 1 i .
        C  . . . 1 d .
        D  . . . . . 1"""),
    "dynamic": Exercise("modes", {}, """
        at 0 1 2 3 4 5
        A  1 d d d d .
        B  1 d . . . .
        C  . . 1 d d .
        D  . . . . . 1"""),
    "chunked": Exercise("chunks", {"token_budget": 9}, """
        at 0 1 2 3 4 5
        A  1 d d d d d
        B  . 9 9 7 d ."""),
    "preemption": Exercise("demand", {"n_blocks": 3}, """
        at 0 1 2 3 4 5 6 7 8
        A  4 d d d d . . . .
        B  4 . . . . 5 d d d"""),
    "sjf_aging": Exercise("orders", {"max_batch_size": 1}, """
        at 0 1 2 3 4 5 6 7 8 9
        A  1 d d . . . . . . .
        B  . . . . 1 d d d . .
        C  . . . 1 . . . . . .
        D  . . . . . . . . 1 d"""),
    "fair": Exercise("fair", {"max_batch_size": 1}, """
        at 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17
        A  1 d d . . . . . . . .  .  .  .  .  .  .  .
        B  . . . . . . 1 d d . .  .  .  .  .  .  .  .
        C  . . . . . . . . . . .  .  1  d  d  .  .  .
        D  . . . . . . . . . . .  .  .  .  .  1  d  d
        E  . . . 1 d d . . . . .  .  .  .  .  .  .  .
        F  . . . . . . . . . 1 d  d  .  .  .  .  .  ."""),
}  # fmt: skip


@pytest.mark.parametrize("name", EXERCISES)
def test_mine(name: str) -> None:
    word = f"docs/course/mine/{name}.py"
    said = problem(name, mine(ROOT / word)) or violation(ROOT / word)
    if said:
        pytest.fail(f"{word}: {said}", pytrace=False)


def mine(path: Path) -> Policy | Order | Victim:
    """Return the policy, order or victim of a reader's file, with its defaults."""
    [word] = user_policies.offered(path)
    tables: tuple[Any, ...] = {**MODES}, {**ORDERS}, {**VICTIMS}
    user_policies.load([word], {}, *tables)
    if word in user_policies.PROBLEMS:
        pytest.fail(user_policies.PROBLEMS[word], pytrace=False)
    [made] = [table[word]() for table in tables if word in table]
    return made


def violation(path: Path) -> str | None:
    """Return what ./test.sh --policy says of a file that violates the contract."""
    command = [sys.executable, "-m", "tests.contract", "--policy", os.path.relpath(path, ROOT)]
    environ = os.environ | {user_policies.HANDED_ON: "{}"}  # this file alone
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", env=environ)
    said = f"the worked schedule is right; the contract is violated.\n\n{done.stdout}{done.stderr}"
    return said if done.returncode else None


def problem(name: str, of: Policy | Order | Victim) -> str | None:
    """Return how the schedule of a reader's class differs from the right one, if it does."""
    exercise = EXERCISES[name]
    lines = [line.split() for line in exercise.schedule.strip().splitlines()]
    right = {label: cells for label, *cells in lines}
    policy = (
        of if isinstance(of, Policy) else Dynamic("demand" if isinstance(of, Victim) else "whole")
    )
    order, victim = (of if isinstance(of, kind) else None for kind in (Order, Victim))
    scheduler = make_scheduler(policy, order=order or Fcfs(), victim=victim, **exercise.limits)
    got: Schedule = {label: [] for label in right}

    def planned(now: float, iteration: Iteration) -> None:
        if len(got["at"]) > 2 * len(right["at"]):
            raise RuntimeError("the requests do not end")
        cells = {"at": f"{now:g}"} | {
            chr(ord("A") + r.inference.id): cell(r) for r in iteration.rows
        }
        for label in got if iteration.rows else ():
            got[label].append(cells.get(label, "."))

    text = (ROOT / "docs" / "examples" / f"{exercise.trace}.jsonl").read_text("utf-8")
    asks = [
        Ask(each["at"], len(each["prompt_ids"]), each["num_tokens"], user=each.get("user"))
        for each in map(json.loads, text.rstrip("\n").split("\n"))
    ]
    try:
        drive(scheduler, [(ask.at, ask.group(4)) for ask in asks], lambda _: 1.0, planned=planned)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:
        why = user_policies.described(error, user_policies.file_of(type(of)))
        return f"{why}\n\n{compared(right, got)}"
    return None if got == right else f"the schedule differs.\n\n{compared(right, got)}"


def cell(row: Row) -> str:
    return "i" if row.idle else "d" if row.decodes else str(row.n_tokens)


def compared(right: Schedule, got: Schedule) -> str:
    """Draw both schedules below each other, and say how their first different iterations differ."""
    pairs = {label: [*zip_longest(right[label], got[label], fillvalue=".")] for label in right}
    n = len(pairs["at"])
    first = next((k for k in range(n) if any(a[k][0] != a[k][1] for a in pairs.values())), n)
    lines = []
    for label, cells in pairs.items():
        for i, source in enumerate((f"{label:<4}expected ", "    got      ")):
            lines.append(source + "".join(f"{each[i]:>3}" for each in cells))
    lines += [f"{'^':>{16 + 3 * first}}", MEANING, ""]
    for label, cells in pairs.items() if first < n else ():
        expected, was = (meaning(label, each) for each in cells[first])
        if expected != was:
            lines.append(f"Iteration {first + 1}, {label}: expected {expected}; got {was}.")
    return "\n".join(lines)


def meaning(label: str, cell: str) -> str:
    if label == "at":
        return "no iteration" if cell == "." else f"its beginning at {cell} s"
    kinds = {"d": "a decoded token", "i": "an idle row", ".": "no row"}
    return kinds.get(cell, f"{cell} prompt token{'s' * (cell != '1')}")
