"""The live page shows the worked examples of README.md and docs/policies.md as these do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from live.history import Cell
from live.reading import iterations
from live.saved import histories
from tests.counts import nightly_but
from tests.programs import ran
from tests.test_readme import BLOCKS, PAGES, TEXT

LINES = [line for page in PAGES for line in TEXT[page].splitlines()]
NOT_COMPUTED = "sw"


def examples() -> list[tuple[list[str], list[list[str]]]]:
    """Return each ./simulate.sh of a worked example, and the commands that show its run."""
    result: list[tuple[list[str], list[list[str]]]] = []
    lines = [line for block in BLOCKS for line in block.splitlines() if line]
    for program, *arguments in (shlex.split(line, comments=True) for line in lines):
        if program == "./simulate.sh" and "second" in arguments:
            result.append((arguments, []))
        elif result and arguments[:2] == ["-m", "live"] and result[-1][0][-1] in arguments:
            result[-1][1].append(arguments[2:])
    return result


@pytest.mark.parametrize(
    ("arguments", "shows"),
    nightly_but([each for each in examples() if each[0][-1] == "runs/modes"], examples()),
)
@pytest.mark.usefixtures("undrawn")
def test_a_worked_example_is_shown_as_on_its_page(
    arguments: list[str], shows: list[list[str]], tmp_path: Path
) -> None:
    out, run = arguments[-1], tmp_path / "run"
    done = ran("simulate", *arguments[:-1], str(run))
    assert done.returncode == 0, done.stderr
    shown = {name: json.loads(text) for name, text in histories(run)[0].items()}
    for name, history in shown.items():
        drawings = by_row(history), by_request(history)
        assert any(is_on_a_page(name, lines) for lines in drawings), (name, drawings)
    assert shows, f"nothing shows {out}"
    for show in shows:
        done = ran("live", *[str(run) if each == out else each for each in show])
        assert done.returncode == 0, done.stderr
        [data] = re.findall(r'id="runs">(.*?)</script>', (run / "live.html").read_text())
        for history in json.loads(data):
            assert history["iterations"] == shown[history["about"]["name"]]["iterations"]


def by_row(history: Mapping[str, Any]) -> list[str]:
    """Draw a line for each row: the request that each second computes; small if idle, + if it is
    padding.
    """
    names = {id_: user or chr(ord("A") + id_) for id_, _, _, _, user, *_ in history["requests"]}

    def letter(cell: Cell) -> str:
        return names[cell.id].lower() if cell.kind == "i" else names[cell.id]

    columns = {
        round(seen.at): [
            *(letter(cell) for _, cell in sorted(seen.cells.items()) if computed(cell)),
            *"+" * seen.padding,
        ]
        for seen in iterations(history)
    }
    n = max(map(len, columns.values()))
    return [
        "".join(f"{column[k] if k < len(column) else '':<2}" for column in columns.values())
        for k in range(n)
    ]


def by_request(history: Mapping[str, Any]) -> list[str]:
    """Draw a line for each request: its prompt tokens that each second computes, or d for a
    decode.
    """
    rows: dict[int, str] = {}
    for number, seen in enumerate(iterations(history)):
        for cell in filter(computed, seen.cells.values()):
            work = "d" if cell.kind == "d" else str(cell.n)
            rows[cell.id] = f"{rows.get(cell.id, ''):<{2 * number}}{work}"
    return [f"{chr(ord('A') + id_)}  {rows[id_]}" for id_ in sorted(rows)]


def computed(cell: Cell) -> bool:
    return cell.kind not in NOT_COMPUTED


def is_on_a_page(name: str, rows: Sequence[str]) -> bool:
    """Return whether a page has these rows below each other, the first behind the name."""
    first, *others = [row.rstrip() for row in rows]
    for i, line in enumerate(LINES):
        for match in re.finditer(rf"\b{name}( \d+)? +{re.escape(first)}(?=  |$)", line):
            column = match.end() - len(first)
            below = [following[column:] for following in LINES[i + 1 : i + 1 + len(others)]]
            if all(re.match(rf"{re.escape(row)}(  |$)", text) for row, text in zip(others, below)):
                return True
    return False
