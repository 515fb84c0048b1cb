"""Recordings of a scheduler's calls and their results: enough to make the same calls again, and to
compare the results (`replay`).

A call that changes nothing is not recorded: `expire` when nothing is due, and `fail` of finished
requests. Of tokens, their number is recorded and the keys of blocks, which are hashes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from scheduling.building import build_scheduler
from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration, Row
from scheduling.scheduler import Scheduler

Entry = dict[str, Any]
VERSION = 1  # the entries' version; a replay takes no other
END: Entry = {"end": True}  # the last one of a server that was not killed
# fields of each row, in this order; its KV blocks are those that it begins to fill. A row of two
# numbers has the values of the others
ROW: Entry = {"id": None, "start": None}
ROW |= {"n_tokens": 1, "samples": 1, "idle": 0, "recomputed": 0, "blocks": []}
# fields of a request's inferences, recorded where they are not the default
OPTIONAL = {
    each.name: each.default
    for each in fields(Inference)
    if each.name
    in ("deadline", "streamed", "user", "adapter", "priority", "queue_timeout_s", "prompt_only")
}
SLO = {"slo_ttft_ms": "ttft_ms", "slo_tpot_ms": "tpot_ms", "slo_class": "name"}  # its fields
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def gap(reason: str) -> Entry:
    """The entry where others are missing."""
    return {"gap": reason}


def record(settings: Any, write: Callable[[Entry], None]) -> Scheduler:
    """Build the scheduler of a server's settings. `write` gets an entry for each call; the first
    has the settings that `build_scheduler` reads.

    `write` must be quick, and raise nothing; `line_of` makes a line of an entry.
    """
    read = _ReadSettings(settings)
    scheduler = build_scheduler(read, partial(RecordingScheduler, write))
    write({"recording": VERSION, "settings": read.values})
    return scheduler


def line_of(entry: Entry) -> str:
    """An entry as a line of JSON, without values that are zero, empty or none. Takes longer than to
    note the entry, so the thread that writes calls it.
    """
    line = dict(entry)
    iteration: Iteration | None = line.pop("iteration", None)
    if iteration is not None:
        blocks, values = line.pop("blocks"), iteration._asdict()
        rows = [_row(row, blocks.get(i)) for i, row in enumerate(values.pop("rows"))]
        line |= values | {"rows": rows}
    return _to_json({name: value for name, value in line.items() if value})


def _row(row: Row, blocks: list[int] | None) -> list[Any]:
    """Return a row in the form of ROW."""
    id_, start = row.inference.id, row.start
    if row.n_tokens == 1 and row.samples and not (row.idle or row.recomputed or blocks):
        return [id_, start]
    flags = int(row.samples), int(row.idle)
    return [id_, start, row.n_tokens, *flags, row.recomputed, blocks or []]


class RecordingScheduler(Scheduler):
    """Scheduler that gives `write` an entry for each call that may change it, in order."""

    def __init__(self, write: Callable[[Entry], None], *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._write = write
        self._calls = 0

    @contextlib.contextmanager
    def _called(self, call: str, **inputs: Any) -> Iterator[Entry]:
        """Yield the entry of a call, to which its results or its error are added."""
        self._calls += 1
        entry = {"n": self._calls, "call": call, **inputs}
        try:
            yield entry
        except BaseException as error:
            entry["error"] = error.code if isinstance(error, ServingError) else type(error).__name__
            raise
        finally:
            self._write(entry)

    def _ending(
        self, make: Callable[[], list[Inference]], call: str, **inputs: Any
    ) -> list[Inference]:
        """Make a call, and record it with the inferences that it ended."""
        with self._called(call, **inputs) as entry:
            answered = make()
            entry["answered"] = _ids(answered)
        return answered

    def enqueue(self, inferences: Sequence[Inference], now: float) -> None:
        with self._called("enqueue", now=now, group=_members(inferences)) as entry:
            super().enqueue(inferences, now)
            entry["ids"] = _ids(inferences)

    def schedule(self, now: float) -> tuple[Iteration, float | None]:
        proposed = {str(i.id): len(i.drafts.ids) for i in self.running.values() if i.drafts.ids}
        with self._called("schedule", now=now, drafts=proposed) as entry:
            iteration, wake_at = super().schedule(now)
            size = self.limits.block_size
            entry["iteration"], entry["wake_at"] = iteration, wake_at
            entry["blocks"] = {
                i: row.blocks[row.start // size : -(-(row.start + row.n_tokens) // size)]
                for i, row in enumerate(iteration.rows)
                if (row.n_tokens > 1 or row.start % size == 0) and not row.idle
            }
        return iteration, wake_at

    def apply(self, iteration: Iteration, ids: Iterable[int], now: float) -> list[Inference]:
        keyed = [
            (row.inference.id, row.inference.prefix.keys, len(row.inference.prefix.keys))
            for row in iteration.rows
            if row.inference.prefix is not None
        ]
        with self._called("apply", now=now) as entry:
            answered = super().apply(iteration, ids, now)
            entry["stopped"] = [
                row.inference.id for row in iteration.rows if row.inference.stopped and not row.idle
            ]
            entry["keys"] = {str(id_): _hex(keys[n:]) for id_, keys, n in keyed if len(keys) > n}
            entry["tokens"] = {
                str(row.inference.id): row.inference.computed - row.start
                for row in iteration.rows
                if row.drafts and row.inference.computed > row.start
            }
            entry["answered"] = _ids(answered)
        return answered

    def fail(
        self, inferences: Iterable[Inference], error: ServingError, now: float
    ) -> list[Inference]:
        inferences = list(inferences)
        unfinished = _ids(each for each in inferences if each.answered_at is None)
        fail = partial(super().fail, inferences, error, now)
        if not unfinished:
            return fail()
        return self._ending(fail, "fail", now=now, ids=unfinished, why=error.code)

    def expire(self, now: float) -> list[Inference]:
        due, expire = self.next_deadline(), partial(super().expire, now)
        return expire() if due is None or due > now else self._ending(expire, "expire", now=now)

    def limit_blocks(self, n_blocks: int, now: float) -> list[Inference]:
        limit_blocks = partial(super().limit_blocks, n_blocks, now)
        return self._ending(limit_blocks, "limit_blocks", now=now, n_blocks=n_blocks)

    def forget_prefixes(self) -> None:
        with self._called("forget_prefixes"):
            super().forget_prefixes()

    def forget_adapter(self, name: str) -> None:
        with self._called("forget_adapter", name=name):
            super().forget_adapter(name)


def _ids(inferences: Iterable[Inference]) -> list[int]:
    """Ids of inferences that were ever queued."""
    return [inference.id for inference in inferences if inference.id >= 0]


def _hex(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _members(group: Sequence[Inference]) -> list[Entry]:
    """A request's inferences, in order; one that has a leader shares its prompt and its keys."""
    places = {id(member): place for place, member in enumerate(group)}
    members = []
    for inference in group:
        member: Entry = {"num_tokens": inference.num_tokens, "seed": inference.sampling.seed}
        if inference.leader is not None:
            member["leader"] = places[id(inference.leader)]
        else:
            member["prompt_tokens"] = len(inference.prompt_ids)
            if inference.prefix is not None:
                member["keys"] = _hex(inference.prefix.keys)
        for name, default in OPTIONAL.items():
            if (value := getattr(inference, name)) != default:
                member[name] = value
        limits = {name: getattr(inference.slo, field) for name, field in SLO.items()}
        members.append(member | {name: value for name, value in limits.items() if value})
    return members


class _ReadSettings:
    """Settings that remember which were read."""

    def __init__(self, settings: Any):
        self.values: Entry = {}
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        self.values[name] = value = getattr(self._settings, name)
        return value
