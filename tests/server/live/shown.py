"""Servers with every kind of row, in which page and data must agree with /stats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from server.live.history import FREE, STEP, Cell
from stats import ROW_KINDS

# kinds of rows by the page's letters
KINDS = {"d": "live", "v": "live", "p": "live", "r": "recomputed", "i": "idle", "s": "paused"}
Rows = dict[str, int]  # of an iteration, by kind


class RowCase(NamedTuple):
    """A server, and the kinds of rows that a load gives it besides live ones."""

    mode: str
    flags: Mapping[str, Any]
    has: frozenset[str]


def case(mode: str, *has: str, **flags: Any) -> RowCase:
    return RowCase(mode, {"model": "fake", "max_batch_size": 4} | flags, frozenset(has))


FEW: dict[str, Any] = {"kv_reservation": "demand", "kv_cache": "8blocks", "max_model_len": 128}
PADDED: dict[str, Any] = {"batch_size_target": 3, "decoder_batch_sizes": "4"}
CASES = {
    "static": case("static", "idle"),
    "windowed, padding": case("windowed", "idle", "padding", **PADDED),
    "multibin": case("multibin", "idle", bins=2),
    "dynamic": case("dynamic"),
    "draft tokens": case("dynamic", "rejected", speculate=3, draft="acceptance:0.6"),
    "demand, few blocks": case("dynamic", "recomputed", **FEW),
    "srpt": case("dynamic", "paused", order="srpt"),
}


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
    """Yield each iteration of a history (its JSON, parsed) with all of its lines."""
    first: int = history["first"]
    cells = {line: Cell._make([*cell, first]) for line, *cell in history.get("lines", ())}
    for number, (*values, changes) in enumerate(history["iterations"], first):
        cells = {line: cell.at(number) for line, cell in cells.items()}
        for i in range(0, len(changes), STEP):
            line, *cell = changes[i : i + STEP]
            cells[line] = Cell._make([*cell, number])
            if cells[line].kind == FREE:
                del cells[line]
        yield ReadIteration._make([number, *values, cells])


def rows_of(history: Mapping[str, Any]) -> list[Rows]:
    """Return the rows of each iteration of a history."""
    result = []
    for seen in iterations(history):
        rows = dict.fromkeys((*ROW_KINDS, "paused"), 0) | {"padding": seen.padding}
        for cell in seen.cells.values():
            rows[KINDS[cell.kind]] += cell.n if cell.kind == "d" else 1
            rows["rejected"] += cell.rejected
        result.append(rows)
    return result


def computed(rows: Sequence[Rows]) -> Rows:
    """Return the rows of all iterations, as /stats counts them."""
    return {kind: sum(each[kind] for each in rows) for kind in ROW_KINDS}


def counted(stats: Mapping[str, Any]) -> Rows:
    """Return the rows that /stats reports."""
    return {kind: stats[f"{kind}_rows"] for kind in ROW_KINDS}


def assert_stats_say(rows: Sequence[Rows], stats: Mapping[str, Any], has: frozenset[str]) -> None:
    """Check the rows of each iteration against /stats?iterations=1, and of all together."""
    measured = stats["iterations"]
    assert [[each[kind] for kind in ROW_KINDS] for each in rows] == [each[2:] for each in measured]
    assert computed(rows) == counted(stats)
    assert {kind for each in rows for kind, n in each.items() if n} == {"live", *has}
