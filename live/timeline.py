"""A history as Chrome's trace events, which Perfetto and chrome://tracing open: a track a line,
slices for what it computes and for each request's waiting and running, counters.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the format.
Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from live.history import DECODE, IDLE, PREFILL, RECOMPUTE, SET_ASIDE, SHORT
from live.reading import iterations

MOST_BYTES = 100_000_000  # of a file, which browsers still open
NAMES = {
    DECODE: "decode", PREFILL: "prefill", RECOMPUTE: "recompute", IDLE: "idle",
    SET_ASIDE: "paused", SHORT: "no budget left",
}  # fmt: skip
COLOURS = {  # of those that the viewer knows
    DECODE: "good", PREFILL: "rail_response", RECOMPUTE: "terrible", IDLE: "yellow",
    SET_ASIDE: "grey", SHORT: "grey",
}  # fmt: skip
SERVER, QUEUE = 1, 2  # processes, in the format's words


def events(history: Mapping[str, Any], last: int | None = None) -> Iterator[dict[str, Any]]:
    """Of a history: its JSON, parsed. last: so many iterations alone."""
    first = history["next"] - last if last is not None else 0
    about = history["about"]
    yield _named("process_name", SERVER, 0, f"{about['name']}: rows")
    yield _named("process_name", QUEUE, 0, f"{about['name']}: requests")
    lines: set[int] = set()
    first_at: dict[int, float] = {}  # admission of a request, by its id
    began_at: float | None = None  # what is told
    before = {id_ for _, id_, *_ in history.get("lines", ())}  # admitted nobody knows when
    for seen in iterations(history):
        for cell in seen.cells.values():
            first_at.setdefault(cell.id, seen.at)
        if seen.number < first:
            continue
        began_at = seen.at if began_at is None else began_at
        at, duration = 1e6 * seen.at, 1e6 * seen.seconds
        tokens = 0
        for line, cell in sorted(seen.cells.items()):
            if line not in lines:
                lines.add(line)
                yield _named("thread_name", SERVER, line + 1, f"line {line}")
            tokens += cell.n if cell.kind in (DECODE, PREFILL, RECOMPUTE) else 0
            yield {
                "ph": "X", "pid": SERVER, "tid": line + 1, "ts": at, "dur": duration,
                "name": f"{cell.id} {NAMES[cell.kind]}", "cat": NAMES[cell.kind],
                "cname": COLOURS[cell.kind],
                "args": {"request": cell.id, "iteration": seen.number, "start": cell.start,
                         "tokens": cell.n},
            }  # fmt: skip
        yield _counter("queue", at, {"waiting": seen.waiting})
        yield _counter("KV blocks", at, {"used": seen.blocks_used})
        yield _counter("tokens of an iteration", at, {"tokens": tokens})
        if seen.padding:
            yield _counter("padding rows", at, {"rows": seen.padding})
    ended = {id_: (at, outcome) for id_, at, outcome, *_ in history["ended"]}
    for id_, arrived_at, prompt_tokens, num_tokens, user, priority, _ in history["requests"]:
        until, outcome = ended.get(id_, (history["now"], "in flight"))
        if began_at is None or until < began_at:
            continue
        admitted_at = min(first_at.get(id_, until), until)
        told = {
            "prompt_tokens": prompt_tokens, "num_tokens": num_tokens, "user": user,
            "priority": priority, "outcome": outcome,
        }  # fmt: skip
        for name, begin, end in (
            ("waiting", admitted_at if id_ in before else arrived_at, admitted_at),
            ("running", admitted_at, until),
        ):
            if end > begin:
                head = {"cat": name, "id": id_, "pid": QUEUE, "tid": 1, "name": f"{id_} {name}"}
                yield head | {"ph": "b", "ts": 1e6 * begin, "args": told}
                yield head | {"ph": "e", "ts": 1e6 * end}


def text(history: Mapping[str, Any], last: int | None = None) -> str:
    """One JSON object of all events. Raises ValueError beyond MOST_BYTES."""
    parts = texts(history, last)
    whole = next(parts)
    if next(parts, None) is not None:
        raise ValueError(f"the timeline would have more than {MOST_BYTES:,} bytes")
    return whole


def texts(history: Mapping[str, Any], last: int | None = None) -> Iterator[str]:
    """JSON objects of its events, in order, each of MOST_BYTES at most."""
    mine: list[str] = []
    size = 0
    for event in events(history, last):
        line = json.dumps(event, separators=(",", ":"))
        if size + len(line) + 2 > MOST_BYTES - 100:
            yield _whole(mine)
            mine, size = [], 0
        mine.append(line)
        size += len(line) + 2
    yield _whole(mine)


def write(history: Mapping[str, Any], path: Path) -> list[Path]:
    """One file, or where that would be too large several: NAME.json, NAME-2.json, …"""
    paths = []
    for i, part in enumerate(texts(history), 1):
        paths.append(path if i == 1 else path.with_stem(f"{path.stem}-{i}"))
        paths[-1].write_text(part)
    return paths


def _whole(lines: list[str]) -> str:
    return '{"traceEvents":[\n' + ",\n".join(lines) + '\n],"displayTimeUnit":"ms"}\n'


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(name: str, at: float, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": SERVER, "tid": 0, "ts": at, "args": values}
