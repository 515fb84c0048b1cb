"""A history as Chrome's trace events, which Perfetto and chrome://tracing open: a track for each
line with slices of its tokens, slices of each request's waiting and running, and counters.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the format.
Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from live.history import DECODE, IDLE, NO_BUDGET, PAUSED, PREFILL, RECOMPUTE, UNKNOWN, iterations

MOST_BYTES = 100_000_000  # of a file that browsers still open
NAMES = {
    DECODE: "decode", PREFILL: "prefill", RECOMPUTE: "recompute", IDLE: "idle",
    PAUSED: "paused", NO_BUDGET: "no budget left", UNKNOWN: "unknown",
}  # fmt: skip
SERVER, QUEUE = 1, 2  # processes, in the format's words


def events(history: Mapping[str, Any], last: int | None = None) -> Iterator[dict[str, Any]]:
    """Return the events of a history (its JSON, parsed). last: of so many iterations alone."""
    first = history["next"] - last if last is not None else 0
    about = history["about"]
    yield _named("process_name", SERVER, 0, f"{about['name']}: rows")
    yield _named("process_name", QUEUE, 0, f"{about['name']}: requests")
    lines: set[int] = set()
    first_at: dict[int, float] = {}  # admission of a request, by its id
    began_at: float | None = None  # of the first iteration that is shown
    before = {id_ for _, id_, *_ in history.get("lines", ())}  # their admission is not known
    for iteration in iterations(history):
        for cell in iteration.cells.values():
            first_at.setdefault(cell.id, iteration.at)
        if iteration.number < first:
            continue
        began_at = iteration.at if began_at is None else began_at
        at, duration = 1e6 * iteration.at, 1e6 * iteration.seconds
        tokens: int | None = 0  # None: of a cell it is unknown
        for line, cell in sorted(iteration.cells.items()):
            if line not in lines:
                lines.add(line)
                yield _named("thread_name", SERVER, line + 1, f"line {line}")
            if cell.kind == UNKNOWN or cell.n < 0:
                tokens = None
            elif tokens is not None and cell.kind in (DECODE, PREFILL, RECOMPUTE):
                tokens += cell.n + cell.rejected
            yield {
                "ph": "X", "pid": SERVER, "tid": line + 1, "ts": at, "dur": duration,
                "name": f"{cell.id if cell.id >= 0 else '?'} {NAMES[cell.kind]}",
                "cat": NAMES[cell.kind],
                "args": {"request": cell.id, "iteration": iteration.number, "start": cell.start,
                         "tokens": cell.n, "rejected": cell.rejected},
            }  # fmt: skip
        if iteration.waiting >= 0:
            yield _counter("queue", at, {"waiting": iteration.waiting})
        if iteration.blocks_used >= 0:
            yield _counter("KV blocks", at, {"used": iteration.blocks_used})
        if tokens is not None:
            yield _counter("tokens of an iteration", at, {"tokens": tokens})
        if iteration.padding:
            yield _counter("padding rows", at, {"rows": iteration.padding})
    ended = {id_: (at, outcome) for id_, at, outcome, *_ in history["ended"]}
    for request in history["requests"]:
        id_, arrived_at, prompt_tokens, num_tokens, user, priority, _, adapter = request
        until, outcome = ended.get(id_, (history["now"], "in flight"))
        if began_at is None or until < began_at:
            continue
        admitted_at = min(first_at.get(id_, until), until)
        details = {
            "prompt_tokens": prompt_tokens, "num_tokens": num_tokens, "user": user,
            "priority": priority, "adapter": adapter, "outcome": outcome,
        }  # fmt: skip
        for name, begin, end in (
            ("waiting", admitted_at if id_ in before else arrived_at, admitted_at),
            ("running", admitted_at, until),
        ):
            if end > begin:
                head = {"cat": name, "id": id_, "pid": QUEUE, "tid": 1, "name": f"{id_} {name}"}
                yield head | {"ph": "b", "ts": 1e6 * begin, "args": details}
                yield head | {"ph": "e", "ts": 1e6 * end}


def text(history: Mapping[str, Any], last: int | None = None) -> str:
    """Return one JSON object of all events. Raises ValueError beyond MOST_BYTES."""
    lines: list[str] = []
    size = 0
    for event in events(history, last):
        lines.append(json.dumps(event, separators=(",", ":")))
        size += len(lines[-1]) + 2
        if size > MOST_BYTES:
            raise ValueError(f"the timeline would have more than {MOST_BYTES:,} bytes")
    return '{"traceEvents":[\n' + ",\n".join(lines) + '\n],"displayTimeUnit":"ms"}\n'


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(name: str, at: float, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": SERVER, "tid": 0, "ts": at, "args": values}
