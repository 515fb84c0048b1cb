"""A history parsed: the content of each line in each iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from live.history import FREE, Cell

STEP = 6  # values of a change


class ReadIteration(NamedTuple):
    """An iteration of a history. at, seconds: on its clock. cells: by line, without free ones."""

    number: int
    at: float
    seconds: float
    waiting: int
    running: int
    blocks_used: int
    padding: int
    cells: dict[int, Cell]


def iterations(history: Mapping[str, Any]) -> Iterator[ReadIteration]:
    """Return each iteration of a history (its JSON, parsed) with all of its lines; `cells` is the
    same mapping each time, and valid until the next one.
    """
    first: int = history["first"]
    cells = {line: _cell(cell, first) for line, *cell in history.get("lines", ())}
    for number, values in enumerate(history["iterations"], first):
        at, seconds, waiting, running, blocks_used, padding, changes = values
        cells = {line: cell.at(number) for line, cell in cells.items()}
        for i in range(0, len(changes), STEP):
            line, *cell = changes[i : i + STEP]
            cells[line] = _cell(cell, number)
            if cells[line].kind == FREE:
                del cells[line]
        yield ReadIteration(number, at, seconds, waiting, running, blocks_used, padding, cells)


def _cell(values: Sequence[Any], since: int) -> Cell:
    id_, kind, n, start, rejected = values
    return Cell(id_, kind, n, start, rejected, since)
