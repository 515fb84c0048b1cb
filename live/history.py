"""Rows × iterations, as the page reads them: each running request has a line of its own, and of an
iteration is told what changed (docs/live.md has the format).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from live.snapshot import QueueSnapshot
from scheduling.inference import Inference, Iteration, State
from stats import times_of

KEPT = 2000  # iterations that a page can scrub through
QUEUE = 64  # of those that wait, how many are told
# what a line does; SET_ASIDE: its KV is kept and nothing is computed; SHORT: admitted, and no
# token budget left
DECODE, PREFILL, RECOMPUTE, IDLE, SET_ASIDE, SHORT, FREE = "d", "p", "r", "i", "s", "w", ""
_LASTING = {DECODE, IDLE, SET_ASIDE, SHORT}  # until it is told otherwise
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Bystander(NamedTuple):
    """Who runs and is not computed. kind: SET_ASIDE or SHORT."""

    inference: Inference
    kind: str
    computed: int  # its tokens so far


class Cell(NamedTuple):
    """What a line does from an iteration on."""

    id: int  # of the request
    kind: str
    n: int  # tokens
    start: int  # position of the first
    since: int  # number of the iteration

    def at(self, number: int) -> Cell:
        """The same, a later iteration."""
        later = number - self.since if self.kind == DECODE else 0
        return self._replace(start=self.start + later, since=number)


NOBODY = Cell(-1, FREE, 0, 0, 0)


class Bystanders:
    """Finds who runs and is not computed: who was there before, still runs and is not over (a
    batch that is compacted computes nothing for who is).
    """

    def __init__(self) -> None:
        self._seen: list[Inference] = []  # by the last iteration

    def of(self, iteration: Iteration) -> Sequence[Bystander]:
        """To be asked after each iteration, before anything changes."""
        rows = [row[0] for row in iteration.rows]
        before, self._seen = self._seen, rows
        if iteration.running == len(rows):
            return ()
        others = dict.fromkeys(before)
        for inference in rows:
            others.pop(inference, None)
        aside = [
            Bystander(i, SHORT if i.interruptions.paused_at is None else SET_ASIDE, i.computed)
            for i in others
            if i.state is State.RUNNING and not i.is_over
        ]
        self._seen = rows + [each.inference for each in aside]
        return aside

    def forget(self) -> None:
        self._seen = []


class Grid:
    """Which request has which line, and what it does there. The lowest free line is given."""

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}  # by line, of those that are not free
        self._line: dict[int, int] = {}  # by request
        self._free: list[int] = []
        self._lines = itertools.count()
        self._steady: tuple[list[int], list[bool]] | None = None  # requests and idle ones, if they
        # were all decoding or idle

    def changes(
        self, number: int, iteration: Iteration, aside: Sequence[Bystander]
    ) -> list[tuple[int, Cell]]:
        """Lines that do something else than they go on to do, by iteration `number`."""
        rows = iteration.rows
        ids = [row[0].id for row in rows]
        idle = [row[5] for row in rows]
        if (ids, idle) == self._steady and not aside:
            return []  # nobody came or left: most iterations
        found: list[tuple[int, Cell]] = []
        told = dict.fromkeys(ids) | {each.inference.id: None for each in aside}
        for id_ in [id_ for id_ in self._line if id_ not in told]:
            line = self._line.pop(id_)
            del self.cells[line]
            heapq.heappush(self._free, line)
            found.append((line, NOBODY._replace(since=number)))
        now = [
            *((row[0].id, _kind(row), row.n_tokens, row.start) for row in rows),
            *((each.inference.id, each.kind, 0, each.computed) for each in aside),
        ]
        for id_, kind, n, start in now:
            line = self._line_of(id_)
            if not _goes_on(self.cells.get(line, NOBODY), id_, kind, start, number):
                self.cells[line] = Cell(id_, kind, n, start, number)
                found.append((line, self.cells[line]))
        # who was freed and has somebody else at once is told once, by who is there
        found = list(dict(found).items())
        steady = all(kind in (DECODE, IDLE) for _, kind, _, _ in now)
        self._steady = (ids, idle) if steady else None
        return found

    def has(self, id_: int) -> bool:
        """Whether it has a line."""
        return id_ in self._line

    def _line_of(self, id_: int) -> int:
        if id_ not in self._line:
            self._line[id_] = heapq.heappop(self._free) if self._free else next(self._lines)
        return self._line[id_]


def _kind(row: Any) -> str:
    if row.idle:
        return IDLE
    if row.recomputed:
        return RECOMPUTE
    return DECODE if row.decodes else PREFILL


def _goes_on(before: Cell, id_: int, kind: str, start: int, number: int) -> bool:
    """A line that did `before` does this, in iteration `number`, without being told."""
    if before.id != id_ or before.kind != kind or kind not in _LASTING:
        return False
    return kind != DECODE or start - before.start == number - before.since


class Noted(NamedTuple):
    """Something that is told, as JSON. of: an iteration's changes, or a request's id."""

    what: str  # one of WHAT
    text: str
    of: Any = None


WHAT = ("iterations", "requests", "ended", "snapshots")


class History:
    """What is told of a server, in the order in which it happened.

    keep: iterations; None: all. prompt: the beginning of a request's prompt, where it may be told.
    begin: the first cursor.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        keep: int | None = KEPT,
        prompt: Callable[[Inference], str | None] = lambda inference: None,
        begin: int = 0,
    ):
        self.about = dict(about)
        self.zero = 0.0  # from which times are told
        self._keep, self._prompt = keep, prompt
        self._next = self._first = 0  # numbers of the next iteration, and of the oldest kept
        self._lost = begin - 1  # of all that was noted, how much is no longer kept
        self._noted: deque[Noted] = deque()
        self.restart()

    def restart(self) -> None:
        """What was is forgotten: something is missing in between."""
        # whoever is up to date is not any more
        self._lost = self._cursor + 1
        self._noted.clear()
        self._first = self._next
        self._grid = Grid()
        self._named: set[int] = set()  # requests that were told
        self._ended: set[int] = set()  # of those, who may still have a row
        self._scene: Any = None  # as told last
        # as things were before the oldest that is kept: lines, and requests in flight
        self._cells: dict[int, Cell] = {}
        self._requests: dict[int, Noted] = {}

    @property
    def _cursor(self) -> int:
        """How much was noted so far."""
        return self._lost + len(self._noted)

    def iteration(
        self, at: float, seconds: float, iteration: Iteration, aside: Sequence[Bystander] = ()
    ) -> None:
        """One is over. at: when it began."""
        for row in iteration.rows:
            self._name(row[0])
            if row.idle and row[0].answered_at is not None:  # before anybody looked
                self.answered(row[0])
        changes = self._grid.changes(self._next, iteration, aside)
        told = ",".join(
            [f'{line},{cell.id},"{cell.kind}",{cell.n},{cell.start}' for line, cell in changes]
        )
        begin, end = round(at - self.zero, 6), round(at + seconds - self.zero, 6)
        text = (
            f"[{begin:.6f},{end - begin:.6f},{iteration.waiting},{iteration.running},"
            f"{iteration.blocks_used},{iteration.padding},[{told}]]"
        )
        self._noted.append(Noted("iterations", text, changes))
        self._next += 1
        if gone := [id_ for id_ in self._ended if not self._grid.has(id_)]:
            self._ended.difference_update(gone)
            self._named.difference_update(gone)
        if self._keep is not None and self._next - self._first > self._keep:
            self._forget_oldest()

    def answered(self, inference: Inference) -> None:
        """It has its answer, or its error."""
        i = inference
        assert i.answered_at is not None
        if i.id in self._ended:
            return
        self._name(i)
        self._ended.add(i.id)
        ttft = round(times_of(i).ttft_s, 6) if i.token_times else None
        told = [i.id, round(i.answered_at - self.zero, 6), i.state.value, ttft, len(i.tokens)]
        self._noted.append(Noted("ended", _to_json(told), i.id))

    def snapshot(self, snapshot: QueueSnapshot) -> None:
        """The pool's blocks now, and who waits."""
        free, shared, cached, queue, self.about["n_blocks"] = snapshot
        for inference in queue:
            self._name(inference)
        told = [free, shared, cached, [inference.id for inference in queue]]
        if told != self._scene:
            self._scene = told
            self._noted.append(Noted("snapshots", _to_json([self._next, *told])))

    def since(self, cursor: int | None, now: float, **more: Any) -> str:
        """JSON of what was noted since a cursor; all that is kept for one that is not known, or for
        none.
        """
        noted, first = self._noted, self._first
        head = {"about": self.about, "now": round(now - self.zero, 6), "cursor": self._cursor}
        restart = cursor is None or not self._lost <= cursor <= self._cursor
        told: list[Noted] = []
        if restart:
            told = [*self._requests.values(), *noted]
            cells = sorted(self._cells.items())
            more["lines"] = [[line, *cell.at(first)[:4]] for line, cell in cells]
        elif cursor is not None:
            told = list(itertools.islice(noted, cursor - self._lost, None))
        texts = {what: [each.text for each in told if each.what == what] for what in WHAT}
        head |= {"restart": restart, "first": self._next - len(texts["iterations"])}
        head |= {"next": self._next} | more
        lists = ",".join(f'"{what}":[{",".join(mine)}]' for what, mine in texts.items())
        return f"{_to_json(head)[:-1]},{lists}}}"

    def _name(self, inference: Inference) -> None:
        """One is told, before it is named for the first time."""
        i = inference
        if i.id not in self._named:
            self._named.add(i.id)
            told = [i.id, round(i.arrived_at - self.zero, 6), len(i.prompt_ids), i.num_tokens]
            text = _to_json([*told, i.user, i.priority, self._prompt(i)])
            self._noted.append(Noted("requests", text, i.id))

    def _forget_oldest(self) -> None:
        """The oldest iteration, and what was noted before it."""
        oldest = None
        while oldest is None or oldest.what != "iterations":
            oldest = self._noted.popleft()
            self._lost += 1
            if oldest.what == "requests":
                self._requests[oldest.of] = oldest
            elif oldest.what == "ended":
                self._requests.pop(oldest.of, None)
        self._first += 1
        for line, cell in oldest.of:
            if cell.kind == FREE:
                self._cells.pop(line, None)
            else:
                self._cells[line] = cell
