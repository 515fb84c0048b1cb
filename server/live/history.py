"""Rows × iterations in the page's format (docs/live.md): each running request has a line of its
own, and an iteration is stored as the changes of lines.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduling.inference import Inference, Iteration, Row

KEPT = 2000  # iterations that a page can go back to
QUEUE = 64  # waiting requests of a snapshot
STEP = 6  # values of a change
# kinds of content of a line; PAUSED: its KV is kept and nothing is computed; NO_BUDGET: admitted,
# and no token budget is left
DECODE, PREFILL, RECOMPUTE, IDLE, PAUSED, NO_BUDGET, FREE = "d", "p", "r", "i", "s", "w", ""
_LASTING = {DECODE, IDLE, PAUSED, NO_BUDGET}  # until the next change
_to_json = json.JSONEncoder(separators=(",", ":")).encode
Drafted = Sequence[tuple[int, int]]  # by row with drafts: number, accepted


class Skipped(NamedTuple):
    """A running request that an iteration does not compute. kind: PAUSED or NO_BUDGET."""

    inference: Inference
    kind: str
    computed: int  # its tokens so far


class Cell(NamedTuple):
    """Content of a line from an iteration on."""

    id: int  # the request's id
    kind: str
    n: int  # tokens, without rejected ones
    start: int  # position of the first
    rejected: int  # draft tokens after them
    since: int  # the iteration

    def at(self, number: int) -> Cell:
        """Return the content at a later iteration."""
        later = self.n * (number - self.since) if self.kind == DECODE else 0
        return self._replace(start=self.start + later, since=number)


EMPTY = Cell(-1, FREE, 0, 0, 0, 0)


class Grid:
    """Lines and their requests. A request gets the lowest free line."""

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}  # by line, of those that are not free
        self._line: dict[int, int] = {}  # by request
        self._free: list[int] = []
        self._lines = itertools.count()
        # requests and flags of idle ones, if all of them were decoding or idle
        self._steady: tuple[list[int], list[bool]] | None = None

    def changes(
        self, number: int, iteration: Iteration, skipped: Sequence[Skipped], drafts: Drafted
    ) -> list[tuple[int, Cell]]:
        """Return the lines whose content at iteration `number` does not follow from the last."""
        rows = iteration.rows
        ids = [row[0].id for row in rows]
        idle = [row[5] for row in rows]
        if (ids, idle) == self._steady and not skipped and not drafts:
            return []  # most iterations
        changes: dict[int, Cell] = {}  # by line; one that is freed and given at once has one change
        running = dict.fromkeys(ids) | {skip.inference.id: None for skip in skipped}
        for id_ in [id_ for id_ in self._line if id_ not in running]:
            line = self._line.pop(id_)
            del self.cells[line]
            heapq.heappush(self._free, line)
            changes[line] = EMPTY._replace(since=number)
        rejected = (n - accepted for n, accepted in drafts)
        contents = [_cell(row, next(rejected) if row.drafts else 0, number) for row in rows]
        for skip in skipped:
            contents.append(Cell(skip.inference.id, skip.kind, 0, skip.computed, 0, number))
        for cell in contents:
            line = self._line_of(cell.id)
            if not _follows(self.cells.get(line, EMPTY), cell):
                changes[line] = self.cells[line] = cell
        steady = not drafts and all(cell.kind in (DECODE, IDLE) for cell in contents)
        self._steady = (ids, idle) if steady else None
        return list(changes.items())

    def has(self, id_: int) -> bool:
        return id_ in self._line

    def _line_of(self, id_: int) -> int:
        if id_ not in self._line:
            self._line[id_] = heapq.heappop(self._free) if self._free else next(self._lines)
        return self._line[id_]


def _cell(row: Row, rejected: int, number: int) -> Cell:
    return Cell(row[0].id, _kind(row), row.n_tokens - rejected, row.start, rejected, number)


def _kind(row: Row) -> str:
    if row.idle:
        return IDLE
    if row.recomputed:
        return RECOMPUTE
    return DECODE if row.decodes else PREFILL


def _follows(before: Cell, cell: Cell) -> bool:
    """True if a line with the content `before` has this one at its iteration."""
    if before.id != cell.id or before.kind != cell.kind or cell.kind not in _LASTING:
        return False
    return cell.kind != DECODE or cell == before.at(cell.since)


class QueueSnapshot(NamedTuple):
    """Blocks of the pool, and the first waiting requests in the order."""

    free_blocks: int  # with those whose content can still be found
    shared_blocks: int  # that several requests have
    cached_blocks: int  # free ones whose content can still be found
    queue: list[Inference]
    n_blocks: int  # in the pool


class Note(NamedTuple):
    """An item of a list of the format, as JSON. of: an iteration's changes, or a request's id."""

    kind: str  # one of LISTS
    text: str
    of: Any = None


LISTS = ("iterations", "requests", "ended", "snapshots")


class History:
    """Notes about a server, in order.

    keep: number of iterations; None: all. prompt: returns the beginning of a request's prompt, or
    None where it may not be shown. begin: the first cursor.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        keep: int | None = KEPT,
        prompt: Callable[[Inference], str | None] = lambda inference: None,
        begin: int = 0,
    ):
        self.about = dict(about)
        self.zero = 0.0  # clock time that is written as 0
        self._keep, self._prompt = keep, prompt
        self._next = self._first = 0  # numbers of the next iteration, and of the oldest kept
        self._dropped = begin - 1  # number of notes that are no longer kept
        self._notes: deque[Note] = deque()
        self.restart()

    def restart(self) -> None:
        """Drop all notes, since some are missing."""
        self._dropped = self._cursor + 1  # so that no cursor is up to date
        self._notes.clear()
        self._first = self._next
        self._grid = Grid()
        self._known: set[int] = set()  # requests that have a note
        self._ended: set[int] = set()  # those that have ended and may still have a row
        self._snapshot: Any = None  # the last one
        # state before the oldest note: lines, and requests in flight
        self._cells: dict[int, Cell] = {}
        self._requests: dict[int, Note] = {}

    @property
    def _cursor(self) -> int:
        """Number of all notes so far."""
        return self._dropped + len(self._notes)

    def iteration(
        self,
        at: float,
        seconds: float,
        iteration: Iteration,
        skipped: Sequence[Skipped] = (),
        drafts: Drafted = (),
    ) -> None:
        """Note a finished iteration. at: its beginning. drafts: as IterationRecord has them."""
        for row in iteration.rows:
            self._introduce(row[0])
            if row.idle and row[0].answered_at is not None:  # before the first note
                self.answered(row[0])
        changes = self._grid.changes(self._next, iteration, skipped, drafts)
        texts = ",".join(
            [
                f'{line},{cell.id},"{cell.kind}",{cell.n},{cell.start},{cell.rejected}'
                for line, cell in changes
            ]
        )
        begin, end = round(at - self.zero, 6), round(at + seconds - self.zero, 6)
        text = (
            f"[{begin:.6f},{end - begin:.6f},{iteration.waiting},{iteration.running},"
            f"{iteration.blocks_used},{iteration.padding},[{texts}]]"
        )
        self._notes.append(Note("iterations", text, changes))
        self._next += 1
        if gone := [id_ for id_ in self._ended if not self._grid.has(id_)]:
            self._ended.difference_update(gone)
            self._known.difference_update(gone)
        if self._keep is not None and self._next - self._first > self._keep:
            self._forget_oldest()

    def answered(self, inference: Inference) -> None:
        """Note that a request has its answer, or its error."""
        i = inference
        assert i.answered_at is not None
        if i.id in self._ended:
            return
        self._introduce(i)
        self._ended.add(i.id)
        ttft = round(i.token_times[0] - i.arrived_at, 6) if i.token_times else None
        values = [i.id, round(i.answered_at - self.zero, 6), i.state.value, ttft, len(i.tokens)]
        self._notes.append(Note("ended", _to_json(values), i.id))

    def snapshot(self, snapshot: QueueSnapshot) -> None:
        """Note the pool's blocks and the waiting requests, if they have changed."""
        free, shared, cached, queue, self.about["n_blocks"] = snapshot
        for inference in queue:
            self._introduce(inference)
        values = [free, shared, cached, [inference.id for inference in queue]]
        if values != self._snapshot:
            self._snapshot = values
            self._notes.append(Note("snapshots", _to_json([self._next, *values])))

    def since(self, cursor: int | None, now: float, **more: Any) -> str:
        """Return the notes since a cursor, as JSON; without a known one, all that are kept."""
        notes, first = self._notes, self._first
        head = {"about": self.about, "now": round(now - self.zero, 6), "cursor": self._cursor}
        restart = cursor is None or not self._dropped <= cursor <= self._cursor
        new: list[Note] = []
        if restart:
            new = [*self._requests.values(), *notes]
            cells = sorted(self._cells.items())
            more["lines"] = [[line, *cell.at(first)[:5]] for line, cell in cells]
        elif cursor is not None:
            new = list(itertools.islice(notes, cursor - self._dropped, None))
        texts = {name: [note.text for note in new if note.kind == name] for name in LISTS}
        head |= {"restart": restart, "first": self._next - len(texts["iterations"])}
        head |= {"next": self._next} | more
        lists = ",".join(f'"{name}":[{",".join(items)}]' for name, items in texts.items())
        return f"{_to_json(head)[:-1]},{lists}}}"

    def _introduce(self, inference: Inference) -> None:
        """Note a request, before its id is used for the first time. Below 0 it has no name."""
        i = inference
        if i.id >= 0 and i.id not in self._known:
            self._known.add(i.id)
            values = [i.id, round(i.arrived_at - self.zero, 6), len(i.prompt_ids), i.num_tokens]
            text = _to_json([*values, i.user, i.priority, self._prompt(i), i.adapter])
            self._notes.append(Note("requests", text, i.id))

    def _forget_oldest(self) -> None:
        """Drop the oldest iteration and the notes before it."""
        oldest = None
        while oldest is None or oldest.kind != "iterations":
            oldest = self._notes.popleft()
            self._dropped += 1
            if oldest.kind == "requests":
                self._requests[oldest.of] = oldest
            elif oldest.kind == "ended":
                self._requests.pop(oldest.of, None)
        self._first += 1
        for line, cell in oldest.of:
            if cell.kind == FREE:
                self._cells.pop(line, None)
            else:
                self._cells[line] = cell
