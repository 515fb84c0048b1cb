"""A history, read again: what each line does in each iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from live.history import FREE, Cell

STEP = 5  # numbers and words that a change has


class Seen(NamedTuple):
    """An iteration. at, seconds: on the history's clock. cells: by line, of those that are not
    free.
    """

    number: int
    at: float
    seconds: float
    waiting: int
    running: int
    blocks_used: int
    padding: int
    cells: dict[int, Cell]


def iterations(history: Mapping[str, Any]) -> Iterator[Seen]:
    """Each iteration of a history (its JSON, parsed), with all of its lines; `cells` is the same
    mapping each time, and holds until the next one.
    """
    first: int = history["first"]
    cells = {line: _cell(cell, first) for line, *cell in history.get("lines", ())}
    for number, told in enumerate(history["iterations"], first):
        at, seconds, waiting, running, blocks_used, padding, changes = told
        cells = {line: cell.at(number) for line, cell in cells.items()}
        for i in range(0, len(changes), STEP):
            line, *cell = changes[i : i + STEP]
            cells[line] = _cell(cell, number)
            if cells[line].kind == FREE:
                del cells[line]
        yield Seen(number, at, seconds, waiting, running, blocks_used, padding, cells)


def _cell(told: Sequence[Any], since: int) -> Cell:
    id_, kind, n, start = told
    return Cell(id_, kind, n, start, since)
